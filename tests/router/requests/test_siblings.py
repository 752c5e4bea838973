"""Requests of a gateway whose prefix another one computes: they wait, and none is lost."""

import asyncio

import pytest
from batonpb import common_pb2 as common

from baton.registry.types import EventBatch
from baton.types.block_hashes import block_hashes
from tests.router.requests.fake_links import FakeLink, end, fake_gateway, request, run

PREFIX = tuple(range(3000))
OWN = 220  # tokens of each: too many to wait for in the queue of one worker
WORKERS = 2


@pytest.fixture
async def fleet(model):
    gateway = fake_gateway(model)
    return gateway, [FakeLink(gateway, f"decode-{number}") for number in range(WORKERS)]


def submit(gateway, name: str, own: int, own_tokens: int = OWN, **more):
    begin = 10_000 + own * 1000
    prompt = (*PREFIX, *range(begin, begin + own_tokens))
    return gateway.submit(request(name, prompt=prompt, **more), asyncio.Event())


def fork(gateway, links, siblings: int = 3):
    """Return the first request and its siblings, and the worker that computes it."""
    first = submit(gateway, "first", 0)
    waiting = [submit(gateway, f"s{number}", number + 1) for number in range(siblings)]
    holder = next(link for link in links if link.worker_id == first.decode_id)
    return first, waiting, holder


def names(links) -> list[str]:
    return [sent.request_id for link in links for sent in link.sent("submit") + link.unary]


def computed(gateway, link, name: str, attempt: int = 1) -> None:
    """The worker has stored the prefix, and sends the first token."""
    stored(gateway, link)
    link.say(tokens=[run(0, (5,), request_id=name, attempt=attempt)])


def stored(gateway, link) -> None:
    seed = gateway.placer.hash_seed(request(), link.capabilities)
    stored = tuple(block_hashes(seed, PREFIX))
    batch = EventBatch(incarnation=link.incarnation, sequence=1, stored=stored)
    gateway.prefix_index.apply(batch)


async def looked() -> None:
    await asyncio.sleep(0.1)


async def test_siblings_are_placed_when_their_prefix_is_there(fleet):
    gateway, links = fleet
    _, waiting, holder = fork(gateway, links)
    assert gateway.admission.running == 1, "they take no place"
    await looked()
    assert names(links) == ["first"]
    computed(gateway, holder, "first")
    await looked()
    assert {"first", "s0", "s1"} <= set(names(links))
    # One pulls the prefix to the other worker. The third waits for that, or behind the first two.
    (puller,) = [sibling for sibling in waiting if sibling.placement and sibling.placement.prefix]
    other = next(link for link in links if link is not holder)
    assert puller.decode_id == other.worker_id
    computed(gateway, other, puller.id)
    await looked()
    assert sorted(names(links)) == ["first", "s0", "s1", "s2"]
    assert gateway.admission.running == 4
    assert all(s.placement.chosen.uncached_tokens <= OWN + 16 for s in waiting)
    waits = [event for event, _ in waiting[0].record.timeline if event.startswith("waits")]
    assert waits == ["waits for the prefix of first"]


async def test_siblings_are_spread_over_idle_workers_that_pull_the_prefix(fleet):
    """The index has the last blocks after the first token, and only then can they be pulled."""
    gateway, links = fleet
    first = submit(gateway, "first", 0, 100)
    siblings = [submit(gateway, f"s{number}", number + 1, 100) for number in range(8)]
    holder = next(link for link in links if link.worker_id == first.decode_id)
    (other,) = (link for link in links if link is not holder)
    holder.say(tokens=[run(0, (5,), request_id="first")])
    await asyncio.sleep(0.05)
    queued = [sibling for sibling in siblings if sibling.decode_id]
    assert {sibling.decode_id for sibling in queued} == {first.decode_id}
    assert 1 <= len(queued) <= 5, "the others would queue for more than 0.1 s"
    stored(gateway, holder)
    await asyncio.sleep(0.05)
    (puller,) = [sibling for sibling in siblings if sibling.decode_id == other.worker_id]
    assert puller.placement.prefix
    computed(gateway, other, puller.id)
    await looked()
    placed = [sibling.decode_id for sibling in siblings]
    assert None not in placed and placed.count(other.worker_id) >= 2
    assert all(sibling.placement.chosen.uncached_tokens <= 100 + 16 for sibling in siblings)


async def test_a_prefix_is_not_spread_while_it_is_computed(model):
    """Sessions are spread over workers for later turns, which is no reason to compute it twice."""
    gateway = fake_gateway(model, pull_prefixes=False)
    for number in range(WORKERS):
        FakeLink(gateway, f"decode-{number}")
    busy = gateway.submit(request("busy", prompt=range(50_000, 50_400)), asyncio.Event())
    first = submit(gateway, "first", 0, 150)
    siblings = [submit(gateway, f"s{number}", number + 1, 150) for number in range(8)]
    assert busy.decode_id != first.decode_id
    assert {sibling.decode_id for sibling in siblings} <= {None, first.decode_id}
    assert sum(sibling.decode_id is not None for sibling in siblings) >= 4, "in its queue"
    gateway.end_all()


async def test_other_requests_are_not_behind_them(fleet):
    gateway, links = fleet
    fork(gateway, links)
    other = gateway.submit(request("other", prompt=range(50_000, 50_400)), asyncio.Event())
    assert other.decode_id is not None
    assert other.placement.chosen.terms.queue_s == 0.0


@pytest.mark.parametrize("how", ["dies", "its client leaves", "it fails"])
async def test_when_the_first_request_ends_early_one_sibling_computes_and_the_others_wait(
    fleet, how
):
    gateway, links = fleet
    first, waiting, holder = fork(gateway, links)
    other = next(link for link in links if link is not holder)
    if how == "dies":
        holder.live = False
        gateway.events.on_dead(holder, holder.incarnation, "killed", died=True)
    elif how == "its client leaves":
        gateway.cancel(first)
    else:
        fault = common.Error(code="internal_error", message="no", retryable=False)
        holder.say(ends=[end(request_id="first", error=fault)])
    await looked()
    assert all(sibling.record.error is None for sibling in waiting)
    placed = [sibling for sibling in waiting if sibling.decode_id]
    if how == "dies":
        assert first.decode_id == other.worker_id and first.record.error is None
        assert {sibling.decode_id for sibling in placed} <= {other.worker_id}  # in its queue
        next_one, next_holder = first, other
    else:
        assert placed == waiting[:1]
        next_one = waiting[0]
        next_holder = next(link for link in links if link.worker_id == next_one.decode_id)
    attempt = next_one.record.attempt
    computed(gateway, next_holder, next_one.id, attempt=attempt)
    await looked()
    assert all(sibling.decode_id for sibling in waiting)
    rest = [sibling for sibling in waiting if sibling is not next_one]
    assert all(sibling.placement.chosen.uncached_tokens <= OWN + 16 for sibling in rest)


async def test_a_waiting_sibling_can_leave(fleet):
    gateway, links = fleet
    _, waiting, holder = fork(gateway, links)
    gone = waiting[-1]
    assert gone.decode_id is None
    gateway.cancel(gone)
    computed(gateway, holder, "first")
    await looked()
    assert gone.id not in names(links) and gone.id not in gateway.active
    assert gateway.admission.running == 3 and gateway._siblings.waiting == 0
    gateway.end_all()
    assert gateway.admission.running == 0 and not gateway.placer.computing
