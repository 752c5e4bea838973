"""Connections to a server that wait for the next request."""

import asyncio
from collections.abc import Callable

_KEPT_S = 4.0  # vLLM and llama-server close a connection after 5 s without a request
_MOST_KEPT = 64


class KeptConnections:
    """Connections to one server that wait for the next request; the newest is used first."""

    def __init__(self) -> None:
        self._resting: list[_Resting] = []

    def keep(self, transport: asyncio.Transport) -> None:
        """Keep a connection for a few seconds, or close it."""
        if len(self._resting) < _MOST_KEPT:
            self._resting.append(_Resting(transport, self._resting.remove))
        else:
            transport.abort()

    def take(self) -> asyncio.Transport | None:
        """Return a connection, or None."""
        while self._resting:
            transport = self._resting.pop().leave()
            if not transport.is_closing():
                return transport
        return None

    def close(self) -> None:
        """Close all connections."""
        while (transport := self.take()) is not None:
            transport.abort()


class _Resting(asyncio.Protocol):
    """A connection between two exchanges. Whatever the server does with it ends it."""

    def __init__(self, transport: asyncio.Transport, forget: "Callable[[_Resting], None]") -> None:
        self._transport = transport
        self._forget: Callable[[_Resting], None] | None = forget
        self._timer = asyncio.get_running_loop().call_later(_KEPT_S, self._close)
        transport.set_protocol(self)

    def leave(self) -> asyncio.Transport:
        """Return the connection, which has left the kept ones."""
        self._timer.cancel()
        self._forget = None
        return self._transport

    def data_received(self, data: bytes) -> None:
        """Close a connection with bytes that no request has asked for."""
        self._close()

    def eof_received(self) -> None:
        """Forget a connection that the server closes."""
        self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a lost connection."""
        self._close()

    def _close(self) -> None:
        self._timer.cancel()
        if self._forget is not None:
            self._forget(self)
            self._forget = None
            self._transport.abort()
