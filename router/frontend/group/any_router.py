"""Lets any router of a group answer for all of them.

Most calls need one router only: every router sees all workers, and responses, adapters, batches and
admin commands are shared. Three kinds of calls need the others:

- sums: every router has a part of the answer;
- searches: one router has the answer, and it is not known which;
- announcements: a change must reach the other routers before the caller contacts them.
"""

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from prometheus_client.samples import Exemplar
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.telemetry import openmetrics
from router.frontend.group.pages import Pages
from router.frontend.group.past_pages import PastPages
from router.frontend.group.siblings import OWN_ANSWER, Accept, MakeConnection, Siblings
from router.frontend.group.together import latest_of, load_of, series_of
from router.frontend.off_loop import Shared

_PID = b"x-baton-router"
_SEARCHES = re.compile(
    r"(GET /fleet/requests/[^/]+|GET /v1/responses/[^/]+|POST /v1/responses/[^/]+/cancel)"
)
# 503: without Redis a router finds only responses that run on itself.
_MAY_BE_ELSEWHERE = (400, 404, 503)
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_ANNOUNCEMENTS = re.compile(
    rf"(POST ({'|'.join(_ADAPTERS)}|/inference/v1/abort_requests)|DELETE /fleet/keys/[^/]+)"
)
_JSON: Mapping[str, Callable[[list[Any], Mapping[str, str]], Any]] = {
    "/load": load_of,
    "/fleet/series": series_of,
    "/fleet/requests": latest_of,
}


def _path_of(scope: Scope) -> str:
    path, query = (scope[name].decode("latin-1") for name in ("raw_path", "query_string"))
    return f"{path}?{query}" if query else path


class _Answer:
    def __init__(self) -> None:
        self.start: Message = {}
        self.body = b""

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    @property
    def status(self) -> int:
        return int(self.start["status"])

    async def send(self, send: Send, body: bytes | None = None) -> None:
        body = self.body if body is None else body
        kept = [header for header in self.start["headers"] if header[0] != b"content-length"]
        length = (b"content-length", b"%d" % len(body))
        await send({**self.start, "headers": [*kept, length]})
        await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True, slots=True)
class AnyRouter:
    """ASGI application of a router that has siblings; ``together`` is explained in `Pages`.

    ``render`` returns the metrics of this router alone.
    """

    app: ASGIApp
    siblings: Siblings
    past: PastPages
    together: Mapping[str, str]
    exemplars: Callable[[], Mapping[tuple[object, ...], Exemplar]] = dict
    render: Callable[[], bytes] = bytes
    pages: dict[bool, Shared[bytes]] = field(
        default_factory=lambda: {True: Shared(), False: Shared()}
    )

    async def join(self, make_connection: MakeConnection, accept: Accept) -> None:
        """Join the group, now that this router serves; see `Siblings.start`."""
        await asyncio.to_thread(self.past.sum_up)
        await self.siblings.start(make_connection, accept)

    async def close(self) -> None:
        """Leave the group and save this router's metrics."""
        await self.siblings.close()
        self.past.keep(self.render())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call, with the help of other routers if it needs them."""
        if scope["type"] != "http" or not (handler := self._handler(scope)):
            await self.app(scope, receive, send)
            return
        await handler(scope, receive, send)

    def _handler(self, scope: Scope) -> Callable[[Scope, Receive, Send], Any] | None:
        method = scope["method"]
        path = scope["path"]
        unshared = path.startswith("/v1/") and not path.startswith("/v1/responses/")
        if unshared and path not in _ADAPTERS:
            return None  # nearly all calls
        own = any(name == OWN_ANSWER.encode() for name, _ in scope["headers"])
        if path == "/metrics":
            return self._own_page if own else self._page
        if own:
            return None
        if method == "GET" and path in _JSON:
            return self._sum
        if _ANNOUNCEMENTS.fullmatch(f"{method} {path}"):
            return self._announce
        return self._search if _SEARCHES.fullmatch(f"{method} {path}") else None

    # --- sums ------------------------------------------------------------------------------------

    async def _ask_own(self, scope: Scope, receive: Receive) -> _Answer:
        own = _Answer()
        try:
            await self.app(scope, receive, own.take)
        except Exception:
            if not own.start:  # else the application has answered and logged its fault
                raise
        return own

    async def _own_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = await self._ask_own(scope, receive)
        if own.status == 200:
            self.past.keep(own.body)
            own.start["headers"].append((_PID, b"%d" % os.getpid()))
        await own.send(send)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        accept = Headers(scope=scope).get("accept", "")
        kept = [header for header in scope["headers"] if header[0] != b"accept"]  # text is summed
        own = await self._ask_own({**scope, "headers": kept}, receive)
        if own.status != 200 or scope["method"] != "GET":
            await own.send(send)
            return
        modern = openmetrics.is_wanted(accept)
        page = await self.pages[modern].get(lambda: self._of_all(scope, own.body, modern))
        if modern:
            others = [header for header in own.start["headers"] if header[0] != b"content-type"]
            own.start["headers"] = [*others, (b"content-type", openmetrics.CONTENT_TYPE.encode())]
        await own.send(send, page)

    async def _of_all(self, scope: Scope, own: bytes, modern: bool) -> bytes:
        answers = await self.siblings.ask_all("/metrics", Headers(scope=scope))
        answered = {int(answer.headers.get(_PID.decode(), 0)) for answer in answers.values()}
        pages = [own, *(answer.content for answer in answers.values())]
        page = await asyncio.to_thread(self._add_up, own, pages, answered)
        if not modern:
            return page
        return await asyncio.to_thread(lambda: openmetrics.openmetrics(page, self.exemplars()))

    def _add_up(self, own: bytes, pages: list[bytes], answered: set[int]) -> bytes:
        self.past.keep(own)
        together = Pages(self.together)
        for page in pages:
            together.add(page)
        for page in self.past.missing(answered):
            together.add(page, past=True)
        return together.render()

    async def _sum(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = await self._ask_own(scope, receive)
        if own.status != 200:
            await own.send(send)
            return
        query = scope["query_string"].decode("latin-1")
        path = _path_of(scope)
        answers = await self.siblings.ask_all(path, Headers(scope=scope))
        parts = [msgspec.json.decode(own.body), *(answer.json() for answer in answers.values())]
        asked = dict(parse_qsl(query))
        await own.send(send, msgspec.json.encode(_JSON[scope["path"]](parts, asked)))

    # --- searches and announcements --------------------------------------------------------------

    async def _search(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = await self._ask_own(scope, receive)
        if own.status in _MAY_BE_ELSEWHERE:
            headers = Headers(scope=scope)
            for index in await self.siblings.alive():
                answer = await self.siblings.ask(index, scope["method"], _path_of(scope), headers)
                if answer is not None and answer.status_code == 200:
                    own.start["status"] = 200
                    own.body = answer.content
                    break
        await own.send(send)

    async def _announce(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()

        async def record() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        own = await self._ask_own(scope, record)
        if own.status == 200:
            headers = Headers(scope=scope)
            calls = [
                self.siblings.ask(index, scope["method"], scope["path"], headers, bytes(body))
                for index in await self.siblings.alive()
            ]
            await asyncio.gather(*calls)  # a router that misses it follows within half a second
        await own.send(send)
