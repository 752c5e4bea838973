"""When streams wait for each other: only while the loop's thread is busy, and not for long."""

import asyncio
import time

from router.frontend.http.connection import Deliveries
from router.frontend.http.pace import LONGEST_NS, Pace
from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script

WINDOW_NS = 50_000_000


class Thread:
    """Passes at the end of windows in which the thread was so busy."""

    def __init__(self) -> None:
        self.pace, self.now_ns, self.cpu_ns = Pace(), WINDOW_NS, 0
        self.pace.passed(self.now_ns, self.cpu_ns)

    def run(self, busy: float, windows: int, window_ns: int = WINDOW_NS) -> list[int]:
        holds = []
        for _ in range(windows):
            self.now_ns += window_ns
            self.cpu_ns += int(busy * window_ns)
            self.pace.passed(self.now_ns, self.cpu_ns)
            holds.append(self.pace.hold_ns)
        return holds


def test_nothing_is_held_back_while_the_loop_has_time():
    assert set(Thread().run(busy=0.8, windows=1000)) == {0}


def test_the_longer_it_has_none_the_longer_up_to_a_limit():
    holds = Thread().run(busy=0.95, windows=100)
    assert holds == sorted(holds)
    assert 0 < holds[0] < holds[5] < LONGEST_NS == holds[-1]


def test_it_ends_step_by_step_when_the_loop_has_time_again():
    thread = Thread()
    thread.run(busy=0.95, windows=100)
    assert thread.run(busy=0.7, windows=24)[-1] == 0


def test_a_long_silence_ends_it_at_once():
    thread = Thread()
    thread.run(busy=0.95, windows=100)
    assert thread.run(busy=0.01, windows=1, window_ns=10**9) == [0]


def test_between_short_of_time_and_at_leisure_it_stays():
    thread = Thread()
    hold_ns = thread.run(busy=0.95, windows=5)[-1]
    assert set(thread.run(busy=0.85, windows=50)) == {hold_ns}


def test_what_happens_within_a_moment_says_nothing():
    thread = Thread()
    assert thread.run(busy=1.0, windows=10, window_ns=2_000_000) == [0] * 10


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
