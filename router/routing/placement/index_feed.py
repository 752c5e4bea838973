"""Feeds the prefix index from the stream of KV events."""

import asyncio
import time
from collections.abc import Callable, Set

from baton.registry.event_feed import EventFeed
from baton.registry.types import Refreshed, Snapshot
from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from router.routing.placement.prefix_index import Applied, PrefixIndex

_HOLD_S = 0.001  # one more item may follow: some milliseconds at most


class IndexFeeder:
    """Task that applies KV events to the prefix index.

    ``on_refreshed`` gets the incarnations that refreshed their keys, while Redis answers.
    """

    def __init__(
        self,
        prefix_index: PrefixIndex,
        events: EventFeed,
        metrics: Metrics,
        on_refreshed: Callable[[Set[bytes]], None] = lambda _: None,
    ) -> None:
        self._prefix_index = prefix_index
        self._events = events
        self._metrics = metrics
        self._on_refreshed = on_refreshed
        self._tasks = BackgroundTasks(
            "prefix index", lambda name: metrics.inc("baton_task_failures", task=name)
        )

    def start(self) -> None:
        """Start reading. Needs a running event loop."""
        self._tasks.keep(self._run, "prefix index")

    async def close(self) -> None:
        """Stop reading KV events."""
        await self._tasks.close()

    async def _run(self) -> None:
        pause = _Pause()
        async for item in self._events:
            # The source fills gaps in what it read. Here the index has dropped the blocks of a
            # worker that it took for dead, and the worker is alive.
            if isinstance(item, Refreshed):
                self._on_refreshed(item.incarnations)
                continue
            if isinstance(item, Snapshot):
                result = await self._take_in(item)
                self._metrics.inc("baton_prefix_index_snapshots")
            else:
                result = self._prefix_index.apply(item)
            if result is Applied.SNAPSHOT_NEEDED:
                self._events.want(item.incarnation)
                self._metrics.inc("baton_prefix_index_sequence_gaps")
            if pause.is_due():
                await asyncio.sleep(0)  # a backlog must not delay tokens

    async def _take_in(self, snapshot: Snapshot) -> Applied:
        """Apply a snapshot in slices, between which tokens pass."""
        steps = self._prefix_index.take_in(snapshot)
        pause = _Pause()
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return Applied(done.value)
            if pause.is_due():
                await asyncio.sleep(0)


class _Pause:
    def __init__(self) -> None:
        self._since_s = time.monotonic()

    def is_due(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._since_s < _HOLD_S:
            return False
        self._since_s = now_s
        return True
