"""Router process: its parts, their background tasks, and the HTTP application."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.registry.admin_commands import Orders
from baton.registry.gates import SharedGates
from baton.registry.shared_adapters import SharedAdapters
from baton.registry.shared_routes import SharedRoutes
from baton.registry.stored_responses import StoredResponses
from baton.telemetry.alive_clock import ALIVE
from baton.tenants.audit.log import AuditLog
from baton.tenants.erasures import Erasures
from baton.tenants.limits import Limits
from baton.tenants.quotas import SharedQuotas
from baton.tenants.shared_keys import SharedKeys
from baton.tenants.shared_limits import SharedLimits
from baton.tenants.usage.copies import UsageCopies
from baton.tenants.usage.shared import SharedUsage
from router.frontend import errors
from router.frontend.api import generation, models
from router.frontend.api.call_headers import CallHeaders
from router.frontend.api.messages import endpoints as messages
from router.frontend.api.messages.errors import MESSAGES_ERRORS
from router.frontend.api.parts import RouterParts
from router.frontend.api.pooling import calls as pooling
from router.frontend.api.responses import endpoints as responses
from router.frontend.audited import note_refused_login
from router.frontend.batch import calls as batch
from router.frontend.batch.runner import BatchRunner
from router.frontend.http.cors import allow_origins
from router.frontend.http.direct import DirectFastAPI
from router.frontend.http.reserve import Reserve
from router.frontend.http.web_pages import PageGuard
from router.frontend.openapi.document import describe
from router.frontend.operators import admin_commands as orders
from router.frontend.operators import keys, operations, page, tenants, usage
from router.frontend.operators import models as model_routes
from router.frontend.operators.deletion.follower import DeletionFollower
from router.frontend.operators.gates.watch import GateWatch
from router.lane_feeds import LaneFeeds, LaneSources
from router.routing.peers.share_feed import DemandSource
from router.routing.placement.index_feed import EventSource
from router.routing.requests.tickets import TicketSource
from router.routing.workers.table import WorkerDirectory
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.tenants.key_exchange import KeyExchange
from router.tenants.limits_table import SyncedLimits

_POLL_S = 0.01
_SAMPLE_S = 1.0

# New endpoints belong to one of these files, or to a new file that is listed here.
_ENDPOINTS = (
    generation.routes,
    responses.routes,
    messages.routes,
    pooling.routes,
    models.routes,
    operations.routes,
    page.routes,
    batch.routes,
)


class Router:
    """Router process. All parts that are shared through Redis are optional.

    Args:
        directory: List of the workers.
        events: KV events for the prefix index; None: routing without an index.
        shared_adapters: Table of the adapters that were loaded at run time.
        shared_tickets: Common order of the requests of all routers.
        shared_demands: Demands of all routers, which share limits; None: separate limits.
        fleet_orders: Queue of admin commands for the fleet's controller.
        shared_keys: API keys of ``baton keys``, which count if the fleet requires keys.
        shared_limits: Limits of tenants; None: there are none.
        shared_quotas: Banks from which routers lease parts of the limits.
        shared_usage: Usage of all routers and workers; None: this router's is not exported.
        audit: Audit log.
        erasures: Reports about deletions of tenants; None: tenants cannot be deleted.
        others: Models beside the first one.
        shared_routes: Aliases and canaries; None: names lead to the models of these names.
        shared_gates: Evidence about canaries; None: no canary is rolled back automatically.
    """

    def __init__(
        self,
        settings: RouterSettings,
        model: ServedModel,
        directory: WorkerDirectory,
        events: EventSource | None = None,
        shared_adapters: SharedAdapters | None = None,
        shared_tickets: TicketSource | None = None,
        shared_demands: DemandSource | None = None,
        stored_responses: StoredResponses | None = None,
        fleet_orders: Orders | None = None,
        shared_keys: SharedKeys | None = None,
        shared_limits: SharedLimits | None = None,
        shared_quotas: SharedQuotas | None = None,
        shared_usage: SharedUsage | None = None,
        erasures: Erasures | None = None,
        audit: AuditLog | None = None,
        others: Sequence[LaneSources] = (),
        shared_routes: SharedRoutes | None = None,
        shared_gates: SharedGates | None = None,
    ) -> None:
        self._shared_usage = shared_usage
        self._usage_copies: UsageCopies | None = None
        self.parts = RouterParts.build(
            settings,
            model,
            directory,
            stored_responses,
            shared_quotas,
            shared_usage,
            audit,
            shared_routes,
        )
        if shared_usage is not None and settings.state_dir:
            folder = Path(settings.state_dir) / "usage"
            self._usage_copies = UsageCopies(shared_usage, folder, self.parts.observer.task_failed)
            self.parts.usage.keep = self._usage_copies.keep
        if audit is not None:
            logins = self.parts.refused_logins
            audit.each_period.append(lambda: logins.take(time.monotonic_ns()))
        self.keys: KeyExchange | None = None
        if shared_keys is not None:
            file = Path(settings.state_dir) / "keys.json" if settings.state_dir else None
            self.keys = KeyExchange(
                settings.issued_keys, shared_keys, file, self.parts.observer.task_failed
            )
        self.limits: SyncedLimits | None = None
        if shared_limits is not None:
            file = Path(settings.state_dir) / "tenants.json" if settings.state_dir else None
            self.limits = SyncedLimits(
                shared_limits,
                self._use_policies,
                file,
                settings.tenants_file,
                self.parts.observer.task_failed,
            )
            settings.policies.expect()
            self.limits.on_table.append(settings.policies.adopt)
        self._erasures = erasures
        if self.limits is not None and erasures is not None:
            name = f"router {self.parts.gateway.router_id}"
            forget = self.parts.quotas.quotas.forget
            follower = DeletionFollower(settings, name, erasures, self.parts.tasks, forget)
            self.limits.on_table.append(follower.receive)
        first = LaneSources(
            settings=settings,
            model=model,
            directory=directory,
            events=events,
            adapters=shared_adapters,
            tickets=shared_tickets,
            demands=shared_demands,
            orders=fleet_orders,
        )
        self._gates = GateWatch(self.parts, shared_gates) if shared_gates is not None else None
        self._sources = [first, *others]
        self._lanes = [LaneFeeds(self.parts, first)]
        for one in others:
            parts = self.parts.beside(one.settings, one.model, one.directory)
            self._lanes.append(LaneFeeds(parts, one))

    def _use_policies(self, policies: Mapping[str, Limits]) -> None:
        self.parts.settings.policies.replace(policies)
        self.parts.quotas.quotas.set_limits(policies)

    @contextlib.asynccontextmanager
    async def running(self, app: ASGIApp | None = None) -> AsyncIterator[None]:
        """Run the background tasks within the context; ``app`` runs the lines of batches."""
        parts = self.parts
        parts.tasks.keep(ALIVE.run, "alive clock")
        lanes = contextlib.AsyncExitStack()
        for lane in self._lanes:
            await lanes.enter_async_context(lane.running())
        if self.keys is not None and parts.settings.api_keys is not None:
            await self.keys.start()
        if self.limits is not None:
            await self.limits.start()
        await parts.routes.start()
        parts.quotas.start()
        parts.usage.start()
        if self._usage_copies is not None:
            self._usage_copies.start()
        if parts.audit is not None:
            parts.audit.start()
        await self._wait_for_workers()
        if self._gates is not None:
            self._gates.start()
        parts.tasks.keep(self._sample, "live series")
        store = batch.store_of(parts.settings)
        if app is not None and store is not None:
            BatchRunner(store, parts.settings, parts.metrics, parts.tasks).start(app)
        try:
            yield
        finally:
            if self.keys is not None:
                await self.keys.close()
            if self.limits is not None:
                await self.limits.close()
            await parts.routes.close()
            await parts.quotas.close()
            await parts.tasks.close()
            if parts.audit is not None:
                await parts.audit.close()
            await lanes.aclose()
            await parts.answer_checks.close()
            await parts.usage.close()
            if self._usage_copies is not None:
                await self._usage_copies.close()
            parts.tracing.shutdown()

    async def _sample(self) -> None:
        """Close one sample of the live series each second."""
        loop = asyncio.get_running_loop()
        lanes = self.parts.lanes
        at_s = loop.time()
        while True:
            at_s = max(at_s + _SAMPLE_S, loop.time())  # never two at once after a delay
            await asyncio.sleep(at_s - loop.time())
            for lane in lanes:
                lane.worker_cells.note()
            queued = lanes.waiting
            running = lanes.in_flight - queued
            usable = [slot for lane in lanes for slot in lane.gateway.workers.usable]
            self.parts.observer.series.close(
                time.time(),
                queued=queued,
                running=running,
                last_turn=max(lane.gateway.workers.last_turn() for lane in lanes),
                sizes=Counter(str(slot.role) for slot in usable),
            )

    async def _wait_for_workers(self) -> None:
        """Wait until all workers of the list are connected, but at most ``start_limit_s``.

        The server starts listening afterwards, so that it does not reject requests because of
        workers that are not connected yet.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.parts.settings.start_limit_s
        while loop.time() < until_s:
            slots = self.parts.lanes.slots
            connected = all(slot.link is None or slot.link.live for slot in slots)
            if connected and all(one.directory.known for one in self._sources):
                return
            await asyncio.sleep(_POLL_S)

    def app(self) -> FastAPI:
        """Build the ASGI application."""
        app = DirectFastAPI(
            title="Baton router",
            summary="OpenAI's API over a disaggregated fleet",
            lifespan=self.running,
            # FastAPI's pages load scripts from other hosts, unlike `operators/page.py`.
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # its redirect would name the client's Host, without TLS
            # Baton traces and counts calls itself.
            telemetry={
                "tracing": False,
                "metrics": False,
                "logs": False,
                "auto_configure": False,
            },
        )
        errors.install(
            app,
            {"/v1/messages": MESSAGES_ERRORS},
            lambda request, reason: note_refused_login(self.parts, request, reason),
        )
        strict = self.parts.settings.clients.strict
        app.add_middleware(CallHeaders, metrics=self.parts.metrics, strict=strict)
        bodies: list[type[BaseModel]] = []
        direct: list[Route] = []
        made = [routes(self.parts) for routes in _ENDPOINTS]
        desks = {one.model.names[0]: one.orders for one in self._sources if one.orders is not None}
        if desks:
            made.append(orders.routes(self.parts, desks))
        if self.keys is not None:
            made.append(keys.routes(self.parts, self.keys))
        made.append(model_routes.routes(self.parts, desks))
        made.append(tenants.routes(self.parts, self.limits, self._erasures))
        if self._shared_usage is not None:
            made.append(usage.routes(self.parts, self._shared_usage))
        for endpoints in made:
            app.include_router(endpoints)
            bodies += endpoints.bodies
            direct += endpoints.direct
        app.direct = direct
        has_keys = self.parts.settings.api_keys is not None
        app.add_middleware(Reserve, settings=self.parts.settings, metrics=self.parts.metrics)
        if not has_keys:
            app.add_middleware(PageGuard, settings=self.parts.settings)
        allow_origins(app, self.parts.settings.clients)
        describe(app, bodies, self.parts.model.names[0], has_keys=has_keys)
        return app
