"""The clock that leaves out this process's standstills."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.alive_clock import TOLERANCE_NS, AliveClock, Standstills

S = 1_000_000_000


@given(st.lists(st.integers(0, 3 * S), max_size=30), st.lists(st.integers(0, 3 * S), min_size=1))
def test_it_never_decreases_and_no_gap_counts_for_more_than_the_tolerance(gaps, reads):
    standstills = Standstills()
    now_ns = 5 * S
    standstills.tick(now_ns)
    before_ns = standstills.alive_ns(now_ns)
    for gap_ns in gaps:
        for part in reads:
            read_ns = standstills.alive_ns(now_ns + min(part, gap_ns))
            assert before_ns <= read_ns <= before_ns + TOLERANCE_NS
        now_ns += gap_ns
        standstills.tick(now_ns)
        after_ns = standstills.alive_ns(now_ns)
        assert after_ns - before_ns == min(gap_ns, TOLERANCE_NS)
        before_ns = after_ns


def test_without_ticks_it_is_the_clock_that_it_is_read_by():
    standstills = Standstills()
    assert standstills.alive_ns(100 * S) == 100 * S
    standstills.tick(200 * S)
    standstills.stop(201 * S)
    lost_ns = S - TOLERANCE_NS
    assert standstills.alive_ns(300 * S) == 300 * S - lost_ns


async def test_a_timeout_does_not_count_the_time_in_which_the_loop_was_blocked():
    clock = AliveClock()
    running = asyncio.create_task(clock.run())
    await asyncio.sleep(0)
    answer = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.3, answer.set_result, "read")
    async with clock.timeout(0.6):
        time.sleep(1.0)  # noqa: ASYNC251 - the standstill
        # The answer was there in time, and is read only now.
        assert await answer == "read"
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.3):
            await asyncio.sleep(30)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_two_components_of_a_process_may_run_it():
    clock = AliveClock()
    first, second = (asyncio.create_task(clock.run()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    began_ns = clock.now_ns()
    time.sleep(0.8)  # noqa: ASYNC251 - a standstill that the second one measures
    assert clock.now_ns() - began_ns <= TOLERANCE_NS
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    began_ns = clock.now_ns()
    time.sleep(0.4)  # noqa: ASYNC251 - nothing measures it
    assert clock.now_ns() - began_ns >= 400_000_000
