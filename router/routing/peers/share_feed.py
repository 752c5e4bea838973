"""Exchanges demand with the other routers through Redis, off the path of requests."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.router_demands import PlannedSizes, RouterDemand, TenantDemand
from baton.registry.types import WorkDemand
from baton.telemetry.tasks import BackgroundTasks
from router.routing.peers.shares import Shares

_LOG = logging.getLogger(__name__)

EXCHANGE_EVERY_S = 0.2


class Queue(Protocol):
    """Queue of a router; implemented by ``router.routing.admission.admission.Admission``."""

    max_waiting: int
    limit: int

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""

    def demands(self) -> dict[str, TenantDemand]:
        """Return the demand of each tenant with requests here."""

    def served_elsewhere(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for service at another router."""


class DemandSource(Protocol):
    """Shared demands; implemented by ``baton.registry.router_demands.RouterDemands``."""

    plan: PlannedSizes

    async def exchange(self, router_id: str, own: RouterDemand) -> dict[str, RouterDemand]:
        """Publish the demand of one router, and return those of all others."""

    async def forget(self, *router_ids: str) -> None:
        """Remove routers that are gone."""


class ShareFeed:
    """Task that keeps a router's shares current and reports its demand, unless there is no Redis.

    Args:
        on_change: Called after each exchange.
        work: Work of the router's requests until now.
        last_turn: Number of the last turn by which this router places.
        on_plan: Called after each exchange with the planner's last result.
    """

    def __init__(
        self,
        router_id: str,
        admission: Queue,
        shares: Shares,
        on_change: Callable[[], None],
        work: Callable[[], WorkDemand],
        source: DemandSource | None,
        count_failure: Callable[[str], None],
        last_turn: Callable[[], int] = lambda: 0,
        on_plan: Callable[[PlannedSizes], None] = lambda _: None,
    ) -> None:
        self._on_plan = on_plan
        self._router_id = router_id
        self._last_turn = last_turn
        self._admission = admission
        self._shares = shares
        self._on_change = on_change
        self._work = work
        self._source = source
        self._beat = 0
        self._background = BackgroundTasks("shares", count_failure)

    def start(self) -> None:
        """Start the task. Needs a running event loop."""
        source = self._source
        if source is not None:
            self._background.keep(lambda: self._run(source), "shares")

    async def close(self) -> None:
        """Stop, and remove this router so that the others need no timeout."""
        await self._background.close()
        if self._source is not None and self._beat:
            try:
                await self._source.forget(self._router_id)
            except RegistryUnavailableError:
                _LOG.debug("Redis is unavailable: the others notice by the silence")

    async def _run(self, source: DemandSource) -> None:
        while True:
            await self.exchange(source)
            await asyncio.sleep(EXCHANGE_EVERY_S)

    async def exchange(self, source: DemandSource) -> None:
        """Exchange demands with the other routers once."""
        admission = self._admission
        shares = self._shares
        self._beat += 1
        own = RouterDemand(
            beat=self._beat,
            queued=admission.waiting,
            tenants=admission.demands(),
            turn=self._last_turn(),
            work=self._work(),
        )
        try:
            others = await source.exchange(self._router_id, own)
            now_ns = monotonic_ns()
            for tenant, tokens in shares.update(own, others, now_ns).items():
                admission.served_elsewhere(tenant, tokens)
            self._on_plan(source.plan)
            if gone := shares.gone(now_ns):
                await source.forget(*gone)
        except RegistryUnavailableError:
            _LOG.debug("Redis is unavailable: the limits apply to this router alone")
            shares.alone()
        admission.limit = shares.queue_limit(admission.max_waiting)
        self._on_change()
