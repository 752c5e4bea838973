"""Clock that excludes the time in which this process could not have received anything.

A timeout, a lease or a budget blames a peer for a time without messages. While this process is
suspended (SIGSTOP, a blocked event loop, a starved core), messages wait unread, so that time must
not count. Each process has one clock, ``ALIVE``: monotonic time minus the suspensions.

    async with tasks.beside(ALIVE.run(), "alive clock"):   # measures suspensions meanwhile
        last_ns = ALIVE.now_ns()
        async with ALIVE.timeout(3.0):                     # as asyncio.timeout, on this clock
            await call.read()

If nothing runs the clock, it equals the monotonic clock.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import monotonic_ns

TICK_S = 0.1
TOLERANCE_NS = 250_000_000
"""Longest pause between two ticks that counts in full: an ordinary busy moment."""


class Standstills:
    """Total time without ticks. Does no I/O."""

    def __init__(self) -> None:
        self._lost_ns = 0
        self._ticked_ns: int | None = None  # None: not running

    def tick(self, now_ns: int) -> None:
        """Record that the process is running."""
        self._lost_ns += self._late_ns(now_ns)
        self._ticked_ns = now_ns

    def stop(self, now_ns: int) -> None:
        """Stop expecting ticks, so that the time from now on is no standstill."""
        self.tick(now_ns)
        self._ticked_ns = None

    def alive_ns(self, now_ns: int) -> int:
        """Return the monotonic time ``now_ns`` minus the standstills; it never decreases."""
        return now_ns - self._lost_ns - self._late_ns(now_ns)

    def _late_ns(self, now_ns: int) -> int:
        if self._ticked_ns is None:
            return 0
        return max(now_ns - self._ticked_ns - TOLERANCE_NS, 0)


class AliveClock:
    """Alive clock of one process."""

    def __init__(self) -> None:
        self._standstills = Standstills()
        self._runs = 0

    def now_ns(self) -> int:
        """Return monotonic nanoseconds minus the standstills of this process."""
        return self._standstills.alive_ns(monotonic_ns())

    async def run(self) -> None:
        """Measure standstills until cancelled. Several components may run it at once."""
        self._runs += 1
        try:
            while True:
                self._standstills.tick(monotonic_ns())
                await asyncio.sleep(TICK_S)
        finally:
            self._runs -= 1
            if not self._runs:
                self._standstills.stop(monotonic_ns())

    @contextlib.asynccontextmanager
    async def timeout(self, limit_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Raise TimeoutError when the block takes longer than ``limit_s`` on this clock."""
        async with asyncio.timeout(None) as block:
            limit = _Limit(self, block, limit_s)
            try:
                yield block
            finally:
                limit.timer.cancel()


class _Limit:
    """End of a block's time. No reference cycle remains after ``timer`` is cancelled."""

    def __init__(self, clock: AliveClock, block: asyncio.Timeout, limit_s: float) -> None:
        self._clock = clock
        self._block = block
        self._ends_ns = clock.now_ns() + int(limit_s * 1e9)
        self._loop = asyncio.get_running_loop()
        self.timer = self._loop.call_later(limit_s, self._look)

    def _look(self) -> None:
        left_s = (self._ends_ns - self._clock.now_ns()) / 1e9
        if left_s > 0:
            self.timer = self._loop.call_later(left_s, self._look)
        else:
            self._block.reschedule(self._loop.time())


ALIVE = AliveClock()
