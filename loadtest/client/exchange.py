"""HTTP exchange of one request on its own connection.

Every request opens and closes a connection: connecting is part of what a client experiences, load
balancers can spread requests, and none fails because the server closes an idle connection at that
moment. The protocol uses asyncio directly: httpx needs four to five times as much CPU per chunk
(``docs/measurements/2026-11.md``), which distorts the measurement.
"""

import asyncio
import contextlib
import ssl
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from loadtest.client.answer import AnswerReader
from loadtest.client.records import End


class Target(NamedTuple):
    """Destination of requests, with the start of each request's head."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    head: bytes  # request line and headers, without length and per-request headers

    @classmethod
    def of(cls, url: str, path: str, headers: dict[str, str]) -> "Target":
        """Return the target for a base URL and a path."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        lines = [
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
            "content-type: application/json",
            "accept: text/event-stream",
            "accept-encoding: identity",
            "connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return cls(parts.hostname, port, tls, ("\r\n".join(lines) + "\r\n").encode("latin-1"))


class Exchanged(NamedTuple):
    """Result of an exchange; times are on the monotonic clock."""

    reader: AnswerReader
    sent_s: float
    connected_s: float | None
    ended_s: float
    end: End
    detail: str


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes, reader: AnswerReader) -> None:
        self._request = request
        self._reader = reader
        self._transport: asyncio.Transport | None = None
        self.connected_s: float | None = None
        self.lost = ""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # asyncio passes a Transport
        self.connected_s = time.monotonic()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data, time.monotonic())
        if self._reader.ended:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = str(exc) if exc else ""
        self._end()

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def exchange(
    target: Target,
    body: object,
    *,
    headers: dict[str, str],
    timeout_s: float,
    abort_after_s: float | None = None,
    keep_text: bool = False,
) -> Exchanged:
    """Send ``body`` as JSON and read the response to the end. Failures are returned, not raised.

    ``timeout_s`` limits the whole exchange; ``abort_after_s`` after sending the client disconnects.
    """
    payload = msgspec.json.encode(body)
    own = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = target.head + f"{own}content-length: {len(payload)}\r\n\r\n".encode("latin-1")
    reader = AnswerReader(keep_text=keep_text)
    connection = _Connection(head + payload, reader)
    loop = asyncio.get_running_loop()
    stopped: tuple[End, str] | None = None
    lost = ""
    sent_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(
                lambda: connection, target.host, target.port, ssl=target.tls
            )
            try:
                async with asyncio.timeout(abort_after_s):
                    await connection.closed
            except TimeoutError:
                stopped = "aborted", "the plan aborted it"
    except TimeoutError:
        stopped = "timeout", f"not finished within {timeout_s:g} s"
    except OSError as error:
        lost = str(error)
    finally:
        ended_s = time.monotonic()
        with contextlib.suppress(OSError):
            connection.hang_up()
    end, detail = stopped or reader.outcome(connection.lost or lost)
    return Exchanged(reader, sent_s, connection.connected_s, ended_s, end, detail)
