"""Limit of work that runs at once, with the same chance for each tenant."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from baton.types.errors import UnavailableError

_MAX_WAITING = 256


class _Tenant:
    """Work of one tenant; one piece of it may wait for a place."""

    def __init__(self, most_running: int) -> None:
        self.turn = asyncio.Lock()
        self.may_run = asyncio.Semaphore(most_running)
        self.waiting = 0
        self.running = 0


class FairLimit:
    """Limit of ``places`` for work of all tenants.

    Of each tenant one piece of work waits for a place, and the tenant's others wait for that one.
    So tenants take turns, and much work of one tenant delays another tenant's by one piece. Of
    several places one is left to other tenants, since a piece may take seconds, or all beyond
    ``most_of_a_tenant``.
    """

    def __init__(self, places: int, work: str, most_of_a_tenant: int = 0) -> None:
        self._places = asyncio.Semaphore(places)
        self._most_of_a_tenant = most_of_a_tenant or max(places - 1, 1)
        self._work = work  # plural, for the error
        self._tenants: dict[str, _Tenant] = {}  # with work

    async def acquire(self, tenant: str) -> None:
        """Wait for a place, which the caller must give back.

        Raises:
            UnavailableError: Too much work of the tenant waits.
        """
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = _Tenant(self._most_of_a_tenant)
        if own.waiting >= _MAX_WAITING:
            raise UnavailableError(
                f"{own.waiting} {self._work} of this tenant are waiting, the limit; retry later"
            )
        own.waiting += 1
        try:
            async with own.turn:
                await own.may_run.acquire()
                try:
                    await self._places.acquire()
                except BaseException:
                    own.may_run.release()
                    raise
            own.running += 1
        finally:
            own.waiting -= 1
            self._forget_idle(tenant, own)

    def release(self, tenant: str) -> None:
        """Give a place back."""
        own = self._tenants[tenant]
        own.running -= 1
        own.may_run.release()
        self._places.release()
        self._forget_idle(tenant, own)

    def _forget_idle(self, tenant: str, own: _Tenant) -> None:
        if not (own.waiting or own.running):
            del self._tenants[tenant]

    @contextlib.asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place during the block; see `acquire`."""
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release(tenant)
