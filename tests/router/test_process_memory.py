"""Work on bodies beside the event loop, and on it; memory of calls that have ended."""

import asyncio
import gc
from itertools import pairwise

import httpx
import pytest

from router.frontend.api.answer import Answer
from router.frontend.api.formats.answer_parts import AnswerParts
from router.frontend.http.protocol import LimitedProtocol
from router.frontend.off_loop import OneByOne
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script


async def test_others_have_a_turn_between_two_pieces_of_work():
    one_by_one, order = OneByOne(), []

    async def other() -> None:
        for _ in range(9):
            order.append("other")
            await asyncio.sleep(0)

    works = (one_by_one.run(lambda: order.append("work")) for _ in range(4))
    await asyncio.gather(*works, other())
    assert order.count("work") == 4
    assert all(pair != ("work", "work") for pair in pairwise(order))


async def test_work_that_fails_leaves_the_next_one_its_turn():
    one_by_one = OneByOne()
    with pytest.raises(ZeroDivisionError):
        await one_by_one.run(lambda: 1 // 0)
    assert await one_by_one.run(lambda: "done") == "done"
    assert one_by_one._locks


def test_each_event_loop_has_turns_of_its_own():
    one_by_one = OneByOne()

    async def three() -> list[int]:
        return await asyncio.gather(*(one_by_one.run(lambda: 1) for _ in range(3)))

    assert asyncio.run(three()) == asyncio.run(three()) == [1, 1, 1]


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0.002)})


def count_of(*kinds: type) -> int:
    return sum(type(one) in kinds for one in gc.get_objects())


async def test_calls_and_connections_leave_no_reference_cycles(fleet):
    """Routers collect cycles so rarely that connections in them would pile up."""
    message = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
    response = {"model": MODEL, "input": "hi", "max_output_tokens": 4}
    kinds = LimitedProtocol, Answer, AnswerParts
    gc.collect()
    before = count_of(*kinds)
    gc.disable()
    try:
        for stream in (False, True):
            for path, body in (
                ("/v1/chat/completions", {**message, "max_tokens": 4}),
                ("/v1/messages", {**message, "max_tokens": 4}),
                ("/v1/responses", response),
                ("/v1/chat/completions", {**message, "messages": 5}),
            ):
                async with httpx.AsyncClient(base_url=fleet.url) as client:
                    await client.post(path, json={**body, "stream": stream})
        async with (
            httpx.AsyncClient(base_url=fleet.url) as client,
            client.stream("POST", "/v1/chat/completions", json=message | {"stream": True}) as drop,
        ):
            await anext(drop.aiter_lines())
        assert len([*fleet.lane.gateway.kept.newest_first()]) == 7
        await until(lambda: count_of(*kinds) <= before)
    finally:
        gc.enable()
