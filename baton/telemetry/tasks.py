"""Background tasks whose failures their owner learns about.

    tasks = BackgroundTasks("router", lambda name: metrics.inc("baton_task_failures", task=name))
    tasks.spawn(self._submit_alone(submission), "submit")  # once
    tasks.keep(self._follow, "directory")                  # restarted with back-off if it raises
    tasks.vital(self._listen(), "listen", self._fail)      # if it raises, ``_fail`` decides
    async with tasks.beside(self._watch(), "watch"):       # cancelled at the end of the block
        ...
    await tasks.close()

A task that raises is logged with its traceback and counted in every case. Names are constants:
they are labels of a metric. Product code starts all its tasks here, which a test checks.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from typing import Any

_LOG = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 30.0
CANCEL_RETRY_S = 5.0
"""Time until a task is cancelled again: some libraries lose a cancellation."""
SETTLED_S = 60.0
"""Run time after which a task restarts with the first delay again."""

Work = Coroutine[Any, Any, None]


class BackgroundTasks:
    """Background tasks of one component; ``count_failure`` receives the name of one that raised."""

    def __init__(self, owner: str, count_failure: Callable[[str], None] = lambda _: None) -> None:
        self._owner = owner
        self._count_failure = count_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Work, name: str) -> asyncio.Task[None]:
        """Start a task that runs once."""
        return self.vital(work, name, None)

    def vital(
        self, work: Work, name: str, on_failure: Callable[[Exception], None] | None
    ) -> asyncio.Task[None]:
        """Start a task that the owner depends on; ``on_failure`` receives its exception."""
        task = self._begin(self._once(work, name, on_failure), name)
        task.add_done_callback(lambda _: work.close())  # cancelled before it ran a line
        return task

    def keep(self, make: Callable[[], Work], name: str) -> asyncio.Task[None]:
        """Start a task that restarts after a pause whenever it raises, until it returns.

        ``make`` is called for each run.
        """
        return self._begin(self._again(make, name), name)

    @contextlib.asynccontextmanager
    async def beside(self, work: Work, name: str) -> AsyncIterator[asyncio.Task[None]]:
        """Run a task during the block; cancel it and wait for it at the end."""
        task = self.spawn(work, name)
        try:
            yield task
        finally:
            await self._end([task])

    async def settle(self, limit_s: float) -> None:
        """Wait until all tasks have ended, but at most ``limit_s``."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    async def close(self) -> None:
        """Cancel all tasks but the current one, and wait for them."""
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        await self._end(others)

    async def _end(self, tasks: Collection[asyncio.Task[None]]) -> None:
        while tasks:
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=CANCEL_RETRY_S)
            for task in tasks:
                _LOG.warning("task %s ignored cancellation; cancelling again", task.get_name())

    def _begin(self, work: Work, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{self._owner}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _once(
        self, work: Work, name: str, on_failure: Callable[[Exception], None] | None
    ) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - goes to the log, the metric and the owner
            self._note(name)
            if on_failure is not None:
                on_failure(error)

    async def _again(self, make: Callable[[], Work], name: str) -> None:
        loop = asyncio.get_running_loop()
        delay_s = FIRST_DELAY_S
        while True:
            began_s = loop.time()
            try:
                await make()
            except Exception:  # noqa: BLE001 - goes to the log and the metric; then restarted
                self._note(name)
            else:
                return
            if loop.time() - began_s > SETTLED_S:
                delay_s = FIRST_DELAY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    def _note(self, name: str) -> None:
        _LOG.exception("%s: task %r failed", self._owner, name)
        self._count_failure(name)
