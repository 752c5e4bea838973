"""Makes the routers of a group answer as one: what a call needs of the others is fetched.

Most calls need nothing: every router sees all workers, and responses, adapters, batches and orders
are shared already. Three kinds do.

- Sums: every router has its own part of the answer.
- Finds: one router knows, and it is not known which.
- News: what one was told, the others shall know before the caller asks them.
"""

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.routing.group.pages import Pages
from router.routing.group.past_pages import PastPages
from router.routing.group.siblings import OWN_ANSWER, Siblings
from router.routing.group.together import latest_of, load_of, series_of

_PID = b"x-baton-router"
_FINDS = re.compile(
    r"(GET /fleet/requests/[^/]+|GET /v1/responses/[^/]+|POST /v1/responses/[^/]+/cancel)"
)
# 503: without Redis a router finds nothing but what runs on itself.
_MAY_BE_ELSEWHERE = (400, 404, 503)
_NEWS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_JSON: Mapping[str, Callable[[list[Any], Mapping[str, str]], Any]] = {
    "/load": load_of,
    "/fleet/series": series_of,
    "/fleet/requests": latest_of,
}


def _path_of(scope: Scope) -> str:
    """Path and query as they were sent."""
    path, query = (scope[name].decode("latin-1") for name in ("raw_path", "query_string"))
    return f"{path}?{query}" if query else path


class _Answer:
    """An answer that is held back."""

    def __init__(self) -> None:
        self.start: Message = {}
        self.body = b""

    async def take(self, message: Message) -> None:
        """As an application's ``send``."""
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    @property
    def status(self) -> int:
        """Of HTTP."""
        return int(self.start["status"])

    async def send(self, send: Send, body: bytes | None = None) -> None:
        """Send it, or another body in its place."""
        body = self.body if body is None else body
        kept = [header for header in self.start["headers"] if header[0] != b"content-length"]
        length = (b"content-length", b"%d" % len(body))
        await send({**self.start, "headers": [*kept, length]})
        await send({"type": "http.response.body", "body": body})


class AnyRouter:
    """The application of a router that has siblings.

    Args:
        app: Of this router alone.
        siblings: The others.
        past: Metrics of routers that are no more.
        together: How gauges are put together.
    """

    def __init__(
        self, app: ASGIApp, siblings: Siblings, past: PastPages, together: Mapping[str, str]
    ) -> None:
        self._app = app
        self._siblings = siblings
        self._past = past
        self._together = together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        if scope["type"] != "http" or not (how := self._way_of(scope)):
            await self._app(scope, receive, send)
            return
        await how(scope, receive, send)

    def _way_of(self, scope: Scope) -> Callable[[Scope, Receive, Send], Any] | None:
        method = scope["method"]
        path = scope["path"]
        if path.startswith("/v1/") and not path.startswith("/v1/responses/") and path not in _NEWS:
            return None  # nearly all
        own = any(name == OWN_ANSWER.encode() for name, _ in scope["headers"])
        if path == "/metrics":
            return self._own_page if own else self._page
        if own:
            return None
        if method == "GET" and path in _JSON:
            return self._sum
        if path in _NEWS:
            return self._news
        return self._find if _FINDS.fullmatch(f"{method} {path}") else None

    # --- sums ------------------------------------------------------------------------------------

    async def _own_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = _Answer()
        await self._app(scope, receive, own.take)
        if own.status == 200:
            self._past.keep(own.body)
            own.start["headers"].append((_PID, b"%d" % os.getpid()))
        await own.send(send)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = _Answer()
        await self._app(scope, receive, own.take)
        if own.status != 200 or scope["method"] != "GET":
            await own.send(send)
            return
        answers = await self._siblings.ask_all("/metrics", Headers(scope=scope))
        heard = {int(found.headers.get(_PID.decode(), 0)) for found in answers.values()}
        pages = [own.body, *(found.content for found in answers.values())]
        page = await asyncio.to_thread(self._added, own.body, pages, heard)
        await own.send(send, page)

    def _added(self, own: bytes, pages: list[bytes], heard: set[int]) -> bytes:
        self._past.keep(own)
        together = Pages(self._together)
        for page in pages:
            together.add(page)
        for page in self._past.unheard(heard):
            together.add(page, past=True)
        return together.render()

    async def _sum(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = _Answer()
        await self._app(scope, receive, own.take)
        if own.status != 200:
            await own.send(send)
            return
        query = scope["query_string"].decode("latin-1")
        path = _path_of(scope)
        answers = await self._siblings.ask_all(path, Headers(scope=scope))
        parts = [orjson.loads(own.body), *(found.json() for found in answers.values())]
        asked = dict(parse_qsl(query))
        await own.send(send, orjson.dumps(_JSON[scope["path"]](parts, asked)))

    # --- finds and news --------------------------------------------------------------------------

    async def _find(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = _Answer()
        await self._app(scope, receive, own.take)
        if own.status in _MAY_BE_ELSEWHERE:
            headers = Headers(scope=scope)
            for index in self._siblings.alive:
                found = await self._siblings.ask(index, scope["method"], _path_of(scope), headers)
                if found is not None and found.status_code == 200:
                    own.start["status"] = 200
                    own.body = found.content
                    break
        await own.send(send)

    async def _news(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()

        async def listen() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        own = _Answer()
        await self._app(scope, listen, own.take)
        if own.status == 200:
            headers = Headers(scope=scope)
            told = [
                self._siblings.ask(index, "POST", scope["path"], headers, bytes(body))
                for index in self._siblings.alive
            ]
            await asyncio.gather(*told)  # one that does not hear follows within half a second
        await own.send(send)
