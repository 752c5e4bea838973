"""When streams wait for each other: only while the loop's thread is busy, and not for long."""

import asyncio
import time

from router.frontend.http.connection import Deliveries
from router.frontend.http.pace import LONGEST_NS, Pace
from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script

MS = 1_000_000


def holds_after(pace: Pace, other_ns: int, passes: int) -> list[int]:
    """Let passes come behind so much other work of the loop, beyond the delay."""
    holds = []
    for _ in range(passes):
        pace.passed(pace.hold_ns + other_ns)
        holds.append(pace.hold_ns)
    return holds


def test_nothing_is_held_back_while_the_loop_keeps_up():
    assert set(holds_after(Pace(), MS, 1000)) == {0}


def test_the_more_other_work_the_longer_up_to_a_limit():
    holds = holds_after(Pace(), 20 * MS, 60)
    assert holds == sorted(holds)
    assert 0 < holds[0] < 20 * MS < holds[-1] < 40 * MS
    assert LONGEST_NS - MS < holds_after(Pace(), 10**9, 60)[-1] <= LONGEST_NS


def test_it_ends_step_by_step_when_other_work_gets_less():
    pace = Pace()
    holds_after(pace, 50 * MS, 60)
    holds = holds_after(pace, 0, 60)
    assert holds == sorted(holds, reverse=True)
    assert holds[0] > 50 * MS > MS > holds[-1]


def test_a_loop_with_nothing_to_do_ends_it_at_once():
    pace = Pace()
    holds_after(pace, 50 * MS, 60)
    pace.passed(MS)
    assert pace.hold_ns == 0


async def test_other_work_before_a_pass_delays_the_next_one():
    deliveries = Deliveries()
    deliveries.add(lambda: None)
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass
    await asyncio.sleep(0)
    assert 5 * MS < deliveries._pace.hold_ns < 20 * MS


async def test_what_comes_while_a_pass_is_held_back_goes_out_with_it():
    deliveries, written = Deliveries(), []
    news = [lambda: written.append("a"), lambda: written.append("b")]
    deliveries._pace.hold_ns = 300_000_000
    deliveries.add(news[0])
    await asyncio.sleep(0.005)
    deliveries.add(news[1])
    deliveries.add(news[0])
    assert written == []
    await asyncio.sleep(0.4)
    assert written == ["a", "b"]


async def test_a_stream_has_the_same_bytes_when_passes_are_held_back(make_fleet, monkeypatch):
    fleet = await make_fleet({"decode-0": Script(step_s=0.002)})
    bodies, pieces = [], []
    for hold_ns in (0, 24_000_000):
        monkeypatch.setattr(
            Pace, "passed", lambda self, *_, hold=hold_ns: setattr(self, "hold_ns", hold)
        )
        count = 0
        asked = {"model": MODEL, "prompt": "hi", "max_tokens": 60, "stream": True, "seed": 7}
        for _ in range(2):  # the second one from its first token on
            raw = b""
            async with fleet.http.stream("POST", "/v1/completions", json=asked) as response:
                async for part in response.aiter_raw():
                    raw, count = raw + part, count + 1
        bodies.append([line.split(b'"choices"')[-1] for line in raw.split(b"\n\n")])
        pieces.append(count)
    assert bodies[0] == bodies[1]
    assert pieces[1] < pieces[0] / 2


async def test_the_first_token_is_never_held_back(make_fleet, monkeypatch):
    monkeypatch.setattr(Pace, "passed", lambda self, *_: setattr(self, "hold_ns", 500_000_000))
    fleet = await make_fleet({"decode-0": Script(step_s=0.01)})
    asked = {"model": MODEL, "prompt": "hi", "max_tokens": 20, "stream": True}
    for _ in range(2):  # before the second one passes are held back
        began_s = time.monotonic()
        async with fleet.http.stream("POST", "/v1/completions", json=asked) as response:
            parts = response.aiter_raw()
            assert b'"text":"' in await anext(parts)
            first_s = time.monotonic() - began_s
            async for _ in parts:
                pass
    assert first_s < 0.3 < 0.45 < time.monotonic() - began_s
