"""Errors as HTTP: always with OpenAI's body, whatever raised them."""

import logging
import secrets
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    QueueFullError,
    SlowRequestError,
    UnavailableError,
)
from telemetry.logs import request_context

_LOG = logging.getLogger(__name__)


def error_response(error: BatonError, request_id: str = "") -> JSONResponse:
    """The response that tells a client of ``error``."""
    headers = {"x-request-id": request_id} if request_id else {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(max(round(error.retry_after_s), 1))
    elif isinstance(error, UnavailableError):
        headers["retry-after"] = "1"
    if isinstance(error, SlowRequestError) or _cut_body(error):
        headers["connection"] = "close"  # the rest of the body is not wanted any more
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _cut_body(error: BatonError) -> bool:
    return isinstance(error, DeadlineError) and isinstance(error.__cause__, TimeoutError)


def _plain(status: int, message: str, kind: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _new_id() -> str:
    return f"req-{secrets.token_hex(16)}"


class _RequestIds:
    """Gives every response an ``x-request-id`` that has none of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", _new_id())
            await send(message)

        await self._app(scope, receive, send_named)


def install(app: FastAPI) -> None:
    """Make ``app`` answer every error with OpenAI's body, and every request with an id."""

    async def on_baton_error(request: Request, error: Exception) -> JSONResponse:
        known = error if isinstance(error, BatonError) else InternalError(str(error))
        return error_response(known)

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        call = f"{request.method} {request.url.path[:200]}"
        messages = {"Not Found": f"there is no {call}", "Method Not Allowed": f"no {call} here"}
        message = messages.get(str(error.detail), str(error.detail))
        codes = {404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "invalid_request")
        return JSONResponse(
            _plain(error.status_code, message, "invalid_request_error", code),
            status_code=error.status_code,
            headers=error.headers,
        )

    async def on_fault(request: Request, error: Exception) -> JSONResponse:
        name = _new_id()  # this answer goes out around the middleware
        with request_context(name, request.headers.get("traceparent", "")):
            _LOG.error("a request failed inside the router", exc_info=error)
        return error_response(InternalError("the router failed; see its log"), name)

    app.add_middleware(_RequestIds)
    app.add_exception_handler(BatonError, on_baton_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_fault)
