"""Accepts connections, and serves those whose hello is valid.

Until its hello is done a connection is unauthenticated. It has a deadline, and there are at most
`MOST_STRANGERS`: one more ends the oldest, so that silent ones cannot block other readers. Invalid
bytes end their connection and nothing else.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from baton.telemetry.tasks import BackgroundTasks

_LOG = logging.getLogger(__name__)

MOST_STRANGERS = 64
_SHORT_S = 0.1  # between two attempts to accept when descriptors or memory are short

T = TypeVar("T")


class HelloGate(Generic[T]):
    """Listener that authenticates its connections.

    Args:
        listener: Listening socket; its owner closes it, after the tasks.
        hello: Authenticates a connection, and raises if that fails.
        serve: Serves a connection with the result of its hello, and closes it.
        tasks: Owner of one task for each connection; the caller closes it.
    """

    def __init__(
        self,
        listener: socket.socket,
        hello: Callable[[socket.socket], Awaitable[T]],
        serve: Callable[[socket.socket, T], Awaitable[None]],
        hello_s: float,
        tasks: BackgroundTasks,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._hello = hello
        self._serve = serve
        self._hello_s = hello_s
        self._tasks = tasks
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}  # the oldest first

    async def run(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        short = False
        while True:
            try:
                link, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if not short:
                    _LOG.warning("cannot accept connections, retrying: %s", error)
                short = True
                await asyncio.sleep(_SHORT_S)
                continue
            short = False
            if len(self._strangers) >= MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                self._strangers.pop(oldest).cancel()
            self._strangers[link] = self._tasks.spawn(self._admit(link), "connection")
            await asyncio.sleep(0)  # the task owns the socket from its first line on

    async def _admit(self, link: socket.socket) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            try:
                async with asyncio.timeout(self._hello_s):
                    introduction = await self._hello(link)
            except Exception as error:  # noqa: BLE001 - invalid bytes end this connection alone
                _LOG.debug("refused a connection: %s: %s", type(error).__name__, error)
                return
            finally:
                self._strangers.pop(link, None)
            undo.pop_all()
        await self._serve(link, introduction)
