"""Work on bodies beside the event loop, and on it."""

import asyncio
from itertools import pairwise

import pytest

from router.memory import OneByOne


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
