"""HTTP application of a router."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from baton.telemetry.metric_export import MetricExport
from router.endpoint_picker.server import PickerServer
from router.frontend import errors
from router.frontend.api import generation, models, token_calls
from router.frontend.api.call_headers import CallHeaders
from router.frontend.api.endpoints import Endpoints
from router.frontend.api.messages import endpoints as messages
from router.frontend.api.messages.errors import MESSAGES_ERRORS
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
from router.frontend.operators import admin_commands, keys, operations, page, tenants, usage
from router.frontend.operators import models as model_routes
from router.frontend.operators.deletion.follower import DeletionFollower
from router.frontend.operators.gates.watch import GateWatch
from router.process import Process

# New endpoints belong to one of these files, or to a new file that is listed here.
_ENDPOINTS = (
    generation.routes,
    responses.routes,
    messages.routes,
    token_calls.routes,
    pooling.routes,
    models.routes,
    operations.routes,
    page.routes,
    batch.routes,
)


def build_app(process: Process) -> FastAPI:
    """Build the ASGI application, within whose lifespan the process runs."""
    _follow_deletions(process)

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        picks = process.settings.picker_port > 0
        picker = PickerServer(process).running() if picks else contextlib.nullcontext()
        export = MetricExport(process.metrics, process.refresh_gauges)
        exporting = process.tasks.beside(export.run(), "metrics export")
        async with process.running(), picker, exporting:
            if process.sources is not None:
                GateWatch(process, process.sources.gates).start()
            store = batch.store_of(process)
            if store is not None:
                runner = BatchRunner(store, process)
                runner.start(app)
            yield

    app = DirectFastAPI(
        title="Baton router",
        summary="OpenAI's API over a disaggregated fleet",
        lifespan=running,
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
        lambda request, reason: note_refused_login(process, request, reason),
    )
    settings = process.settings
    app.add_middleware(CallHeaders, metrics=process.metrics, strict=settings.clients.strict)
    made = _endpoints(process)
    for endpoints in made:
        app.router.routes.extend(endpoints.routes)  # `include_router` would build each again
    app.direct = {path: call for endpoints in made for path, call in endpoints.direct.items()}
    has_keys = process.access.needs_key
    app.add_middleware(Reserve, router=process)
    if not has_keys:
        app.add_middleware(PageGuard, router=process)
    allow_origins(app, settings.clients)
    bodies = [body for endpoints in made for body in endpoints.bodies]
    describe(app, bodies, process.lanes.first.model.names[0], has_keys=has_keys)
    return app


def _endpoints(process: Process) -> list[Endpoints]:
    made = [routes(process) for routes in _ENDPOINTS]
    commands = {
        lane.model.names[0]: lane.sources.tables.commands
        for lane in process.lanes
        if lane.sources.tables is not None
    }
    if commands:
        made.append(admin_commands.routes(process, commands))
    if process.keys is not None:
        made.append(keys.routes(process, process.keys))
    made.append(model_routes.routes(process, commands))
    made.append(tenants.routes(process))
    if process.sources is not None:
        made.append(usage.routes(process, process.sources.usage))
    return made


def _follow_deletions(process: Process) -> None:
    if process.limits is None or process.sources is None:
        return
    follower = DeletionFollower(process, process.sources.erasures)
    process.limits.on_table.append(follower.receive)
