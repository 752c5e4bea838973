"""Service in reserved places of a router that has no free place for connections: see `Places`."""

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.types.errors import BatonError, UnavailableError
from router.frontend.http.places import no_place
from router.frontend.http.protocol import connection_of
from router.frontend.http.web_pages import PROBES
from router.process import Process


class Reserve:
    """ASGI middleware that keeps reserved places for health probes and callers with a valid key."""

    def __init__(self, app: ASGIApp, router: Process) -> None:
        self._app = app
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one call of the application."""
        connection = connection_of(scope) if scope["type"] == "http" else None
        if connection is None or not connection.is_crowded or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        access = self._router.access
        if not connection.has_key and (access.needs_key or connection.is_reserved):
            connection.has_key = access.has_key(Headers(scope=scope))
        if connection.has_key or not connection.is_reserved:
            await self._app(scope, receive, send)
            return
        self._router.metrics.inc("baton_connections_refused")
        refuse = scope["app"].exception_handlers[BatonError]
        error = UnavailableError(no_place(self._router.settings.clients.max_connections))
        response = await refuse(Request(scope), error)
        response.headers["connection"] = "close"
        await response(scope, receive, send)
