"""Direct calls of the busiest endpoints, without FastAPI's routing and middlewares."""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request, Response
from starlette.middleware import Middleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectFastAPI(FastAPI):
    """FastAPI application that calls some POST endpoints directly.

    Attributes:
        direct: Endpoints by path, which accept a request and return a response.
    """

    direct: Mapping[str, Callable[[Request], Awaitable[Response]]]

    def build_middleware_stack(self) -> ASGIApp:
        """Build the application's stack, and a shorter one for the direct endpoints."""
        fault = self.exception_handlers.get(Exception)
        known = {kind: on for kind, on in self.exception_handlers.items() if kind is not Exception}
        around = [
            Middleware(ServerErrorMiddleware, handler=fault),
            *self.user_middleware,
            Middleware(ExceptionMiddleware, handlers=known),
        ]
        endpoints = self.direct

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoints[scope["path"]](Request(scope, receive, send))
            await response(scope, receive, send)

        stack: ASGIApp = call
        for layer in reversed(around):
            stack = layer.cls(stack, *layer.args, **layer.kwargs)
        others = super().build_middleware_stack()

        async def fork(scope: Scope, receive: Receive, send: Send) -> None:
            is_direct = scope["type"] == "http" and scope["method"] == "POST"
            app = stack if is_direct and scope["path"] in endpoints else others
            await app(scope, receive, send)

        return fork
