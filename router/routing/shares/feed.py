"""Tells the other routers what there is to do here, and hears the same of them; off every path."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.router_demands import RouterDemand, TenantDemand
from baton.telemetry.tasks import BackgroundTasks
from router.routing.shares.shares import Shares

_LOG = logging.getLogger(__name__)

TELL_EVERY_S = 0.2


class Queue(Protocol):
    """A router's queue; ``router.routing.requests.admission.Admission`` is it."""

    max_waiting: int
    limit: int

    @property
    def waiting(self) -> int:
        """Requests in it."""

    def demands(self) -> dict[str, TenantDemand]:
        """What there is to do for each tenant that has anything here."""

    def served_elsewhere(self, tenant: str, tokens: float) -> None:
        """Another router has served a tenant."""


class DemandSource(Protocol):
    """Where routers tell; ``baton.registry.router_demands.RouterDemands`` is it."""

    async def exchange(self, router_id: str, own: RouterDemand) -> dict[str, RouterDemand]:
        """Tell of one router, and hear of all others."""

    async def forget(self, *router_ids: str) -> None:
        """Take routers out that are gone."""


class ShareFeed:
    """A task that keeps a router's shares current.

    Args:
        router_id: Of this router.
        admission: Its queue, and how many run.
        shares: What it brings up to date.
        on_change: Called when more may run.
        source: Shared by all routers of the fleet; None: there is one router, or no Redis.
        count_failure: Told the task's name when it raised.
    """

    def __init__(
        self,
        router_id: str,
        admission: Queue,
        shares: Shares,
        on_change: Callable[[], None],
        source: DemandSource | None,
        count_failure: Callable[[str], None],
    ) -> None:
        self._router_id = router_id
        self._admission = admission
        self._shares = shares
        self._on_change = on_change
        self._source = source
        self._beat = 0
        self._background = BackgroundTasks("shares", count_failure)

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        source = self._source
        if source is not None:
            self._background.keep(lambda: self._run(source), "shares")

    async def close(self) -> None:
        """End; the others need not wait until they notice."""
        await self._background.close()
        if self._source is not None and self._beat:
            try:
                await self._source.forget(self._router_id)
            except RegistryUnavailableError:
                _LOG.debug("registry away: the others notice by the silence")

    async def _run(self, source: DemandSource) -> None:
        while True:
            await self.exchange(source)
            await asyncio.sleep(TELL_EVERY_S)

    async def exchange(self, source: DemandSource) -> None:
        """Tell and hear once."""
        admission = self._admission
        shares = self._shares
        self._beat += 1
        own = RouterDemand(beat=self._beat, queued=admission.waiting, tenants=admission.demands())
        try:
            others = await source.exchange(self._router_id, own)
            now_ns = monotonic_ns()
            for tenant, tokens in shares.hear(own, others, now_ns).items():
                admission.served_elsewhere(tenant, tokens)
            if gone := shares.gone(now_ns):
                await source.forget(*gone)
        except RegistryUnavailableError:
            _LOG.debug("registry away: limits are this router's own")
            shares.alone()
        admission.limit = shares.queue_limit(admission.max_waiting)
        self._on_change()
