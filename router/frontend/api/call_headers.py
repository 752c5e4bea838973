"""What every answer says in its header, error or not: the client's own id, and what was left aside.

A middleware, because it must not matter who writes the answer, or whether it is a stream.
"""

import re
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.telemetry.logs import client_context
from baton.telemetry.metrics import Metrics
from router.frontend.api.bodies.fields import HEADER, Ignored

# It stands in logs, in traces and in a header: no white space, no quotes, nothing to escape.
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,128}")


def client_id_of(headers: Mapping[str, str]) -> str:
    """The ``x-request-id`` that a client gave its call; empty: none that is fit to repeat."""
    given = headers.get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else ""


def ignored_of(request: Request) -> Ignored:
    """Where the fields of this call are noted that nobody knows."""
    ignored: Ignored = request.state.ignored
    return ignored


class CallHeaders:
    """Adds ``x-request-id`` and ``x-baton-ignored``.

    Args:
        app: The application below.
        metrics: Count what is left aside.
        strict: Such fields are refused.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, *, strict: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._strict = strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
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
                    self._count(ignored)
            await send(message)

        with client_context(client_id):
            await self._app(scope, receive, send_with_headers)

    def _count(self, ignored: Ignored) -> None:
        for place in ignored:
            # Only fields that are known stand before the dot, so these labels are few.
            where = place.rpartition(".")[0] or "body"
            self._metrics.inc("baton_ignored_fields", where=where)
