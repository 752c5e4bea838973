"""Limit of work that runs at once, with the same chance for each tenant."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from baton.types.errors import UnavailableError

_MAX_WAITING = 256


@dataclass(slots=True)
class _TenantQueue:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class FairLimit:
    """Limit of ``places`` for work of all tenants.

    Of each tenant one piece of work waits for a place, and the tenant's others wait for that one.
    So tenants take turns, and much work of one tenant delays another tenant's by one piece.
    """

    def __init__(self, places: int, work: str) -> None:
        self._places = asyncio.Semaphore(places)
        self._work = work  # plural, for the error
        self._queues: dict[str, _TenantQueue] = {}  # of tenants that wait

    async def acquire(self, tenant: str) -> None:
        """Wait for a place, which the caller must give back.

        Raises:
            UnavailableError: Too much work of the tenant waits.
        """
        queue = self._queues.setdefault(tenant, _TenantQueue())
        if queue.waiting >= _MAX_WAITING:
            raise UnavailableError(
                f"{queue.waiting} {self._work} of this tenant are waiting, the limit; retry later"
            )
        queue.waiting += 1
        try:
            async with queue.lock:
                await self._places.acquire()
        finally:
            queue.waiting -= 1
            if not queue.waiting:
                del self._queues[tenant]

    def release(self) -> None:
        """Give a place back."""
        self._places.release()

    @contextlib.asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place during the block; see `acquire`."""
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release()
