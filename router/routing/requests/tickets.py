"""Tickets: the order of requests over all routers, which no clock decides.

A request gets its ticket when it leaves the queue; workers order by (priority, ticket), and whoever
came later makes room. Every router goes on from the highest ticket that it knows of: its own last
one, those in the workers' reports, and a counter in Redis from which it takes some ahead a few
times a second. So routers are apart by no more than that, and without Redis by a report.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Protocol

from baton.registry.redis_store import RegistryUnavailableError
from baton.telemetry.tasks import BackgroundTasks

_LOG = logging.getLogger(__name__)

TAKE_EVERY_S = 0.25
TAKE = 64  # about what one router places in that time
_MARK_BITS = 10
_LIMIT = 1 << 52  # what a ticket has room for; a place beyond it is nobody's


class Tickets:
    """Draws one router's tickets. Sans-IO.

    A ticket is a place in the order and the router's mark, so that two routers that are at the same
    place draw different ones.

    Args:
        mark: Below 1024; by default random.
    """

    def __init__(self, mark: int | None = None) -> None:
        self._mark = secrets.randbelow(1 << _MARK_BITS) if mark is None else mark
        self.place = 0  # the highest that is known

    def draw(self) -> int:
        """The next ticket: higher than all that this router knows of, by one place."""
        self.place += 1
        return self.place << _MARK_BITS | self._mark

    def seen(self, ticket: int) -> None:
        """A worker reports a ticket, of this router or of another one."""
        self.go_on(ticket >> _MARK_BITS)

    def go_on(self, place: int) -> None:
        """All places up to this one are taken."""
        if self.place < place < _LIMIT:
            self.place = place


class TicketSource(Protocol):
    """A counter that routers share; ``baton.registry.redis_store.Registry`` is one."""

    async def take_tickets(self, count: int, above: int) -> int:
        """Take ``count`` places, all of them higher than ``above``; returns the first."""


class TicketFeed:
    """A task that takes places ahead, so that no request waits for Redis.

    Args:
        tickets: Of the router.
        source: Shared by all routers of the fleet; None: there is one router, or no Redis.
        count_failure: Told the task's name when it raised.
    """

    def __init__(
        self, tickets: Tickets, source: TicketSource | None, count_failure: Callable[[str], None]
    ) -> None:
        self._tickets = tickets
        self._source = source
        self._background = BackgroundTasks("tickets", count_failure)

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        source = self._source
        if source is not None:
            self._background.keep(lambda: self._run(source), "tickets")

    async def close(self) -> None:
        """End."""
        await self._background.close()

    async def _run(self, source: TicketSource) -> None:
        while True:
            await self.take(source)
            await asyncio.sleep(TAKE_EVERY_S)

    async def take(self, source: TicketSource) -> None:
        """Take some places now. Those of the last time that were not used are given up."""
        try:
            first = await source.take_tickets(TAKE, self._tickets.place)
        except RegistryUnavailableError:
            _LOG.debug("registry away, going on from the highest ticket that is known")
        else:
            self._tickets.go_on(first - 1)
