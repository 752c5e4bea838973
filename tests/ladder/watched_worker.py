"""A worker with a watched event loop; the longest callback, in CPU time, goes to a file."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from baton.telemetry.alive_clock import ALIVE, AliveClock
from fleet.worker import worker


class LoopHolds:
    """The longest callback of the event loops of this process, in CPU time of its thread.

    CPU time of one callback, because on a busy machine other processes hold a loop up too, and many
    short callbacks wait for it at once. The steps of the task that watches are the test's own.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.what = ""

    @contextlib.contextmanager
    def watched(self, note: Callable[["LoopHolds"], None] = lambda holds: None):
        """Look at each callback; ``note`` is called after one that is the longest so far."""
        run = asyncio.events.Handle._run
        own = asyncio.current_task()

        def timed(handle: asyncio.Handle) -> None:
            stepped = getattr(handle._callback, "__self__", None)
            began_s = time.thread_time()
            run(handle)
            held_s = time.thread_time() - began_s
            if held_s > self.longest_s and stepped is not own:
                self.longest_s = held_s
                self.what = f"{handle} of {stepped}"
                note(self)

        asyncio.events.Handle._run = timed
        try:
            yield self
        finally:
            asyncio.events.Handle._run = run


class WatchedClock(AliveClock):
    """The clock of this process, which begins a watch with the first request."""

    async def run(self) -> None:
        path = Path(os.environ["BATON_TEST_HOLDS"]) / f"{os.getpid()}"
        await asyncio.sleep(1.0)  # imports and the first stream are no requests

        def note(holds: LoopHolds) -> None:
            whole = path.with_suffix(".new")  # a reader never sees a half of it
            whole.write_text(f"{holds.longest_s:.4f} {holds.what}")
            whole.rename(path)

        with LoopHolds().watched(note):
            await super().run()


if __name__ == "__main__":
    ALIVE.__class__ = WatchedClock
    worker.main()
