"""Images of requests on their way to workers, and after the end."""

import asyncio

import pytest

from baton.engine.core.sequence import Kind
from baton.types.images import PromptImage, hashed_tokens
from baton.wire.submission import submit_from_wire
from tests.router.requests.fake_links import FakeLink, end, fake_gateway, request, run

IMAGE = PromptImage(b"a file", b"d" * 16, 3, 40, (9, 8))
PROMPT = tuple(range(64))


@pytest.fixture
async def fleet(model):
    gateway = fake_gateway(model)
    return gateway, FakeLink(gateway, "decode-0")


async def test_images_reach_the_engine_and_are_not_kept(fleet):
    gateway, link = fleet
    link.capabilities.images = True
    active = gateway.submit(request(prompt=PROMPT, images=(IMAGE,)), asyncio.Event())
    (sent,) = link.sent("submit")
    assert submit_from_wire(sent, "r", Kind.FULL).spec.images == (IMAGE,)
    assert any("the prompt has images" in event for event, _ in active.record.timeline)
    link.say(tokens=[run(0, [5], "length")], ends=[end()])
    assert active.record.ended
    gateway.expire_lingering(active)
    active.record.release_payload()
    assert active.request.images == ()


async def test_a_worker_of_an_older_version_never_answers_without_the_image(fleet):
    gateway, link = fleet
    active = gateway.submit(request(prompt=PROMPT, images=(IMAGE,)), asyncio.Event())
    assert link.sent("submit") == []
    assert active.record.error is not None
    assert "older version" in active.record.error.message


def test_equal_tokens_with_other_images_have_other_hashes():
    other = PromptImage(b"b file", b"e" * 16, 3, 40, (9, 8))
    one = request(prompt=PROMPT, images=(IMAGE,))
    assert list(one.hashed) == list(hashed_tokens(PROMPT, [IMAGE]))
    assert list(one.hashed) != list(request(prompt=PROMPT, images=(other,)).hashed)
    assert one.hashed[43:] == list(PROMPT[43:])
    assert request(prompt=PROMPT).hashed == PROMPT
