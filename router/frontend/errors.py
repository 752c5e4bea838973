"""HTTP responses of errors, in the format of the API that was called."""

import logging
import math
import re
import reprlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.telemetry.logs import request_context
from baton.types.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    RateLimitError,
    SlowRequestError,
    UnauthorizedError,
    UnavailableError,
)
from router.frontend.rate_limits import Headers, openai_headers
from router.tenants.quota import Standing

_LOG = logging.getLogger(__name__)
MISSING_HERE = "missing_here"
"""Type of the error of a field that is required by the value of another one."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHOWN_FIELDS = 16
_LONGEST_WAIT_S = 120  # OpenAI's clients wait no longer; Anthropic's would, for a day
_OBJECTS = ("dict_type", "model_type", "model_attributes_type", "dataclass_type")


class ErrorShape:
    """Format of an API's errors and of the headers with a request's id: OpenAI's, by default."""

    def status(self, error: BatonError) -> int:
        """Return the HTTP status code."""
        return error.status

    def body(self, error: BatonError, request_id: str) -> dict[str, Any]:
        """Return the body as JSON."""
        return error.body()

    def id_headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """Return the headers with the request's id, for successful responses as well."""
        return [(b"x-request-id", request_id.encode())]

    def limit_headers(self, standings: Mapping[str, Standing]) -> Headers:
        """Return the headers about the limits of the tenant."""
        return openai_headers(standings)


OPENAI_ERRORS = ErrorShape()


def error_response(
    error: BatonError,
    request_id: str = "",
    shape: ErrorShape = OPENAI_ERRORS,
    more: Iterable[tuple[bytes, bytes]] = (),
) -> JSONResponse:
    """Return the HTTP response for ``error``, with ``more`` headers."""
    headers = {name.decode(): value.decode() for name, value in more}
    if isinstance(error, QueueFullError):
        rounded = math.ceil if isinstance(error, RateLimitError) else round
        headers["retry-after"] = str(max(rounded(error.retry_after_s), 1))
        if error.retry_after_s > _LONGEST_WAIT_S:
            headers["x-should-retry"] = "false"
    elif _is_final(error):
        headers["x-should-retry"] = "false"
    elif isinstance(error, UnavailableError):
        headers["retry-after"] = "1"
    body_is_late = isinstance(error, DeadlineError) and isinstance(error.__cause__, TimeoutError)
    if isinstance(error, SlowRequestError) or body_is_late:
        headers["connection"] = "close"  # the rest of the body is not read
    return _response(error, request_id, shape, headers)


def _is_final(error: BatonError) -> bool:
    """Return whether clients would repeat a request that fails again; they go by the status.

    Faults of which nothing is known may be repeated, and requests that arrived too slowly.
    """
    is_repeated = error.status in (409, 429) or error.status >= 500
    return is_repeated and not error.retryable and type(error) is not InternalError


def _response(
    error: BatonError, request_id: str, shape: ErrorShape, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    named = {name.decode(): value.decode() for name, value in shape.id_headers(request_id)}
    return JSONResponse(
        shape.body(error, request_id),
        status_code=shape.status(error),
        headers={**(named if request_id else {}), **(headers or {})},
    )


def new_id() -> str:
    """Return an id for a request that does not get one from `Preparer`."""
    return f"req-{secrets.token_hex(16)}"


def refused_id(request: Request) -> str:
    """Return the id of a request that is refused, which its records and its response share."""
    state = request.scope.setdefault("state", {})
    name: str = state.setdefault("refused_id", new_id())
    return name


class _RequestIds:
    """Adds an ``x-request-id`` to every response that has none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", new_id())
            await send(message)

        await self._app(scope, receive, send_named)


def install(
    app: FastAPI,
    shapes: Mapping[str, ErrorShape] | None = None,
    on_refused_login: Callable[[Request, str], None] = lambda _request, _reason: None,
) -> None:
    """Install handlers that return errors with a request id, in the format of the path's API.

    Args:
        app: Application.
        shapes: Formats by path prefix; all other paths use OpenAI's.
        on_refused_login: Receives the calls without a valid API key, and the reason.
    """
    prefixes = tuple((shapes or {}).items())

    def shape_of(request: Request) -> ErrorShape:
        path = request.url.path
        return next((s for prefix, s in prefixes if path.startswith(prefix)), OPENAI_ERRORS)

    async def on_baton_error(request: Request, error: Exception) -> JSONResponse:
        known = error if isinstance(error, BatonError) else InternalError(str(error))
        if isinstance(error, UnauthorizedError):
            on_refused_login(request, error.message)
        return error_response(known, refused_id(request), shape_of(request))

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        call = f"{request.method} {request.url.path[:200]}"
        messages = {
            "Not Found": f"{call} does not exist",
            "Method Not Allowed": f"{call} is not allowed",
        }
        message = messages.get(str(error.detail), str(error.detail))
        codes = {404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "invalid_request")
        known = InvalidRequestError(message)
        vars(known).update(status=error.status_code, code=code)  # else those of its class
        return _response(known, new_id(), shape_of(request), error.headers)

    async def on_query_fault(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, RequestValidationError):
            raise error
        fault = error.errors()[0]
        known = InvalidRequestError.at(str(fault["loc"][-1]), sentence(fault))
        return error_response(known, refused_id(request), shape_of(request))

    async def on_fault(request: Request, error: Exception) -> JSONResponse:
        name = new_id()  # this response bypasses the middleware
        with request_context(name, request.headers.get("traceparent", "")):
            _LOG.error("failed to handle a request", exc_info=error)
        failure = InternalError("the router failed; see its log")
        # The server closes the connection after an exception.
        closes = ((b"connection", b"close"),)
        return error_response(failure, name, shape_of(request), closes)

    app.add_middleware(_RequestIds)
    app.add_exception_handler(BatonError, on_baton_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_query_fault)
    app.add_exception_handler(Exception, on_fault)


def sentence(item: Any) -> str:
    """Return what is wrong in an error of pydantic."""
    if item["type"] in ("missing", MISSING_HERE):
        return "is required"
    if item["type"] in _OBJECTS:
        message = "must be an object"
    elif item["type"] == "union_tag_invalid":
        message = f"must be of type {item['ctx']['expected_tags'].replace(', ', ' or ')}"
    elif item["type"] == "union_tag_not_found":
        message = "must have a type"
    else:
        message = re.sub(r"^\w+ should", "must", str(item["msg"])).replace("valid list", "list")
        message = re.sub(r" after validation(, not \d+)?$", "", message)
    if "input" not in item:
        return message
    given = item["input"]
    if isinstance(given, dict) and len(given) > _SHOWN_FIELDS:  # they would be sorted
        given = dict(islice(given.items(), _SHOWN_FIELDS))
    shown = repr(given) if isinstance(given, int | float) else _SHORT.repr(given)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"{message} (got {shown})"
