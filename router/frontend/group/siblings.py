"""Other routers of the group: takes over connections of dead ones, and asks live ones."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import httpx

from baton.telemetry.tasks import BackgroundTasks
from router.frontend.group.member import Member
from router.frontend.group.presence import RouterPresence, watch_life

_LOG = logging.getLogger(__name__)

_ANSWER_LIMIT_S = 2.0
OWN_ANSWER = "x-baton-own"
"""Header of a call that the receiving router answers for itself alone."""

MakeConnection = Callable[[], asyncio.Protocol]


class Accepting(Protocol):
    """Accepts connections of one listening socket until it is closed."""

    async def close(self) -> None:
        """Accept no more connections of clients."""


Accept = Callable[[int], Accepting]
"""Starts accepting connections of clients at the descriptor of a listening socket."""


class Siblings:
    """The other routers of the group."""

    def __init__(self, member: Member, count_failure: Callable[[str], None]) -> None:
        self._member = member
        self._tasks = BackgroundTasks("siblings", count_failure)
        self._alive: set[int] = set()
        self._unknown = set(member.siblings)  # neither seen alive nor found dead yet
        self._all_known = asyncio.Event()
        if not self._unknown:
            self._all_known.set()
        self._taken_over: dict[int, Accepting] = {}
        self._answers: asyncio.Server | None = None
        self._presence = RouterPresence(member.alive_path(member.index))
        self._accept: Accept | None = None
        self._clients = {index: self._client(index) for index in member.siblings}
        self._leaving = False

    def _client(self, index: int) -> httpx.AsyncClient:
        path = str(self._member.http_path(index))
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=path, trust_env=False),
            base_url="http://sibling",
            timeout=_ANSWER_LIMIT_S,
            trust_env=False,
        )

    async def start(self, make_connection: MakeConnection, accept: Accept) -> None:
        """Start answering the others, and watching their parts of the port."""
        member = self._member
        loop = asyncio.get_running_loop()
        self._accept = accept
        path = member.http_path(member.index)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.unlink(missing_ok=True)
        self._answers = await loop.create_unix_server(make_connection, str(scratch))
        scratch.replace(path)
        await self._presence.start()
        for index in member.siblings:
            watch = partial(watch_life, member.alive_path(index), partial(self._note, index))
            self._tasks.keep(watch, f"router {index}")

    async def leave(self) -> None:
        """Stop accepting connections, which the others take over; running calls finish."""
        self._leaving = True
        self._presence.close()
        if self._answers is not None:
            self._answers.close()
        while self._taken_over:
            _, accepting = self._taken_over.popitem()
            await accepting.close()

    async def close(self) -> None:
        """Leave, and close all connections."""
        await self.leave()
        await self._tasks.close()
        for client in self._clients.values():
            await client.aclose()

    # --- their parts of the port -----------------------------------------------------------------

    def _note(self, index: int, alive: bool) -> None:
        self._unknown.discard(index)
        if not self._unknown:
            self._all_known.set()
        if alive:
            self._alive.add(index)
        else:
            self._alive.discard(index)
        if len(self._member.sockets) > 1 and not self._leaving:
            self._tasks.spawn(self._share_port(index), "share the port")

    async def _share_port(self, index: int) -> None:
        """Accept the connections of a dead router, until it is back."""
        if index in self._alive:
            if (accepting := self._taken_over.pop(index, None)) is not None:
                await accepting.close()
        elif index not in self._taken_over and self._accept is not None:
            _LOG.info("taking over connections of router=%d, which is gone", index)
            self._taken_over[index] = self._accept(self._member.sockets[index].fileno())

    # --- questions to them -----------------------------------------------------------------------

    async def ask_all(self, path: str, headers: Mapping[str, str]) -> dict[int, httpx.Response]:
        """Return the answers with status 200 of all live siblings to a GET, by position."""
        indices = await self.alive()
        asked = [self.ask(index, "GET", path, headers) for index in indices]
        answers = zip(indices, await asyncio.gather(*asked), strict=True)
        return {index: answer for index, answer in answers if answer and answer.status_code == 200}

    async def alive(self) -> list[int]:
        """Return the positions of the live siblings; right after the start it waits to know them.

        Without their latest metrics the sums would fall, which Prometheus takes for a restart.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                await self._all_known.wait()
        return sorted(self._alive)

    async def ask(
        self, index: int, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> httpx.Response | None:
        """Ask a sibling for its own answer; None if it does not answer in time."""
        passed = {name: headers[name] for name in _PASSED if name in headers}
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            return await self._clients[index].request(
                method, path, headers={**passed, OWN_ANSWER: "1"}, content=body
            )
        return None


_PASSED = ("authorization", "x-api-key", "x-baton-tenant", "content-type", "content-encoding")
