"""Watches over the workers that have no work: their streams are silent, so Redis is looked at."""

import asyncio
from collections.abc import Callable, Iterable, Set
from time import monotonic_ns

from router.routing.workers.link import WorkerLink
from router.routing.workers.silence import STALE_S

_LOOK_S = 1.0
_AT_ONCE = 16  # are asked, then streams have their turn
_PAUSE_S = 0.01


class RestingWorkers:
    """Asks those that Redis no longer shows.

    Args:
        links: The present ones.
    """

    def __init__(self, links: Callable[[], Iterable[WorkerLink]]) -> None:
        self._links = links
        self._fresh: set[bytes] = set()  # shown by Redis since the last look
        self._read_ns = 0  # Redis answered
        self._since_ns = 0  # and has done so without a pause

    def refreshed(self, incarnations: Set[bytes]) -> None:
        """Redis answered: these have refreshed their keys since it last did."""
        now_ns = monotonic_ns()
        if now_ns - self._read_ns > STALE_S * 1e9:
            self._since_ns = now_ns
        self._read_ns = now_ns
        self._fresh |= incarnations

    async def run(self) -> None:
        """Look at each, again and again."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for number, link in enumerate(self._silent(), start=1):
                link.ask()
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(_PAUSE_S)

    def _silent(self) -> list[WorkerLink]:
        """Those that must be asked."""
        now_ns = monotonic_ns()
        fresh = self._fresh
        self._fresh = set()
        answers = now_ns - self._read_ns <= STALE_S * 1e9
        since_ns = self._since_ns if answers else None
        silent = []
        for link in self._links():
            if link.incarnation in fresh:
                link.rest.seen(now_ns)
                if link.resting:  # it would have said if anything had changed
                    link.status_ns = now_ns
            elif link.resting and link.rest.asks(now_ns, link.heard_ns, since_ns):
                silent.append(link)
        return silent
