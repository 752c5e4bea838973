"""A router names a worker that holds what the chosen one lacks of a prompt."""

import asyncio
from dataclasses import replace

import pytest
from batonpb import common_pb2 as common

from engine.core.block_hashes import block_hashes
from registry.types import EventBatch
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
    seed = gateway._placer.hash_seed(request(), link.capabilities)
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
        gateway._placer._settings = replace(gateway._placer._settings, pull_prefixes=False)
    assert not (submission(gateway, idle, **fields)).HasField("prefix")


async def test_what_is_only_expected_there_is_not_asked_for(model):
    gateway = fake_gateway(model)
    holder, idle = FakeLink(gateway, "decode-0"), FakeLink(gateway, "decode-1")
    say(idle, queued_prompt_tokens=500)
    first = submission(gateway, holder)  # which will hold it, later
    assert not first.HasField("prefix")
    say(idle, queued_prompt_tokens=0)
    say(holder, queued_prompt_tokens=100_000)
    assert not (submission(gateway, idle, request_id="s")).HasField("prefix")


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
    sent = (other.sent("submit") + other.unary)[-1]
    assert sent.emitted and sent.prefix.worker_id == "decode-0"
    assert sent.prefix.blocks == (len(PROMPT) + len(answer)) // 16
