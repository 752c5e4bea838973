"""What every endpoint is given: the parts of one router, and how bodies are read and documented.

An endpoint stands in one file of this folder, whose ``routes(router)`` adds it to an `Endpoints`;
``router/app.py`` lists these files.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar, get_type_hints

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from baton.registry.stored_responses import StoredResponses
from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from baton.telemetry.tracing import Tracing
from baton.types.errors import (
    ClientClosedError,
    DeadlineError,
    PayloadTooLargeError,
    SlowRequestError,
)
from router.frontend.api.prepare import Preparer
from router.frontend.http.connection import Deliveries
from router.frontend.http.encodings import BodyTooLargeError, Gunzip, utf8_of
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.worker_load import fitted_rates
from router.routing.requests.gateway import Gateway
from router.routing.requests.grammar_checker import GrammarChecker
from router.routing.requests.observer import Observer
from router.routing.requests.readiness import Prober
from router.routing.watch.request_log import RequestLog
from router.routing.workers.directory import WorkerDirectory
from router.served_model import ServedModel
from router.settings import RouterSettings

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """Everything that one router process holds.

    Attributes:
        tasks: What runs beside the endpoints.
        created: When the router started, as Unix time.
        stored_responses: Where responses are kept for later turns; None: nowhere.
    """

    settings: RouterSettings
    model: ServedModel
    metrics: Metrics
    tasks: BackgroundTasks
    deliveries: Deliveries
    tracing: Tracing
    observer: Observer
    request_log: RequestLog
    prefix_index: PrefixIndex
    gateway: Gateway
    preparer: Preparer
    grammars: GrammarChecker
    prober: Prober
    created: int
    stored_responses: StoredResponses | None

    @classmethod
    def build(
        cls,
        settings: RouterSettings,
        model: ServedModel,
        directory: WorkerDirectory,
        stored_responses: StoredResponses | None = None,
    ) -> Self:
        """The parts for one model and the workers that ``directory`` names."""
        metrics = Metrics("router", model=model.names[0])
        prefix_index = PrefixIndex()
        timing = settings.emulated
        metrics.set("baton_engine_info", 1, engine="emulated" if timing else "real", timing=timing)
        observer = Observer(metrics)
        tasks = BackgroundTasks(
            "router", lambda name: metrics.inc("baton_task_failures", task=name)
        )
        gateway = Gateway(settings, model.tokenizer, directory, prefix_index, observer)
        observer.fitted = lambda worker_id: fitted_rates(gateway.workers.get(worker_id))
        return cls(
            settings=settings,
            model=model,
            metrics=metrics,
            tasks=tasks,
            deliveries=Deliveries(),
            tracing=Tracing("router"),
            observer=observer,
            request_log=RequestLog(settings.logs, settings.api_keys, model.tokenizer),
            prefix_index=prefix_index,
            gateway=gateway,
            preparer=Preparer(model, settings),
            grammars=GrammarChecker(model.vocabulary, metrics),
            prober=Prober(gateway, settings, tasks),
            created=int(time.time()),
            stored_responses=stored_responses,
        )


class Endpoints(APIRouter):
    """The endpoints of one file.

    Attributes:
        bodies: What those of `post_body` parse.
        direct: Routes to those endpoints of `post_body` that return a response as it goes out.
            They do without FastAPI's work on each call and stand before all other routes.
            FastAPI's routes to the same endpoints document them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[type[BaseModel]] = []
        self.direct: list[Route] = []

    def post_body(self, path: str, kind: type[BaseModel]) -> Callable[[_Handler], _Handler]:
        """``post`` for an endpoint that reads a body of this ``kind`` with `read_body`."""
        self.bodies.append(kind)
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        content = {"application/json": {"schema": reference}}
        extra = {"requestBody": {"required": True, "content": content}}

        def documented(handler: _Handler) -> _Handler:
            if get_type_hints(handler).get("return") is Response:  # no work is left for FastAPI
                self.direct.append(Route(path, handler, methods=["POST"], include_in_schema=False))
            return self.post(path, openapi_extra=extra)(handler)

        return documented


async def read_body(request: Request, router: RouterParts, *, deadline_s: float = 0.0) -> bytes:
    """The request's body, read no further than the limit and no longer than its time.

    A body that comes packed is unfolded, and the limit holds for what it unfolds to.

    Args:
        request: Whose body it is.
        router: Has the limits.
        deadline_s: The request's own time, if it is to cover the body; 0 = none.

    Raises:
        PayloadTooLargeError: It is longer.
        UnsupportedMediaError: It is packed in a way that is not known here.
        InvalidRequestError: It is damaged, or not UTF-8.
        SlowRequestError: It takes longer than ``clients.body_timeout_s``.
        DeadlineError: It takes longer than the request may.
        ClientClosedError: The client left before it had sent all.
    """
    settings = router.settings
    own_s = router.settings.clients.body_timeout_s
    limit_bytes = settings.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    unfolder = Gunzip.of(request.headers.get("content-encoding", ""))
    body = bytearray()
    received_bytes = 0
    try:
        async with asyncio.timeout(min(own_s, deadline_s) if deadline_s else own_s):
            async for piece in request.stream():
                received_bytes += len(piece)
                if received_bytes > limit_bytes:
                    raise _too_large(limit_bytes)
                body += piece if unfolder is None else unfolder.feed(piece, limit_bytes - len(body))
    except BodyTooLargeError:
        raise _too_large(limit_bytes) from None
    except ClientDisconnect as gone:
        raise ClientClosedError("the client left while it sent its request") from gone
    except TimeoutError as late:
        router.metrics.inc("baton_client_timeouts", kind="body")
        if deadline_s and deadline_s < own_s:
            router.metrics.inc("baton_timeouts", phase="body")
            message = f"the request's body did not come within {deadline_s:g} s"
            raise DeadlineError(message, param="x-baton-timeout-ms") from late
        raise SlowRequestError(f"the request's body did not come within {own_s:g} s") from late
    if unfolder is not None:
        unfolder.end()
    return utf8_of(bytes(body))


def _too_large(limit_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than {limit_bytes} bytes")
