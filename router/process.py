"""A router's process: its lanes, what they share, and the tasks of both."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from baton.config.clients import ApiKeyConfig
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from baton.telemetry.tracing import Tracing
from baton.tenants.audit.refused_logins import RefusedLogins
from baton.tenants.limits import Limits
from baton.tenants.usage.copies import UsageCopies
from baton.tenants.usage.feed import UsageFeed
from baton.tenants.usage.ledger import Ledger
from router.lane import Lane
from router.lanes.gate import GateBook
from router.lanes.lane_table import LaneTable
from router.lanes.route_table import SyncedRoutes
from router.lanes.shadow import Shadows
from router.process_core import ProcessCore
from router.routing.checks.answers import AnswerChecks
from router.routing.reports.past_reports import PastReports
from router.routing.reports.refusals import RefusedRequests
from router.routing.reports.request_log import RequestLog
from router.routing.requests.call import Call, CallObservers
from router.routing.requests.gen_ai_metrics import GenAiMetrics
from router.routing.requests.observer import Observer
from router.served_model import ServedModel
from router.settings import LaneSettings
from router.sources import LaneSources, Sources
from router.tenants.access import AccessControl
from router.tenants.issuer_keys import follow_keys
from router.tenants.key_exchange import KeyExchange
from router.tenants.limits_table import SyncedLimits
from router.tenants.quota_feed import QuotaFeed
from router.tenants.token_check import TokenCheck
from router.tenants.usage_counter import UsageCounter

_POLL_S = 0.01
_SAMPLE_S = 1.0


class Process:
    """A router. The first of its lanes is the default of calls that name no model.

    Attributes:
        access: API keys and the rights of callers.
        lanes: Models of the router.
        routes: Table that leads names to lanes.
        gates: Gates of the canaries and shadows in this table.
        observers: What happens about each call besides its answer.
        refresh_gauges: Sets the gauges that are computed only when metrics are read.
        keys: Exchange of the API keys of ``baton keys``; None without Redis.
        limits: Limits of tenants; None without Redis.
    """

    def __init__(
        self,
        core: ProcessCore,
        api_keys: Mapping[str, ApiKeyConfig] | None,
        lanes: Sequence[tuple[LaneSettings, ServedModel, LaneSources]],
        sources: Sources | None,
    ) -> None:
        first, model, _ = lanes[0]
        self.core = core
        self.settings = settings = core.settings
        self.policies = core.policies
        oidc = settings.clients.oidc
        tokens = TokenCheck(oidc) if oidc is not None else None
        self.access = AccessControl(api_keys, core.fleet_token, core.policies, tokens)
        self.sources = sources
        self.audit = sources.audit if sources is not None else None
        self.metrics = metrics = Metrics(
            "router", model=model.names[0], context_tokens=model.max_context_tokens
        )
        self.refresh_gauges: Callable[[], None] = lambda: None
        metrics.set("baton_worker_price_per_hour", first.price_per_hour)
        self.observer = Observer(metrics)
        count_failure = self.observer.task_failed
        self.tasks = BackgroundTasks("router", count_failure)
        self.tracing = Tracing("router", settings.host, settings.port)
        self.lanes = LaneTable([Lane(core, *lane, self.observer, self.tasks) for lane in lanes])
        self.router_id = self.lanes.first.gateway.router_id
        self.gates = GateBook()
        routes = sources.routes if sources is not None else None
        self.routes = SyncedRoutes(routes, self._file("routes.json"), count_failure)
        self.shadows = Shadows(self.gates, self.lanes, metrics, self.tasks)
        self.answer_checks = AnswerChecks(metrics)
        self.request_log = RequestLog(settings, self.access, self.answer_checks)
        self.refused = RefusedRequests(settings.kept_records)
        self.past_reports = PastReports()
        self.refused_logins = logins = RefusedLogins()
        if self.audit is not None:
            self.audit.on_failure = lambda: metrics.inc("baton_audit_failures")
            self.audit.each_period.append(lambda: logins.take(time.monotonic_ns()))
        self._make_tenants(sources)
        self.observers = CallObservers(
            begun=(self.quotas.begun,),
            refused=(self._refused, self.request_log.refused, self.refused.refused),
            answered=(self.shadows.answered,),
            closed=(self.request_log.closed, self.answer_checks.closed),
            ended=(
                self.quotas.ended,
                self.usage_counter.ended,
                self.observer.ended,
                GenAiMetrics(metrics, self.tracing.server).ended,
                self.gates.ended,
            ),
        )

    def _refused(self, call: Call) -> None:
        lanes = (lane.observer for lane in self.lanes if lane.model.names[0] == call.model)
        next(lanes, self.observer).refused(call)

    def _make_tenants(self, sources: Sources | None) -> None:
        count_failure = self.observer.task_failed
        first = self.lanes.first
        shares = first.gateway.shares
        self.quotas = QuotaFeed(
            self.router_id,
            sources.quotas if sources is not None else None,
            lambda: shares.known_routers,
            count_failure,
            lambda tenant, limit: self.metrics.inc(
                "baton_quota_refusals", tenant=tenant, limit=limit
            ),
        )
        ledger = Ledger(self.router_id)
        price = first.settings.price_per_hour
        shared_usage = sources.usage if sources is not None else None
        self.usage = UsageFeed(ledger, shared_usage, count_failure, price_per_hour=price)
        self.usage_counter = UsageCounter(ledger)
        for lane in self.lanes:
            lane.observer.on_charged = self.usage_counter.of(lane.model.names[0])
        self._usage_copies: UsageCopies | None = None
        self.keys: KeyExchange | None = None
        self.limits: SyncedLimits | None = None
        if sources is None:
            return
        folder = self._file("usage")
        if folder is not None:
            self._usage_copies = UsageCopies(sources.usage, folder, count_failure)
            self.usage.keep = self._usage_copies.keep
        file = self._file("keys.json")
        self.keys = KeyExchange(self.access.issued_keys, sources.keys, file, count_failure)
        self.limits = SyncedLimits(
            sources.limits,
            self._use_policies,
            self._file("tenants.json"),
            self.policies.file,
            count_failure,
        )
        self.policies.expect()
        self.limits.on_table.append(self.policies.adopt)

    def _file(self, name: str) -> Path | None:
        """Return the path of a file in the state folder; None without one."""
        return Path(self.settings.state_dir) / name if self.settings.state_dir else None

    def _use_policies(self, policies: Mapping[str, Limits]) -> None:
        self.policies.replace(policies)
        self.quotas.quotas.set_limits(policies)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the lanes and the background tasks within the context."""
        self.tasks.keep(ALIVE.run, "alive clock")
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(self.tracing.shutdown)
            if self._usage_copies is not None:
                undo.push_async_callback(self._usage_copies.close)
            undo.push_async_callback(self.usage.close)
            undo.push_async_callback(self.answer_checks.close)
            for lane in self.lanes:
                await undo.enter_async_context(lane.running())
            if self.audit is not None:
                undo.push_async_callback(self.audit.close)
            undo.push_async_callback(self.tasks.close)
            undo.push_async_callback(self.quotas.close)
            undo.push_async_callback(self.routes.close)
            if self.limits is not None:
                undo.push_async_callback(self.limits.close)
            if self.keys is not None:
                undo.push_async_callback(self.keys.close)
            await self._start()
            yield

    async def _start(self) -> None:
        oidc = self.settings.clients.oidc
        if oidc is not None and self.access.tokens is not None:
            self.tasks.keep(partial(follow_keys, oidc, self.access.tokens), "issuer keys")
        if self.keys is not None and self.access.needs_key:
            await self.keys.start()
        if self.limits is not None:
            await self.limits.start()
        await self.routes.start()
        self.quotas.start()
        self.usage.start()
        if self._usage_copies is not None:
            self._usage_copies.start()
        if self.audit is not None:
            self.audit.start()
        await self._wait_for_workers()
        self.tasks.keep(self._sample, "live series")

    async def _wait_for_workers(self) -> None:
        """Wait until all workers of the list are connected, but at most ``start_limit_s``.

        The server starts listening afterwards, so that it does not reject requests because of
        workers that are not connected yet.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.settings.start_limit_s
        while loop.time() < until_s:
            connected = all(slot.link is None or slot.link.live for slot in self.lanes.slots)
            if connected and all(lane.sources.directory.known for lane in self.lanes):
                return
            await asyncio.sleep(_POLL_S)

    async def _sample(self) -> None:
        """Close one sample of the live series each second."""
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        while True:
            at_s = max(at_s + _SAMPLE_S, loop.time())  # never two at once after a delay
            await asyncio.sleep(at_s - loop.time())
            for lane in self.lanes:
                lane.worker_cells.note()
            queued = self.lanes.waiting
            usable = [slot for lane in self.lanes for slot in lane.gateway.workers.usable]
            self.observer.series.close(
                time.time(),
                queued=queued,
                running=self.lanes.in_flight - queued,
                last_turn=max(lane.gateway.workers.last_turn() for lane in self.lanes),
                sizes=Counter(str(slot.role) for slot in usable),
            )
