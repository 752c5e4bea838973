"""Service in reserved places of a router that has no free place for connections: see `Places`."""

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.telemetry.metrics import Metrics
from baton.types.errors import BatonError, UnavailableError
from router.frontend.access import has_key
from router.frontend.http.connection import connection_of
from router.frontend.http.web_pages import PROBES
from router.settings import RouterSettings


class Reserve:
    """ASGI middleware that keeps reserved places for health probes and callers with a valid key."""

    def __init__(self, app: ASGIApp, settings: RouterSettings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one call of the application."""
        connection = connection_of(scope) if scope["type"] == "http" else None
        if connection is None or not connection.is_crowded or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        if not connection.has_key and (
            self._settings.api_keys is not None or connection.is_reserved
        ):
            connection.has_key = has_key(Headers(scope=scope), self._settings)
        if connection.has_key or not connection.is_reserved:
            await self._app(scope, receive, send)
            return
        self._metrics.inc("baton_connections_refused")
        refuse = scope["app"].exception_handlers[BatonError]
        error = UnavailableError(no_place(self._settings.clients.max_connections))
        response = await refuse(Request(scope), error)
        response.headers["connection"] = "close"
        await response(scope, receive, send)


def no_place(limit: int) -> str:
    """Return the message for a client without a place."""
    return (
        f"{limit} connections are open, the limit (clients.max_connections), or half of them of "
        "this address; retry later"
    )
