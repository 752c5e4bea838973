"""Tickets: the order of requests over all routers, independent of clocks.

A request gets its ticket when it leaves the queue. Workers order by (priority, ticket), and preempt
the latest. Every router continues from the highest ticket that it has seen: its own last one, those
in the workers' reports, and a counter in Redis from which it reserves some a few times a second. So
routers differ by no more than that, and without Redis by a report.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable

from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.telemetry.tasks import BackgroundTasks

_LOG = logging.getLogger(__name__)

TAKE_EVERY_S = 0.25
TAKE = 64  # about the number of placements of one router in that time
_MARK_BITS = 10
_LIMIT = 1 << 52  # of a place; higher ones are invalid


class Tickets:
    """Tickets of one router. Sans-IO.

    A ticket is a place in the order and the router's mark (below 1024, random by default), so that
    two routers at the same place draw different tickets.
    """

    def __init__(self, mark: int | None = None) -> None:
        self._mark = secrets.randbelow(1 << _MARK_BITS) if mark is None else mark
        self.place = 0  # the highest that was seen

    def draw(self) -> int:
        """Return the next ticket, one place after the highest that was seen."""
        self.place += 1
        return self.place << _MARK_BITS | self._mark

    def seen(self, ticket: int) -> None:
        """Note a ticket that a worker reports."""
        self.advance(ticket >> _MARK_BITS)

    def advance(self, place: int) -> None:
        """Note that all places up to this one are taken."""
        if self.place < place < _LIMIT:
            self.place = place


class TicketFeed:
    """Task that reserves places in advance, so that no request waits for Redis."""

    def __init__(
        self, tickets: Tickets, source: Registry, count_failure: Callable[[str], None]
    ) -> None:
        self._tickets = tickets
        self._source = source
        self._background = BackgroundTasks("tickets", count_failure)

    def start(self) -> None:
        """Start the task. Needs a running event loop."""
        self._background.keep(self._run, "tickets")

    async def close(self) -> None:
        """Stop the task that reserves places."""
        await self._background.close()

    async def _run(self) -> None:
        while True:
            await self.take()
            await asyncio.sleep(TAKE_EVERY_S)

    async def take(self) -> None:
        """Take some places now. Unused ones of the last time are given up."""
        try:
            first = await self._source.take_tickets(TAKE, self._tickets.place)
        except RegistryUnavailableError:
            _LOG.debug("continuing from the highest ticket seen: Redis is unavailable")
        else:
            self._tickets.advance(first - 1)
