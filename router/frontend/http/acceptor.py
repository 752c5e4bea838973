"""Acceptance of connections in batches.

uvloop accepts one connection per turn of the event loop. A turn of a router with a thousand streams
takes 100 ms, so the last one of a thousand new clients would wait for more than a minute.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from baton.telemetry.tasks import BackgroundTasks

_LOG = logging.getLogger(__name__)

_BATCH_CONNECTIONS = 128  # accepted in one turn of the loop, about 5 ms
_CONNECT_LIMIT_S = 1.0  # for TLS handshakes that are in progress at the end
_PAUSE_S = 0.1  # after a failure: the process may have no descriptors left
_HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 4096
"""TLS handshakes at once. Beyond it the oldest ends: silent connections must not take all files."""


class Acceptor:
    """Accepts connections of one listening socket.

    Args:
        listener: Descriptor of the socket, which stays open and belongs to the caller.
        make_connection: Function that returns the protocol of a new connection.
        count_failure: Callback for the name of a background task that failed.
        handshakes: Limit of TLS handshakes at once.
    """

    def __init__(
        self,
        listener: int,
        make_connection: Callable[[], asyncio.Protocol],
        tls: Any,
        count_failure: Callable[[str], None],
        handshakes: int = MAX_HANDSHAKES,
    ) -> None:
        self._handshakes = handshakes
        self._listener = socket.socket(fileno=os.dup(listener))
        self._listener.setblocking(False)
        self._make_connection = make_connection
        self._tls = tls
        self._tasks = BackgroundTasks("acceptor", count_failure)
        self._connecting: dict[asyncio.Task[None], socket.socket] = {}  # oldest first
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start accepting connections. Requires a running event loop."""
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Stop accepting connections. Accepted connections stay open."""
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        if self._connecting:
            await asyncio.wait(self._connecting, timeout=_CONNECT_LIMIT_S)
        await self._tasks.close()

    def _accept(self) -> None:
        for _ in range(_BATCH_CONNECTIONS):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _LOG.warning("cannot accept connections; retrying in %g s: %s", _PAUSE_S, error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.fileno())
                self._pause = loop.call_later(_PAUSE_S, self.start)
                return
            connection.setblocking(False)
            task = self._tasks.spawn(self._connect(connection), "connection")
            self._connecting[task] = connection
            task.add_done_callback(lambda done: self._connecting.pop(done, None))
            if self._tls and len(self._connecting) > self._handshakes:
                self._end_oldest()

    def _end_oldest(self) -> None:
        oldest = next(iter(self._connecting))
        with contextlib.suppress(OSError):
            self._connecting.pop(oldest).shutdown(socket.SHUT_RDWR)

    async def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._make_connection,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_S if self._tls else None,
            )
        except OSError:  # the client left, or its TLS handshake failed
            connection.close()
