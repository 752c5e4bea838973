"""HTTP client of engines: one connection per request, body passed on as it arrives."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from baton.addresses import join_address
from baton.types.errors import UnavailableError

CONNECT_S = 5.0
"""Time in which a server must take a connection."""
_RESPONSE_BYTES = 32 << 20
_HEAD_BYTES = 1 << 20  # of the part that has the head


class HttpExchange(asyncio.Protocol):
    """Exchange of a request and its response on one connection.

    Args:
        unsent: Bytes of the request to send once the loop serves the connection.

    Attributes:
        status: HTTP status; 0 until the response begins.
        done: Result True after a complete response, False if the connection broke.
    """

    def __init__(self, unsent: bytes, on_body: Callable[[bytes], None]) -> None:
        self.status = 0
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unsent = unsent
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._transport: asyncio.Transport | None = None

    def close(self) -> None:
        """Close the connection, by which the engine aborts the request."""
        if self._transport is not None:
            self._transport.abort()
        self._end(complete=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the rest of the request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base
        self._transport.write(self._unsent)
        self._unsent = b""

    def data_received(self, data: bytes) -> None:
        """Parse received bytes of the response."""
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._head_bytes > _HEAD_BYTES and not self.status:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        self._end(complete=False)

    def on_headers_complete(self) -> None:
        """Note the status of the response."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        if not self.done.done():
            self._on_body(body)

    def on_message_complete(self) -> None:
        """Note the complete response, and close the connection."""
        self._end(complete=True)
        self.close()

    def _end(self, *, complete: bool) -> None:
        if not self.done.done():
            self.done.set_result(complete)


class StatusError(UnavailableError):
    """A server answered with another status than 200, which is ``answered``."""

    def __init__(self, message: str, answered: int) -> None:
        super().__init__(message)
        self.answered = answered


class RefusedError(UnavailableError):
    """Nothing listens at a server's address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOrigin:
    """Server of an engine: where it listens, and what a request to it must have.

    Attributes:
        name: Name in errors.
        socket_path: Path of a Unix socket; empty for TCP.
        host: Name or address to connect to.
        server_name: Name in the server's certificate, and in the requests.
        prefix: Path before that of each request.
        key: Key that the server requires; empty: none.
        tls: Context with which certificates are verified; None: plain text.
    """

    name: str
    socket_path: str = ""
    host: str = ""
    port: int = 0
    server_name: str = ""
    prefix: str = ""
    key: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    @classmethod
    def of_socket(cls, path: str, name: str = "vLLM") -> Self:
        """Return the server at a Unix socket."""
        return cls(name=name, socket_path=path, server_name="engine")

    @classmethod
    def of_url(cls, url: str, key: str = "", address: str = "") -> Self:
        """Return the server at an ``http`` or ``https`` URL.

        Args:
            url: URL of the server, with a path if it is behind a proxy.
            key: Key that it requires.
            address: Address to connect to, one of several that the URL's host has.
        """
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        host = parts.hostname or ""
        port = parts.port or (443 if is_tls else 80)
        connect_to = address or host
        return cls(
            name=url if not address else f"{url} ({address})",
            host=connect_to,
            port=port,
            server_name=join_address(host, port) if not is_tls else host,
            prefix=parts.path.rstrip("/"),
            key=key,
            tls=trusted_context() if is_tls else None,
        )

    def request_bytes(self, method: str, target: str, body: bytes = b"") -> bytes:
        """Return an HTTP/1.1 request with a JSON body."""
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"{method} {self.prefix}{target} HTTP/1.1\r\nHost: {self.server_name}\r\n{key}"
            f"Connection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def begin(
        self, method: str, target: str, body: bytes, on_body: Callable[[bytes], None]
    ) -> HttpExchange:
        """Connect and send a request.

        Raises:
            OSError: The server takes no connection.
        """
        request = self.request_bytes(method, target, body)
        if self.socket_path:
            return await _begin_at_socket(self.socket_path, request, on_body)
        async with asyncio.timeout(CONNECT_S):
            _, exchange = await asyncio.get_running_loop().create_connection(
                lambda: HttpExchange(request, on_body),
                self.host,
                self.port,
                ssl=self.tls,
                server_hostname=self.server_name if self.tls is not None else None,
            )
        return exchange

    async def fetch(self, method: str, target: str, timeout_s: float, body: bytes = b"") -> bytes:
        """Send a request with a JSON body; return the body of a response with status 200.

        Raises:
            UnavailableError: The server does not respond in time, or with too many bytes.
            StatusError: It responds with another status.
        """
        status, complete, response = await self.ask(method, target, timeout_s, body)
        if not complete or status != HTTPStatus.OK:
            text = response[:200].decode(errors="replace")
            raise StatusError(f"{self.name} answered {target} with status {status}: {text}", status)
        return response

    async def ask(
        self, method: str, target: str, timeout_s: float, body: bytes = b""
    ) -> tuple[int, bool, bytes]:
        """Send a request; return the response's status, whether it is complete, and its body.

        Raises:
            UnavailableError: The server does not respond in time, or with too many bytes.
        """
        parts: list[bytes] = []
        size = 0
        exchange: HttpExchange | None = None

        def take(data: bytes) -> None:
            nonlocal size
            size += len(data)
            parts.append(data)
            if size > _RESPONSE_BYTES and exchange is not None:
                exchange.close()

        try:
            async with asyncio.timeout(timeout_s):
                exchange = await self.begin(method, target, body, take)
                try:
                    complete = await exchange.done
                finally:
                    exchange.close()
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise RefusedError(f"nothing listens at {self.name}: {error.strerror}") from None
        except (OSError, TimeoutError) as error:
            raise UnavailableError(f"{self.name} does not respond to {target}: {error!r}") from None
        return exchange.status, complete, b"".join(parts)


async def _begin_at_socket(
    path: str, request: bytes, on_body: Callable[[bytes], None]
) -> HttpExchange:
    """Connect and send a request, as much as fits at once: asyncio takes longer to connect."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(path)
        unsent = request[connection.send(request) :]
    except OSError:
        connection.close()
        raise
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_unix_connection(
        lambda: HttpExchange(unsent, on_body), sock=connection
    )
    return exchange


@cache
def trusted_context() -> ssl.SSLContext:
    """Return the context of this host's CAs, and of those in ``SSL_CERT_FILE``."""
    return ssl.create_default_context()
