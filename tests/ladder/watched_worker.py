"""``fleet.worker`` with a watched event loop; the longest hold, in CPU seconds, goes to a file."""

import asyncio
import os
import time
from pathlib import Path

from fleet import worker
from router.memory import collect_rarely
from telemetry.alive_clock import ALIVE, TICK_S, AliveClock

LOOK_S = 0.005


class LoopHolds:
    """The longest time for which one event loop did not come round, in CPU time of its thread.

    CPU time, because on a busy machine other processes hold a loop up too.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self, note=lambda longest_s: None) -> None:
        """Look until cancelled; ``note`` is called with each new longest hold."""
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(LOOK_S)
            held_s = time.thread_time() - began_s
            if held_s > self.longest_s:
                self.longest_s = held_s
                note(held_s)


class WatchedClock(AliveClock):
    """The clock of this process, which begins a watch with the first request."""

    async def run(self) -> None:
        path = Path(os.environ["BATON_TEST_HOLDS"]) / f"{os.getpid()}"
        await asyncio.sleep(1.0)  # imports and the first stream are no requests
        # A full collection of a shell's objects holds its loop for 50 ms. Routers freeze theirs.
        collect_rarely()

        def note(longest_s: float) -> None:
            whole = path.with_suffix(".new")  # a reader never sees a half of it
            whole.write_text(f"{longest_s:.4f}")
            whole.rename(path)

        watching = asyncio.create_task(LoopHolds().watch(note))
        try:
            await super().run()
        finally:
            watching.cancel()


if __name__ == "__main__":
    ALIVE.__class__ = WatchedClock
    assert TICK_S > LOOK_S
    worker.main()
