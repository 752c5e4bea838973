"""HEAD and OPTIONS, for every path that there is."""

from collections.abc import Iterable, Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAndOptions:
    """HEAD answers as GET without the body; OPTIONS says which methods a path has.

    A path that takes POST alone refuses HEAD with 405 and ``Allow``: there is nothing to get.

    Args:
        app: The application behind.
        routes: All that it serves.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes: Sequence[BaseRoute] = tuple(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer OPTIONS; pass the others on, HEAD as GET where there is one."""
        if scope["type"] == "http" and scope["method"] in ("HEAD", "OPTIONS"):
            methods = self._methods(scope)
            if methods and scope["method"] == "OPTIONS":
                response = Response(status_code=204, headers={"allow": ", ".join(sorted(methods))})
                await response(scope, receive, send)
                return
            if "GET" in methods:
                # The server knows that it was HEAD, and writes no body.
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)

    def _methods(self, scope: Scope) -> set[str]:
        """What the path can be asked with; empty where there is no such path."""
        methods: set[str] = set()
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                methods |= set(getattr(route, "methods", None) or ())
        if methods:
            methods.add("OPTIONS")
        if "GET" in methods:
            methods.add("HEAD")
        return methods
