"""uvicorn's server with the shutdown of a router.

SIGTERM and SIGINT stop the router soon. SIGUSR1 makes it leave, because it is replaced: it accepts
no more connections and answers the requests of all accepted ones.
"""

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from router.frontend.group.any_router import AnyRouter
from router.frontend.http.acceptor import MAX_HANDSHAKES, Acceptor

_LOOK_EVERY_S = 0.1


class RouterServer(uvicorn.Server):
    """Server that exits with code 0 after a signal, while uvicorn would raise the signal again.

    Args:
        group: Routers with the same port, or None.
        leave_limit_s: Time limit of responses when the router leaves.
        count_failure: Callback for the name of a background task that failed.
        handshakes: Limit of TLS handshakes at once.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        group: AnyRouter | None = None,
        *,
        leave_limit_s: float = 0.0,
        count_failure: Callable[[str], None] = lambda _: None,
        handshakes: int = MAX_HANDSHAKES,
    ) -> None:
        super().__init__(config)
        self._handshakes = handshakes
        self._acceptors: list[Acceptor] = []
        self._count_failure = count_failure
        self.stopping = asyncio.Event()
        self._leaving = False
        self._group = group
        self._leave_limit_s = leave_limit_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the handlers of signals within the context."""
        loop = asyncio.get_running_loop()
        handlers = {
            signal.SIGTERM: self._stop,
            signal.SIGINT: self._stop,
            signal.SIGUSR1: self._leave,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.should_exit = True
        self.stopping.set()

    def _leave(self) -> None:
        self._leaving = self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start uvicorn, then accept connections in batches and join the group."""
        await super().startup(sockets)
        protocol: Any = self.config.http_protocol_class
        make = functools.partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

        def accept(listener: int) -> Acceptor:
            tls = self.config.ssl
            acceptor = Acceptor(listener, make, tls, self._count_failure, self._handshakes)
            acceptor.start()
            return acceptor

        for server in self.servers:
            self._acceptors += [accept(listener.fileno()) for listener in server.sockets]
        if self._group is not None:
            await self._group.join(make, accept)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop uvicorn; when leaving, after all responses have ended."""
        if self._group is not None:
            await self._group.siblings.leave()
        for acceptor in self._acceptors:
            await acceptor.close()
        if self._leaving:
            for server in self.servers:
                server.close()
            await self._answer_all()
        await super().shutdown(sockets)
        if self._group is not None:
            await self._group.close()

    async def _answer_all(self) -> None:
        """Wait until all connections are closed, but not beyond the time limit or a stop signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._leave_limit_s):
                while self.server_state.connections and not self.stopping.is_set():
                    for connection in list(self.server_state.connections):
                        connection.leave()  # type: ignore[union-attr]
                    await asyncio.sleep(_LOOK_EVERY_S)
