"""HTTP client of engines: body passed on as it arrives, connections kept for the next request."""

import asyncio
import errno
import re
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from baton.addresses import join_address
from baton.engine.remote.kept_connections import KeptConnections
from baton.engine.remote.trusted import trusted_context
from baton.types.errors import UnavailableError

CONNECT_S = 5.0
"""Time in which a server must take a connection."""
_RESPONSE_BYTES = 32 << 20
_HEAD_BYTES = 1 << 20  # of the part that has the head
_NOTHING_LISTENS = {f"{errno.ECONNREFUSED}", f"{errno.ENOENT}"}
_UNREAD_S = 1.0  # a connection that ends later had not ended before the request came
_TCP_CLOSE = 7  # state of a connection that the peer has reset


class HttpExchange(asyncio.Protocol):
    """Exchange of a request and its response on one connection.

    Args:
        kept: Takes the connection behind a complete response; None: it is closed.

    Attributes:
        status: HTTP status; 0 until the response begins.
        unsent: Bytes of the request to send once the loop serves the connection.
        done: Result True after a complete response, False if the connection broke.
        is_unread: Whether the server closed a kept connection before it read the request.
    """

    def __init__(
        self, on_body: Callable[[bytes], None], kept: KeptConnections | None = None
    ) -> None:
        self.status = 0
        self.unsent = b""
        self.is_unread = False
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._sent_s = 0.0
        self._on_body = on_body
        self._kept = kept
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._is_reused = False

    @property
    def is_silent(self) -> bool:
        """True if a kept connection ended without a response."""
        return self._is_reused and (self.is_unread or not self._head_bytes)

    def close(self) -> None:
        """Close the connection, by which the engine aborts the request."""
        self._is_reused = self.is_unread = False
        if self._transport is not None:
            self._transport.abort()
        self._end(complete=False)

    def reuse(self, transport: asyncio.Transport) -> None:
        """Send the request on a kept connection."""
        self._is_reused = True
        self._sent_s = asyncio.get_running_loop().time()
        transport.set_protocol(self)
        self.connection_made(transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the rest of the request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base
        self._transport.write(self.unsent)
        self.unsent = b""

    def data_received(self, data: bytes) -> None:
        """Parse received bytes of the response."""
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.close()
        if self._head_bytes > _HEAD_BYTES and not self.status:
            self.close()
        if self.done.done() and self._transport is not None:
            self._leave(self._transport)

    def eof_received(self) -> None:
        """Note whether the server closes the connection without the request."""
        self._note_unread(is_reset=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        self._note_unread(is_reset=isinstance(exc, ConnectionError))
        self._end(complete=False)

    def _note_unread(self, *, is_reset: bool) -> None:
        waited_s = asyncio.get_running_loop().time() - self._sent_s
        if self._is_reused and not self._head_bytes and waited_s < _UNREAD_S:
            self.is_unread = self.is_unread or is_reset or _is_unread(self._transport)

    def on_message_begin(self) -> None:
        """Keep no connection with bytes behind the response."""
        if self.done.done():
            self._kept = None

    def on_headers_complete(self) -> None:
        """Note the status of the response."""
        if not self.done.done():
            self.status = self._parser.get_status_code()
            self.is_unread = self._is_reused and self.status == HTTPStatus.REQUEST_TIMEOUT

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        if not self.done.done():
            self._on_body(body)

    def on_message_complete(self) -> None:
        """Note the complete response, unless it announces another one."""
        if self.status < HTTPStatus.OK:
            self.status = 0
            return
        if not self._parser.should_keep_alive():
            self._kept = None
        self._end(complete=True)

    def _leave(self, transport: asyncio.Transport) -> None:
        """Keep or close the connection."""
        self._transport = None
        is_whole = not self.done.cancelled() and self.done.result()
        if is_whole and self._kept is not None and not transport.is_closing():
            self._kept.keep(transport)
        else:
            transport.abort()

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


@dataclass(slots=True, kw_only=True)
class HttpOrigin:
    """Server of an engine: where it listens, and what a request to it must have.

    Attributes:
        name: Name in errors.
        socket_path: Path of a Unix socket; empty for TCP.
        host: Name or address to connect to.
        server_name: Name in the server's certificate.
        authority: Host and port in the requests.
        prefix: Path before that of each request.
        key: Key that the server requires; empty: none. A new one is for later requests.
        tls: Whether requests are encrypted, and the server's certificate is verified.
        keeps: Whether connections of requests and of GETs wait for the next ones.
        headers: Further lines of the head of each request.
        kept: Connections that wait for the next request.
    """

    name: str
    socket_path: str = ""
    host: str = ""
    port: int = 0
    server_name: str = ""
    authority: str = "engine"
    prefix: str = ""
    key: str = field(default="", repr=False)
    tls: bool = False
    keeps: bool = False
    headers: str = ""
    kept: KeptConnections = field(default_factory=KeptConnections, repr=False, compare=False)

    @classmethod
    def of_socket(cls, path: str, name: str = "vLLM") -> Self:
        """Return the server at a Unix socket."""
        return cls(name=name, socket_path=path)

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
        connect_to = address or parts.hostname or ""
        host = (parts.hostname or "").rstrip(".")  # no certificate has the dot of a full name
        port = parts.port or (443 if is_tls else 80)
        return cls(
            name=url if not address else f"{url} ({address})",
            host=connect_to,
            port=port,
            server_name=host,
            authority=join_address(host.partition("%")[0], port),  # no server knows an IPv6 zone
            prefix=parts.path.rstrip("/"),
            key=key,
            tls=is_tls,
        )

    def request_bytes(
        self, method: str, target: str, body: bytes = b"", *, keep: bool = False
    ) -> bytes:
        """Return an HTTP/1.1 request with a JSON body."""
        more = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        more += self.headers
        head = (
            f"{method} {self.prefix}{target} HTTP/1.1\r\nHost: {self.authority}\r\n{more}"
            "Accept-Encoding: identity\r\n"
            f"Connection: {'keep-alive' if keep else 'close'}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def exchange(
        self,
        target: str,
        body: bytes,
        on_body: Callable[[bytes], None],
        begun: Callable[[HttpExchange], Awaitable[None]],
    ) -> HttpExchange:
        """Post a request, on a kept connection if there is one; return the ended exchange.

        If the server closes a kept connection before it reads the request, this is sent once more.
        A request that it may have read is not, as its work may have begun. ``begun`` gets each
        exchange when it begins.

        Raises:
            OSError: The server takes no connection.
        """
        exchange = await self.begin("POST", target, body, on_body, keep=self.keeps)
        await begun(exchange)
        await exchange.done
        if exchange.is_unread:
            exchange = await self.begin("POST", target, body, on_body)
            await begun(exchange)
            await exchange.done
        return exchange

    async def begin(
        self,
        method: str,
        target: str,
        body: bytes,
        on_body: Callable[[bytes], None],
        *,
        keep: bool = False,
        anew: bool = False,
    ) -> HttpExchange:
        """Send a request, on a connection of its own or, with ``keep``, on a kept one.

        ``anew`` takes none that is kept, but keeps its own.

        Raises:
            OSError: The server takes no connection.
        """
        exchange = HttpExchange(on_body, self.kept if keep else None)
        exchange.unsent = self.request_bytes(method, target, body, keep=keep)
        if keep and not anew and (transport := self.kept.take()) is not None:
            exchange.reuse(transport)
        elif self.socket_path:
            await _begin_at_socket(self.socket_path, exchange)
        else:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: exchange,
                    self.host,
                    self.port,
                    ssl=trusted_context() if self.tls else None,
                    server_hostname=self.server_name if self.tls else None,
                )
        return exchange

    async def fetch(
        self, method: str, target: str, timeout_s: float, body: bytes = b"", *, anew: bool = False
    ) -> bytes:
        """Send a request with a JSON body; return the body of a response with status 200.

        Raises:
            UnavailableError: The server does not respond in time, or with too many bytes.
            StatusError: It responds with another status.
        """
        status, complete, response = await self.ask(method, target, timeout_s, body, anew=anew)
        if not complete or status != HTTPStatus.OK:
            text = response[:200].decode(errors="replace")
            how = f"with status {status}: {text}"
            if not status:
                how = "by closing the connection (does its URL begin with https://?)"
            raise StatusError(f"{self.name} answered {target} {how}", status)
        return response

    async def ask(
        self, method: str, target: str, timeout_s: float, body: bytes = b"", *, anew: bool = False
    ) -> tuple[int, bool, bytes]:
        """Send a request; return the response's status, whether it is complete, and its body.

        A GET goes to a kept connection unless ``anew``, and once more if there is no response.

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
                keep = self.keeps and method == "GET"
                exchange = await self.begin(method, target, body, take, keep=keep, anew=anew)
                try:
                    complete = await exchange.done
                    if exchange.is_silent:
                        parts.clear()
                        size = 0
                        exchange = await self.begin(method, target, body, take)
                        complete = await exchange.done
                finally:
                    exchange.close()
        except OSError as error:
            raise unavailable(f"{self.name} does not respond to {target}", self, error) from None
        return exchange.status, complete, b"".join(parts)


def unavailable(what: str, origin: HttpOrigin, error: OSError) -> UnavailableError:
    """Return the error of a server that cannot be used, from that of a socket."""
    of_addresses = set(re.findall(r"\[Errno (\d+)\]", f"{error}"))
    if of_addresses and of_addresses <= _NOTHING_LISTENS:
        return RefusedError(f"nothing listens at {origin.name}")
    return UnavailableError(f"{what}: {_problem_of(error)}")


def _is_unread(transport: asyncio.Transport | None) -> bool:
    """Return whether a server has closed a TCP connection before it read what was sent last."""
    if transport is None:
        return False
    try:
        connection = transport.get_extra_info("socket")
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)
    except (OSError, AttributeError):  # a Unix socket, or an operating system without it
        return False
    return info[0] == _TCP_CLOSE or int.from_bytes(info[24:28], sys.byteorder) > 0


def _problem_of(error: OSError) -> str:
    """Return what has failed, and the fix if it is known."""
    if isinstance(error, socket.gaierror):
        return f"its name cannot be looked up: {error.strerror}"
    if isinstance(error, TimeoutError):
        return "it takes too long"
    if isinstance(error, ssl.SSLCertVerificationError):
        issuer = "issuer" in error.verify_message or "self-signed" in error.verify_message
        fix = " (SSL_CERT_FILE names a file with its CA)" if issuer else ""
        return f"its certificate is not accepted: {error.verify_message}{fix}"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS (does its URL begin with http://?)"
    return repr(error)


async def _begin_at_socket(path: str, exchange: HttpExchange) -> None:
    """Connect and send a request, as much as fits at once: asyncio takes longer to connect."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(path)
        exchange.unsent = exchange.unsent[connection.send(exchange.unsent) :]
    except OSError:
        connection.close()
        raise
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: exchange, sock=connection)
