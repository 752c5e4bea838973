"""Two routers that get siblings: the prefix is computed once; no router waits for a dead one."""

import asyncio
import os
import signal
from functools import partial
from time import monotonic

import msgspec
import pytest

from baton.registry.redis_store import Registry
from baton.registry.router_demands import RouterDemands
from baton.registry.types import EventBatch
from baton.types.block_hashes import block_hashes
from router.routing.peers import shared_prompts
from router.routing.peers.share_feed import ShareFeed
from router.routing.peers.shared_prompts import PromptNews
from router.routing.placement.computing_prompts import ComputingPrompt
from router.routing.placement.cost import WorkerLoad
from tests.router.conftest import until
from tests.router.requests.fake_links import FakeLink, fake_gateway, request, run

PREFIX = tuple(range(6000))
OWN = 500
WORKERS = 2


class Router:
    """A gateway with its tasks over the same Redis and the same workers as the others."""

    def __init__(self, model, url: str, others: list["Router"]) -> None:
        self.gateway = fake_gateway(model)
        self.links = [FakeLink(self.gateway, f"decode-{number}") for number in range(WORKERS)]
        for link, same in zip(self.links, others[0].links if others else (), strict=False):
            link.incarnation = same.incarnation
        self.registry = Registry(url, "test")
        demands = RouterDemands(self.registry)
        self.shares = ShareFeed(self.gateway, demands, lambda _: None, lambda _: None)

    async def start(self) -> None:
        self.shares.start()

    def submit(self, name: str, own: int, prefix=PREFIX):
        begin = 10_000 + own * 1000
        prompt = (*prefix, *range(begin, begin + OWN))
        return self.gateway.submit(request(name, prompt=prompt), asyncio.Event())

    def stored(self, incarnation: bytes) -> None:
        seed = self.gateway.placer.hash_seed(request(), self.links[0].capabilities)
        hashes = tuple(block_hashes(seed, PREFIX))
        batch = EventBatch(incarnation=incarnation, sequence=1, stored=hashes)
        self.gateway.prefix_index.apply(batch)

    async def die(self) -> None:
        """Stop without a word, as a process that is killed."""
        await self.shares._background.close()

    async def close(self) -> None:
        await self.die()
        self.gateway.end_all()
        await self.registry.close()


@pytest.fixture
async def routers(model, redis_server, monkeypatch):
    monkeypatch.setattr(shared_prompts, "_SHARE", 1.0)  # of 2.5 s: the machine may be busy
    monkeypatch.setattr(shared_prompts, "_MOST_S", 5.0)
    made: list[Router] = []
    for _ in range(2):
        made.append(Router(model, redis_server.url, made))
    for router in made:
        await router.start()
    await until(lambda: all(router.gateway.prompts.on for router in made))
    yield made
    for router in made:
        await router.close()


def placed(*requests) -> list:
    return [active for active in requests if active.decode_id]


def computing_link(router: Router, active) -> FakeLink:
    return next(link for link in router.links if link.worker_id == active.decode_id)


async def first_of_both(routers):
    """A sibling at each router, and a second one at each: the one that is placed, and the rest."""
    a, b = routers
    all_ = [(a, a.submit("a0", 0)), (b, b.submit("b0", 1)), (a, a.submit("a1", 2))]
    all_.append((b, b.submit("b1", 3)))
    assert not placed(*(active for _, active in all_)), "both have announced it"
    await until(lambda: placed(all_[0][1], all_[1][1]))
    await asyncio.sleep(0.1)
    first = next(pair for pair in all_ if pair[1].decode_id)
    return first, [pair for pair in all_ if pair is not first]


async def test_siblings_at_two_routers_at_once_are_computed_once(routers):
    (router, first), rest = await first_of_both(routers)
    assert first.id in ("a0", "b0")
    waits = [active for _, active in rest if not active.decode_id]
    assert len(waits) >= 1
    assert all(active.decode_id in (None, first.decode_id) for _, active in rest), (
        "in its queue, or in their router"
    )
    named = {
        event
        for _, active in rest
        for event, _ in active.record.timeline
        if event.startswith("waits for the prefix of")
    }
    assert any(f"{router.gateway.router_id}/{first.id}" in event for event in named)
    link = computing_link(router, first)
    for other in routers:
        other.stored(link.incarnation)
    link.say(tokens=[run(0, (5,), request_id=first.id)])
    await until(lambda: len(placed(*(active for _, active in rest))) >= 2)
    for _, active in rest:
        if active.decode_id:
            assert active.placement.chosen.uncached_tokens <= OWN + 16
    for other in routers:
        other.gateway.end_all()
    await until(lambda: not any(other.gateway.placer.computing for other in routers))
    assert all(not list(other.gateway.book.booked()) for other in routers)


async def test_siblings_of_a_router_that_dies_do_not_wait_for_it(routers):
    (router, first), rest = await first_of_both(routers)
    (other,) = (r for r in routers if r is not router)
    theirs = [active for owner, active in rest if owner is other and not active.decode_id]
    assert theirs, "they wait in their router"
    dead_s = monotonic()
    await router.die()
    await until(lambda: not other.gateway.prompts._others)
    assert monotonic() - dead_s < 4
    await until(lambda: placed(*theirs))
    assert first.record.error is None


async def test_redis_that_hangs_holds_nothing_up(routers, redis_server):
    (router, first), rest = await first_of_both(routers)
    (other,) = (r for r in routers if r is not router)
    theirs = [active for owner, active in rest if owner is other and not active.decode_id]
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        await until(lambda: not other.gateway.prompts.on, timeout_s=4.0)
        await until(lambda: placed(*theirs), timeout_s=3.0)
        fresh = [r.submit(f"late{n}", n, prefix=PREFIX[::-1]) for n, r in enumerate(routers)]
        assert len(placed(*fresh)) == 2, "nothing is announced now"
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    await until(lambda: all(r.gateway.prompts.on for r in routers))
    assert first.record.error is None


async def test_an_entry_that_is_not_read_back_holds_up_for_a_tenth_of_the_time_once(
    routers, redis_server, monkeypatch
):
    monkeypatch.setattr(shared_prompts, "_SHARE", 0.1)
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        before_s = monotonic()
        a = routers[0]
        first = a.submit("first", 0)
        assert not first.decode_id
        await until(lambda: first.decode_id)
        assert monotonic() - before_s < 0.6
        assert a.submit("other", 1, prefix=PREFIX[::-1]).decode_id, (
            "none is announced until Redis answers"
        )
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)


async def test_the_others_forget_a_request_that_leaves(routers):
    a, b = routers
    gone = a.submit("gone", 0)
    a.gateway.cancel(gone)
    assert a.gateway.admission.running == 0
    stays = b.submit("stays", 1)
    await until(lambda: stays.decode_id)
    await until(lambda: not b.gateway.prompts._others.get(a.gateway.router_id))
    assert gone.id not in a.gateway.active and not a.gateway._siblings._announced


async def test_short_prompts_and_routers_alone_send_nothing(model, routers, redis_server):
    a = routers[0]
    short = a.gateway.submit(request("short", prompt=range(50_000, 50_700)), asyncio.Event())
    assert short.decode_id
    assert not a.gateway.prompts.take()
    await routers[1].die()
    await until(lambda: not a.gateway.prompts.on)
    first = a.submit("first", 0)
    assert first.decode_id, "as without Redis"
    assert not a.gateway.prompts.take()


HASHES = bytes(range(160))


def entry(number: int, request_id: str = "r", **more) -> bytes:
    return msgspec.msgpack.encode(PromptNews("x", number, request_id, **more))


def prompt_at(worker: str, **more) -> ComputingPrompt:
    load = WorkerLoad(worker_id=worker, incarnation=worker.encode(), role="decode")
    fields = {"hashes": HASHES, "begin_blocks": 0, "starts_ns": 0, "pulls": False, **more}
    return ComputingPrompt(request_id="r", worker=load, **fields)


@pytest.fixture
def reader(model):
    """A gateway that has read of another router's prompt on a worker."""
    gateway = fake_gateway(model)
    gateway.prompts.tick()
    gateway.prompts.apply(entry(1, prompt=prompt_at("decode-0")))
    return gateway


@pytest.mark.parametrize("end", [{"computed": True}, {}, {"request_id": "", "open": ("s",)}])
def test_prompts_of_others_are_forgotten(reader, end):
    reader.prompts.apply(entry(2, "", open=("r",)))
    assert reader.placer.computing
    reader.prompts.apply(entry(3, **end))
    assert not reader.placer.computing


def test_a_prompt_moves_and_keeps_its_hashes_and_attracts_nothing_to_its_worker(reader):
    """The other router may still place it elsewhere, and its load is not booked here."""
    computing = reader.placer.computing
    reader.prompts.apply(entry(2, prompt=prompt_at("decode-1", hashes=b"", begin_blocks=4)))
    ((prompt, blocks),) = computing.shared(HASHES)
    assert (prompt.worker.worker_id, blocks, prompt.begin_blocks) == ("decode-1", 10, 4)
    held: dict[bytes, int] = {}
    computing.add_held(HASHES, held)
    assert held == {}


async def test_routers_say_twice_a_second_what_is_open_and_are_forgotten_without_that(reader):
    FakeLink(reader, "decode-0")
    own = reader.submit(request("own", prompt=range(6000)), asyncio.Event())
    reader.prompts.take()
    start_ns = reader.placer.clock_ns()
    for seconds in (0.6, 1.2, 2.1):
        reader.placer.clock_ns = partial(int, start_ns + seconds * 1e9)
        reader.prompts.tick()
        assert list(reader.prompts._others) == (["x"] if seconds < 2 else [])
        (said,) = reader.prompts.take()
        assert msgspec.msgpack.decode(said, type=PromptNews).open == (own.id,)


async def test_news_are_bounded_if_redis_does_not_keep_up(reader, monkeypatch):
    monkeypatch.setattr(shared_prompts, "_MOST_NEWS", 5)
    gateway = reader
    FakeLink(gateway, "decode-0")
    for number in range(9):
        prompt = tuple(range(number * 7000, number * 7000 + 6000))
        gateway.submit(request(f"r{number}", prompt=prompt), asyncio.Event())
    assert len(gateway.prompts.take()) <= 5
    gateway.end_all()


async def test_damaged_news_are_skipped(routers):
    a = routers[0]
    key = a.registry.key("prompts")
    await a.registry.send(("XADD", key, "*", "p", b"\xc1"), ("XADD", key, "*", "q", b"x"))
    (_, first), _ = await first_of_both(routers)
    assert first.decode_id and all(router.gateway.prompts.on for router in routers)
