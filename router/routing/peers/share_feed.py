"""Exchanges demand and long prompts with the other routers through Redis."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.router_demands import PlannedSizes, RouterDemand, RouterDemands
from baton.telemetry.tasks import BackgroundTasks
from router.routing.admission.admission import Admission
from router.routing.peers.shared_prompts import SharedPrompts
from router.routing.peers.shares import Shares
from router.routing.peers.work_counter import WorkCounter
from router.routing.workers.table import WorkerTable

_LOG = logging.getLogger(__name__)

EXCHANGE_EVERY_S = 0.2
_ANSWER_S = 1.2  # Redis does not answer if a read of prompts takes longer


class SharingLane(Protocol):
    """Lane of this router; implemented by ``router.routing.requests.gateway.Gateway``."""

    router_id: str
    admission: Admission
    shares: Shares
    prompts: SharedPrompts
    work: WorkCounter
    workers: WorkerTable

    def pump(self) -> None:
        """Place the requests that fit into the lane's part of the window."""


class ShareFeed:
    """Tasks that keep a router's shares current, report its demand, and share long prompts.

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
        self._has_prompts = asyncio.Event()
        lane.prompts.on_news = self._has_prompts.set
        self._background = BackgroundTasks("shares", count_failure)

    def start(self) -> None:
        """Start the tasks. Needs a running event loop."""
        self._background.keep(self._run, "shares")
        self._background.keep(self._read_prompts, "prompts of others")
        self._background.keep(self._write_prompts, "own prompts")

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

    async def _read_prompts(self) -> None:
        prompts = self._lane.prompts
        after = b""
        while True:
            try:
                if self._lane.shares.routers == 1:
                    raise RegistryUnavailableError("there is no other router")
                async with asyncio.timeout(_ANSWER_S):
                    after, entries = await self._source.read_prompts(after, EXCHANGE_EVERY_S)
            except (TimeoutError, RegistryUnavailableError):
                prompts.stop()
                after = b""
                await asyncio.sleep(EXCHANGE_EVERY_S)
                continue
            for entry in entries:
                prompts.apply(entry)
                await asyncio.sleep(0)  # a long one takes a millisecond
            prompts.tick()

    async def _write_prompts(self) -> None:
        while True:
            await self._has_prompts.wait()
            self._has_prompts.clear()
            try:
                await self._source.add_prompts(self._lane.prompts.take())
            except RegistryUnavailableError:
                self._lane.prompts.stop()
