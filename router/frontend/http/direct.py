"""Direct calls of the busiest endpoints, without FastAPI's routing and middlewares."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectFastAPI(FastAPI):
    """FastAPI application that calls some POST endpoints directly.

    Attributes:
        direct: Routes with a fixed path, whose endpoints accept a request and return a response.
    """

    direct: Sequence[Route] = ()

    def build_middleware_stack(self) -> ASGIApp:
        """Build the application's stack, and a shorter one for the direct endpoints."""
        fault = self.exception_handlers.get(Exception)
        known = {kind: on for kind, on in self.exception_handlers.items() if kind is not Exception}
        around = [
            Middleware(ServerErrorMiddleware, handler=fault),
            *self.user_middleware,
            Middleware(ExceptionMiddleware, handlers=known),
        ]
        stack: ASGIApp = _DirectEndpoints(self.direct)
        for layer in reversed(around):
            stack = layer.cls(stack, *layer.args, **layer.kwargs)
        paths = frozenset(route.path for route in self.direct)
        return _Fork(paths, stack, super().build_middleware_stack())


class _DirectEndpoints:
    def __init__(self, routes: Sequence[Route]) -> None:
        self._endpoints = {route.path: route.endpoint for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoints[scope["path"]](Request(scope, receive, send))
        await response(scope, receive, send)


class _Fork:
    def __init__(self, paths: frozenset[str], direct: ASGIApp, others: ASGIApp) -> None:
        self._paths = paths
        self._direct = direct
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_direct = scope["type"] == "http" and scope["method"] == "POST"
        app = self._direct if is_direct and scope["path"] in self._paths else self._others
        await app(scope, receive, send)
