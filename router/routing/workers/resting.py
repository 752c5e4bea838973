"""Checks workers without work, whose streams are silent, by their keys in Redis."""

import asyncio
from collections.abc import Callable, Iterable, Set
from time import monotonic_ns

from router.routing.workers.link import WorkerLink
from router.routing.workers.silence import STALE_S

_LOOK_S = 1.0
_AT_ONCE = 16  # heartbeats, then other tasks run
_PAUSE_S = 0.01


class RestingWorkers:
    """Sends heartbeats to resting workers whose keys Redis no longer shows."""

    def __init__(self, links: Callable[[], Iterable[WorkerLink]]) -> None:
        self._links = links
        self._fresh: set[bytes] = set()  # shown by Redis since the last check
        self._read_ns = 0  # last answer of Redis
        self._since_ns = 0  # first answer without a pause since

    def refreshed(self, incarnations: Set[bytes]) -> None:
        """Note the incarnations that refreshed their keys, as read from Redis."""
        now_ns = monotonic_ns()
        if now_ns - self._read_ns > STALE_S * 1e9:
            self._since_ns = now_ns
        self._read_ns = now_ns
        self._fresh |= incarnations

    async def run(self) -> None:
        """Check each worker periodically."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for number, link in enumerate(self._silent(), start=1):
                link.ask()
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(_PAUSE_S)

    def _silent(self) -> list[WorkerLink]:
        now_ns = monotonic_ns()
        fresh = self._fresh
        self._fresh = set()
        answers = now_ns - self._read_ns <= STALE_S * 1e9
        since_ns = self._since_ns if answers else None
        silent = []
        for link in self._links():
            if link.incarnation in fresh:
                link.rest.seen(now_ns)
                if link.resting:  # its last report is current
                    link.status_ns = now_ns
            elif link.resting and link.rest.asks(now_ns, link.heard_ns, since_ns):
                silent.append(link)
        return silent
