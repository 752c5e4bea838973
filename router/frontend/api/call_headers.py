"""Headers of all responses, including errors: the client's request id and the ignored fields."""

import re
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.telemetry.logs import client_context
from baton.telemetry.metrics import Metrics
from router.frontend.api.bodies.fields import HEADER, Ignored

# It appears in logs, traces and a header, so it must not need escaping.
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,128}")


def client_id_of(headers: Mapping[str, str]) -> str:
    """Return the client's ``x-request-id``; empty if it is missing or contains other characters."""
    given = headers.get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else ""


def ignored_of(request: Request) -> Ignored:
    """Return the collection of this call's unknown fields."""
    ignored: Ignored = request.state.ignored
    return ignored


class CallHeaders:
    """ASGI middleware that adds ``x-request-id`` and ``x-baton-ignored``."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, strict: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._strict = strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one call of the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ignored = Ignored(strict=self._strict)
        scope.setdefault("state", {})["ignored"] = ignored
        client_id = client_id_of(Headers(scope=scope))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and (client_id or ignored):
                headers = MutableHeaders(scope=message)
                if client_id:
                    headers["x-request-id"] = client_id
                if ignored:
                    headers[HEADER] = ignored.header()
                    for where in ignored.labels():
                        self._metrics.inc("baton_ignored_fields", where=where)
            await send(message)

        with client_context(client_id):
            await self._app(scope, receive, send_with_headers)
