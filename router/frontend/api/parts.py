"""Parts of a router that endpoints use, registration of endpoints, and reading of bodies.

Each file of endpoints has a function ``routes(router)`` that returns `Endpoints`; ``router/app.py``
lists these files.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from baton.registry.shared_routes import SharedRoutes
from baton.registry.stored_responses import StoredResponses
from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from baton.telemetry.tracing import Tracing
from baton.tenants.audit.log import AuditLog
from baton.tenants.audit.refused_logins import RefusedLogins
from baton.tenants.usage.feed import UsageFeed, UsageSink
from baton.types.errors import (
    ClientClosedError,
    DeadlineError,
    InvalidRequestError,
    PayloadTooLargeError,
    SlowRequestError,
)
from baton.types.lanes import split_version
from router.frontend.api.prepare import Preparer
from router.frontend.http.connection import Deliveries
from router.frontend.http.encodings import BodyTooLargeError, Gunzip, utf8_of
from router.lanes.gate import GateBook
from router.lanes.lane_table import LaneTable
from router.lanes.route_table import SyncedRoutes
from router.lanes.shadow import Shadows
from router.routing.checks.answers import AnswerChecks
from router.routing.checks.grammars import GrammarChecker
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.worker_load import fitted_rates
from router.routing.reports.past_reports import PastReports
from router.routing.reports.refusals import RefusedRequests
from router.routing.reports.request_log import RequestLog
from router.routing.reports.worker_cells import WorkerCells
from router.routing.requests.gateway import Gateway
from router.routing.requests.observer import Observer
from router.routing.requests.readiness import Prober
from router.routing.workers.table import WorkerDirectory
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.tenants.quota_feed import QuotaFeed, QuotaSource

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """Parts of one lane of a router process. Lanes share all parts that have nothing of a model.

    Attributes:
        lanes: All lanes of the router.
        routes: Table that leads names to lanes.
        gates: Gates of the canaries and shadows in this table.
        shadows: Copies of requests that shadows run.
        created: Start of the router in Unix seconds.
        audit: Audit log; None: there is none.
        stored_responses: Storage of responses for later turns; None: responses are not stored.
    """

    settings: RouterSettings
    model: ServedModel
    metrics: Metrics
    tasks: BackgroundTasks
    deliveries: Deliveries
    tracing: Tracing
    observer: Observer
    request_log: RequestLog
    answer_checks: AnswerChecks
    refused: RefusedRequests
    past_reports: PastReports
    worker_cells: WorkerCells
    prefix_index: PrefixIndex
    gateway: Gateway
    preparer: Preparer
    grammars: GrammarChecker
    prober: Prober
    created: int
    stored_responses: StoredResponses | None
    quotas: QuotaFeed
    usage: UsageFeed
    refused_logins: RefusedLogins
    lanes: "LaneTable[RouterParts]"
    routes: SyncedRoutes
    gates: GateBook
    shadows: Shadows
    audit: AuditLog | None = None

    @classmethod
    def build(
        cls,
        settings: RouterSettings,
        model: ServedModel,
        directory: WorkerDirectory,
        stored_responses: StoredResponses | None = None,
        shared_quotas: QuotaSource | None = None,
        shared_usage: UsageSink | None = None,
        audit: AuditLog | None = None,
        shared_routes: SharedRoutes | None = None,
    ) -> Self:
        """Build the parts for one model and the workers in ``directory``."""
        metrics = Metrics("router", model=model.names[0])
        prefix_index = PrefixIndex()
        _show_lane(metrics, settings, model)
        metrics.set("baton_worker_price_per_hour", settings.price_per_hour)
        observer = Observer(metrics)
        tasks = BackgroundTasks(
            "router", lambda name: metrics.inc("baton_task_failures", task=name)
        )
        gateway = Gateway(settings, model.tokenizer, directory, prefix_index, observer)
        observer.fitted = lambda worker_id: fitted_rates(gateway.workers.get(worker_id))
        gates = GateBook()
        checks = AnswerChecks(metrics)
        routes_file = Path(settings.state_dir) / "routes.json" if settings.state_dir else None
        made = cls(
            lanes=LaneTable(),
            routes=SyncedRoutes(shared_routes, routes_file, observer.task_failed),
            gates=gates,
            shadows=Shadows(gates, metrics, tasks),
            settings=settings,
            model=model,
            metrics=metrics,
            tasks=tasks,
            deliveries=Deliveries(),
            tracing=Tracing("router"),
            observer=observer,
            request_log=RequestLog(settings, model.tokenizer, checks),
            answer_checks=checks,
            refused=RefusedRequests(settings.kept_records),
            past_reports=PastReports(),
            worker_cells=WorkerCells(gateway.workers),
            prefix_index=prefix_index,
            gateway=gateway,
            preparer=Preparer(model, settings, gateway.workers.pool_tokens),
            grammars=GrammarChecker(model.vocabulary, metrics),
            prober=Prober(gateway, settings, tasks),
            created=int(time.time()),
            stored_responses=stored_responses,
            audit=audit,
            refused_logins=RefusedLogins(),
            quotas=QuotaFeed(
                gateway.router_id,
                shared_quotas,
                lambda: gateway.shares.known_routers,
                observer.task_failed,
                lambda tenant, limit: metrics.inc(
                    "baton_quota_refusals", tenant=tenant, limit=limit
                ),
            ),
            usage=UsageFeed(
                gateway.usage.ledger,
                shared_usage,
                observer.task_failed,
                price_per_hour=settings.price_per_hour,
            ),
        )
        made.lanes.add(made)
        return made

    @property
    def is_loaded(self) -> bool:
        """True if the lane should have workers: an operator has not unloaded its model."""
        return any(slot.is_kept for slot in self.gateway.workers)

    def beside(
        self, settings: RouterSettings, model: ServedModel, directory: WorkerDirectory
    ) -> Self:
        """Build the parts of another model with its own workers, and serve it, too."""
        _show_lane(self.metrics, settings, model)
        prefix_index = PrefixIndex()
        observer = Observer(self.metrics, self.observer)
        ledger = self.gateway.usage.ledger
        gateway = Gateway(settings, model.tokenizer, directory, prefix_index, observer, ledger)
        observer.fitted = lambda worker_id: fitted_rates(gateway.workers.get(worker_id))
        made = replace(
            self,
            settings=settings,
            model=model,
            observer=observer,
            request_log=RequestLog(settings, model.tokenizer, self.answer_checks),
            prefix_index=prefix_index,
            gateway=gateway,
            worker_cells=WorkerCells(gateway.workers),
            preparer=Preparer(model, settings, gateway.workers.pool_tokens),
            grammars=GrammarChecker(model.vocabulary, self.metrics),
            prober=Prober(gateway, settings, self.tasks),
            created=int(time.time()),
        )
        self.lanes.add(made)
        return made


def _show_lane(metrics: Metrics, settings: RouterSettings, model: ServedModel) -> None:
    timing = settings.emulated
    kind = settings.external or ("emulated" if timing else "real")
    metrics.set("baton_engine_info", 1, engine=kind, timing=timing)
    name = model.names[0]
    number = str(split_version(name)[1])
    metrics.set("baton_model_info", 1, model=name, version=model.version, number=number)


class Endpoints(APIRouter):
    """Endpoints of one file.

    Attributes:
        bodies: Classes of the bodies of `post_body` endpoints.
        direct: Routes to those `post_body` endpoints that return a complete response. They bypass
            FastAPI; its routes to the same endpoints serve as documentation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[type[BaseModel]] = []
        self.direct: list[Route] = []

    def post_body(self, path: str, kind: type[BaseModel]) -> Callable[[_Handler], _Handler]:
        """Register a POST endpoint that reads a body of this ``kind`` with `read_body`."""
        self.bodies.append(kind)
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        content = {"application/json": {"schema": reference}}
        extra = {"requestBody": {"required": True, "content": content}}

        def documented(handler: _Handler) -> _Handler:
            if get_type_hints(handler).get("return") is Response:
                self.direct.append(Route(path, handler, methods=["POST"], include_in_schema=False))
            return self.post(path, openapi_extra=extra)(handler)

        return documented


async def read_body(request: Request, router: RouterParts, *, deadline_s: float = 0.0) -> bytes:
    """Read a request's body within its limits of size and time; decompress it if necessary.

    Args:
        request: HTTP request.
        router: Parts with the limits. The size limit applies to the decompressed body.
        deadline_s: Time limit of the request, if it includes reading the body; 0 = none.

    Raises:
        PayloadTooLargeError: The body is too large.
        UnsupportedMediaError: The compression is not supported.
        InvalidRequestError: The body is corrupt, or not UTF-8.
        SlowRequestError: Reading takes longer than ``clients.body_timeout_s``.
        DeadlineError: Reading takes longer than ``deadline_s``.
        ClientClosedError: The client disconnected before the end of the body.
    """
    settings = router.settings
    own_s = router.settings.clients.body_timeout_s
    limit_bytes = settings.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    decoder = Gunzip.of(request.headers.get("content-encoding", ""))
    body = bytearray()
    received_bytes = 0
    try:
        async with asyncio.timeout(min(own_s, deadline_s) if deadline_s else own_s):
            async for piece in request.stream():
                received_bytes += len(piece)
                if received_bytes > limit_bytes:
                    raise _too_large(limit_bytes)
                body += piece if decoder is None else decoder.feed(piece, limit_bytes - len(body))
    except BodyTooLargeError:
        raise _too_large(limit_bytes) from None
    except ClientDisconnect as gone:
        raise ClientClosedError("the client disconnected while it sent the request") from gone
    except TimeoutError as late:
        router.metrics.inc("baton_client_timeouts", kind="body")
        if deadline_s and deadline_s < own_s:
            router.metrics.inc("baton_timeouts", phase="body")
            message = f"the body was not complete within {deadline_s:g} s (x-baton-timeout-ms)"
            raise DeadlineError(message, param="x-baton-timeout-ms") from late
        raise SlowRequestError(
            f"the body was not complete within {own_s:g} s (clients.body_timeout_s)"
        ) from late
    if decoder is not None:
        decoder.end()
    return utf8_of(bytes(body))


def page_of(entries: Sequence[dict[str, Any]], limit: int, after: str) -> dict[str, Any]:
    """Return up to ``limit`` entries of a list after the entry ``after``, in OpenAI's format.

    Raises:
        InvalidRequestError: There is no entry ``after``.
    """
    names = [entry["id"] for entry in entries]
    if after and after not in names:
        raise InvalidRequestError.at("after", f"{after[:80]!r} does not exist")
    begin = names.index(after) + 1 if after else 0
    page = entries[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(entries),
    }


def _too_large(limit_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than {limit_bytes} bytes")
