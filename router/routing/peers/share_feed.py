"""Exchanges demand with the other routers through Redis, off the path of requests."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.router_demands import PlannedSizes, RouterDemand, RouterDemands
from baton.telemetry.tasks import BackgroundTasks
from router.routing.admission.admission import Admission
from router.routing.peers.shares import Shares
from router.routing.peers.work_counter import WorkCounter
from router.routing.workers.table import WorkerTable

_LOG = logging.getLogger(__name__)

EXCHANGE_EVERY_S = 0.2


class SharingLane(Protocol):
    """Lane of this router; implemented by ``router.routing.requests.gateway.Gateway``."""

    router_id: str
    admission: Admission
    shares: Shares
    work: WorkCounter
    workers: WorkerTable

    def pump(self) -> None:
        """Place the requests that fit into the lane's part of the window."""


class ShareFeed:
    """Task that keeps a router's shares current and reports its demand.

    Args:
        on_plan: Called after each exchange with the planner's last result.
    """

    def __init__(
        self,
        lane: SharingLane,
        source: RouterDemands,
        count_failure: Callable[[str], None],
        on_plan: Callable[[PlannedSizes], None],
    ) -> None:
        self._lane = lane
        self._source = source
        self._on_plan = on_plan
        self._beat = 0
        self._background = BackgroundTasks("shares", count_failure)

    def start(self) -> None:
        """Start the task. Needs a running event loop."""
        self._background.keep(self._run, "shares")

    async def close(self) -> None:
        """Stop, and remove this router so that the others need no timeout."""
        await self._background.close()
        if self._beat:
            try:
                await self._source.forget(self._lane.router_id)
            except RegistryUnavailableError:
                _LOG.debug("Redis is unavailable: the others notice by the silence")

    async def _run(self) -> None:
        while True:
            await self.exchange()
            await asyncio.sleep(EXCHANGE_EVERY_S)

    async def exchange(self) -> None:
        """Exchange demands with the other routers once."""
        admission = self._lane.admission
        shares = self._lane.shares
        self._beat += 1
        own = RouterDemand(
            beat=self._beat,
            queued=admission.waiting,
            tenants=admission.demands(),
            turn=self._lane.workers.last_turn(),
            work=self._lane.work.demand(),
        )
        try:
            others = await self._source.exchange(self._lane.router_id, own)
            now_ns = monotonic_ns()
            for tenant, tokens in shares.update(own, others, now_ns).items():
                admission.served_elsewhere(tenant, tokens)
            self._on_plan(self._source.plan)
            if gone := shares.gone(now_ns):
                await self._source.forget(*gone)
        except RegistryUnavailableError:
            _LOG.debug("Redis is unavailable: the limits apply to this router alone")
            shares.alone()
        admission.limit = shares.queue_limit(admission.max_waiting)
        self._lane.pump()
