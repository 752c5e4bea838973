"""HTTP client for vLLM's Unix socket: one connection per request, body passed on as it arrives."""

import asyncio
import socket
from collections.abc import Callable

import httptools

from baton.types.errors import UnavailableError


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
        self._transport: asyncio.Transport | None = None

    def close(self) -> None:
        """Close the connection, by which vLLM aborts the request."""
        if self._transport is not None:
            self._transport.abort()
        self._end(complete=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the rest of the request."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"not a stream: {transport!r}")
        self._transport = transport
        transport.write(self._unsent)
        self._unsent = b""

    def data_received(self, data: bytes) -> None:
        """Parse received bytes of the response."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
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
    """vLLM answered with another status than 200."""


def request_bytes(method: str, target: str, body: bytes = b"") -> bytes:
    """Return an HTTP/1.1 request with a JSON body."""
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: vllm\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def begin(socket_path: str, request: bytes, on_body: Callable[[bytes], None]) -> HttpExchange:
    """Connect and send a request, as much as fits at once: asyncio takes longer to connect.

    Raises:
        OSError: Nothing listens on the socket.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(socket_path)
        unsent = request[connection.send(request) :]
    except OSError:
        connection.close()
        raise
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_unix_connection(
        lambda: HttpExchange(unsent, on_body), sock=connection
    )
    return exchange


async def fetch(
    socket_path: str, method: str, target: str, timeout_s: float, body: bytes = b""
) -> bytes:
    """Send a request with a JSON body; return the body of a response with status 200.

    Raises:
        UnavailableError: The server does not respond in time.
        StatusError: It responds with another status.
    """
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            exchange = await begin(socket_path, request_bytes(method, target, body), parts.append)
            try:
                complete = await exchange.done
            finally:
                exchange.close()
    except (OSError, TimeoutError) as error:
        raise UnavailableError(f"vLLM does not respond to {target}: {error!r}") from None
    if not complete or exchange.status != 200:
        text = b"".join(parts)[:200].decode(errors="replace")
        raise StatusError(f"vLLM answered {target} with status {exchange.status}: {text}")
    return b"".join(parts)
