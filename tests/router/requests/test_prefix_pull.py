"""A router names a worker that holds what the chosen one lacks of a prompt."""

import asyncio
import time
from dataclasses import replace
from time import monotonic_ns

import pytest
from batonpb import common_pb2 as common
from batonpb import decode_pb2 as pb

from baton.registry.types import EventBatch
from baton.types.block_hashes import block_hashes
from baton.wire.capability import refusal
from baton.wire.fleet_token import FleetToken
from baton.wire.submission import prefix_request_id
from router.routing.reports.request_reports import report_of
from tests.router.requests.fake_links import FakeLink, fake_gateway, request, run

PROMPT = tuple(range(1000))
BLOCKS = len(PROMPT) // 16


@pytest.fixture
def fleet(model):
    """The first of two workers holds the prompt and is busy."""
    gateway = fake_gateway(model)
    holder, idle = FakeLink(gateway, "decode-0"), FakeLink(gateway, "decode-1")
    tell(gateway, holder, PROMPT)
    say(holder, queued_prompt_tokens=100_000)
    return gateway, holder, idle


def tell(gateway, link, tokens):
    seed = gateway.placer.hash_seed(request(), link.capabilities)
    gateway.prefix_index.apply(
        EventBatch(
            incarnation=link.incarnation, sequence=1, stored=tuple(block_hashes(seed, tokens))
        )
    )


def say(link, **fields):
    status = common.WorkerStatus()
    status.CopyFrom(link.status)
    for name, value in fields.items():
        setattr(status, name, value)
    link.status = status


def submission(gateway, link, **fields):
    gateway.submit(request(prompt=PROMPT, **fields), asyncio.Event())
    return (link.sent("submit") + link.unary)[-1]


async def test_the_idle_worker_is_told_who_holds_the_prompt(fleet):
    gateway, holder, idle = fleet
    sent = submission(gateway, idle)
    assert sent.prefix.worker_id == "decode-0" and sent.prefix.blocks == BLOCKS
    assert sent.prefix.incarnation == holder.incarnation and sent.prefix.address == holder.address


@pytest.mark.parametrize("why", ["all rows are wanted", "dead", "forgotten", "switched off"])
async def test_nobody_is_named_who_cannot_give(fleet, model, why):
    gateway, holder, idle = fleet
    fields = {}
    if why == "all rows are wanted":
        fields = {"pooling": "mean"}
    elif why == "dead":
        holder.live = False
    elif why == "forgotten":
        gateway.prefix_index.forget(holder.incarnation)
    else:
        gateway.placer._settings = replace(gateway.placer._settings, pull_prefixes=False)
    assert not (submission(gateway, idle, **fields)).HasField("prefix")


async def test_a_worker_that_drains_gives_what_its_answers_need_elsewhere(model):
    gateway = fake_gateway(model)
    leaving, other = FakeLink(gateway, "decode-0"), FakeLink(gateway, "decode-1")
    say(other, queued_prompt_tokens=10_000)
    submission(gateway, leaving)
    answer = tuple(range(2000, 2040))
    leaving.say(tokens=[run(0, answer)])
    tell(gateway, leaving, PROMPT + answer)
    say(leaving, state="draining")
    leaving.say(status=leaving.status)
    assert not other.sent("submit") + other.unary, "the other one may leave as well"
    await asyncio.sleep(0.6)
    leaving.say(status=leaving.status)
    sent = (other.sent("submit") + other.unary)[-1]
    assert sent.emitted and sent.prefix.worker_id == "decode-0"
    assert sent.prefix.blocks == (len(PROMPT) + len(answer)) // 16


NEAR, FAR = 400, 1000  # tokens that they hold
TOKEN = FleetToken("a-fleet-token")


@pytest.fixture
def unlike(model):
    """Of three workers two are busy: one holds most, and one a part of it, over a faster edge."""
    gateway = fake_gateway(model, fleet_token=TOKEN)
    near, far, idle = (FakeLink(gateway, f"decode-{number}") for number in range(3))
    for link, tokens in ((near, NEAR), (far, FAR)):
        tell(gateway, link, PROMPT[:tokens])
        say(link, queued_prompt_tokens=100_000)
    edge(idle, near, 1e10)
    edge(idle, far, 1.5e8)
    return gateway, near, far, idle


def edge(link, source, bytes_per_s):
    status = common.WorkerStatus()
    status.CopyFrom(link.status)
    status.edges.add(prefill_worker_id=source.worker_id, bytes_per_s=bytes_per_s)
    link.status = status


async def test_who_is_near_is_named_first_and_then_who_has_more(unlike):
    gateway, near, far, idle = unlike
    sent = submission(gateway, idle)
    sources = [sent.prefix, *sent.prefix_then]
    assert [(one.worker_id, one.blocks) for one in sources] == [
        ("decode-0", NEAR // 16),
        ("decode-1", FAR // 16),
    ]
    for number, (source, holder) in enumerate(zip(sources, (near, far), strict=True)):
        assert (source.incarnation, source.address) == (holder.incarnation, holder.address)
        pull = (prefix_request_id("r", number), holder.incarnation, idle.incarnation)
        assert refusal(source.capability, TOKEN, *pull, time.time()) == ""
    told = report_of(gateway.kept, "r")["prefix_from"]
    assert told == [
        {"worker_id": "decode-0", "blocks": NEAR // 16},
        {"worker_id": "decode-1", "blocks": FAR // 16},
    ]


@pytest.mark.parametrize("gone", [0, 1])
async def test_a_dead_source_is_no_link(unlike, gone):
    gateway, *_, idle = unlike
    unlike[1 + gone].live = False
    sent = submission(gateway, idle)
    assert sent.prefix.worker_id == f"decode-{1 - gone}" and not sent.prefix_then


async def test_blocks_that_a_source_will_have_soon_are_not_pulled(unlike):
    gateway, _, far, idle = unlike
    gateway.prefix_index.forget(far.incarnation)
    seed = gateway.placer.hash_seed(request(), far.capabilities)
    hashes = b"".join(block_hashes(seed, PROMPT))
    gateway.prefix_index.expect(far.incarnation, hashes, monotonic_ns())
    sent = submission(gateway, idle)
    assert sent.prefix.worker_id == "decode-0" and not sent.prefix_then


async def test_a_prefill_worker_that_replaces_another_gets_words_of_its_own(model):
    """A router's word is for one reader: those of the first one were refused as forged."""
    gateway = fake_gateway(model, fleet_token=TOKEN)
    names = ("decode-0", "prefill-0", "prefill-1", "prefill-2")
    decode, holder, *others = (FakeLink(gateway, name) for name in names)
    tell(gateway, holder, PROMPT)
    say(holder, queued_prompt_tokens=100_000)
    sent = submission(gateway, decode, mode="disaggregated")
    _, second = sorted(others, key=lambda link: link.worker_id != sent.prefill.worker_id)
    assert sent.prefix.worker_id == holder.worker_id != sent.prefill.worker_id

    def replaced(failed):
        needed = pb.PrefillNeeded(request_id="r", attempt=1, failed=failed)
        decode.say(prefill_needed=[needed])
        return decode.sent("replacement")[-1]

    answer = replaced(sent.prefill)
    assert answer.prefill.worker_id == second.worker_id
    assert answer.prefix.worker_id == holder.worker_id and answer.prefix.blocks == BLOCKS
    pull = (prefix_request_id("r", 0), holder.incarnation, second.incarnation)
    assert refusal(answer.prefix.capability, TOKEN, *pull, time.time()) == ""

    answer = replaced(answer.prefill)
    assert answer.prefill.worker_id == holder.worker_id
    assert not answer.HasField("prefix"), "it holds them itself"
