"""HTTP connections of uvicorn with timeouts for clients.

uvicorn waits without limit for headers, bodies and clients that do not read. Responses that are not
read stay in the connection's buffer after their handler has ended, so the timeouts apply to the
connection:

- header: complete within ``header_timeout_s`` and `MAX_HEADER_BYTES`. Chunk sizes and trailers of
  the body count towards the same limit of bytes.
- body: complete within ``body_timeout_s``. ``router.frontend.api.endpoints.read_body`` reports the
  timeout earlier; this timeout ends bodies that no handler reads.
- place: see `router.frontend.http.places`.
- write: see `router.frontend.http.backlog`.
"""

import asyncio
import functools
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.config.clients import ClientLimitsConfig
from baton.telemetry.metrics import Metrics
from baton.types.errors import (
    BatonError,
    InvalidRequestError,
    PayloadTooLargeError,
    SlowRequestError,
    UnavailableError,
)
from router.frontend.errors import error_response
from router.frontend.http.backlog import Backlog
from router.frontend.http.connection import Follower
from router.frontend.http.head_writer import HeadWriter
from router.frontend.http.intake import Intake
from router.frontend.http.places import Places, no_place

MAX_HEADER_BYTES = 64 * 1024
"""More than 40 times the usual size; the parser itself has no limit."""

_EXTENSION = "baton.connection"
_RESERVE_HEADER_S = 1.0  # a silent client must not hold a place of the reserve
# Of two values, a proxy and the router could take another one each.
_ONCE = frozenset({b"host", b"authorization", b"x-api-key", b"x-baton-tenant", b"origin"})
_LINE_BYTES = len(b"  HTTP/1.1\r\n\r\n")
_FIELD_BYTES = len(b": \r\n")
_MOST_PIPELINED = 64  # requests of one connection that wait; each takes 3 KB and more
_CHUNK_BYTES = 16  # allowance for the frame of a chunk of one byte
_LINGER_S = 1.0  # a request of the client may be in transit
_BODY_SLACK_S = 1.0
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    413: b"Content Too Large",
    503: b"Service Unavailable",
}


def server_config(
    app: ASGIApp, metrics: Metrics, limits: ClientLimitsConfig, **options: Any
) -> uvicorn.Config:
    """Return the configuration of a router's server; ``options`` are uvicorn's."""
    places: Places[LimitedProtocol] = Places(limits.max_connections, limits.proxies)
    protocol: Any = functools.partial(
        LimitedProtocol, limits=limits, metrics=metrics, places=places
    )
    return uvicorn.Config(
        Intake(app, metrics),
        http=protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=bool(limits.proxies),
        forwarded_allow_ips=list(limits.proxies),
        timeout_keep_alive=75,
        **options,
    )


class _OldCycle(RequestResponseCycle):
    """Response for HTTP/1.0, which has no chunks: it ends with the connection."""

    async def send(self, message: ASGISendEvent) -> None:
        """Write a part of the response."""
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class LimitedProtocol(HttpToolsProtocol):
    """HTTP connection with timeouts for the client. See the module.

    Attributes:
        has_key: Whether a request has shown a valid key since places are few.
        is_reserved: Whether only health probes and valid keys may use this place.
    """

    def __init__(
        self,
        *args: Any,
        limits: ClientLimitsConfig,
        metrics: Metrics,
        places: "Places[LimitedProtocol]",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._places = places
        self.has_key = False
        self.is_reserved = False
        self._is_late_place = False  # of the reserve, before its first request
        self._metrics = metrics
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._spare_bytes = MAX_HEADER_BYTES  # allowed bytes outside the body
        self._began = False  # whether the received bytes begin a request
        self._follower: Follower | None = None
        self._lost = False
        self._leaves = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or reject it if there are too many."""
        super().connection_made(transport)
        self._writer = HeadWriter(transport, self.loop)
        limit_s = self._limits.write_timeout_s
        self._backlog = Backlog(transport, self.loop, limit_s, self._metrics)
        self._make_way(self._places.enter(self, self.client[0] if self.client else ""))
        if self._places.is_full:
            self._refuse_place()
            return
        self._is_late_place = self._places.is_in_reserve
        self._metrics.set("baton_open_connections", len(self.connections))
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers, and notify the follower."""
        super().connection_lost(exc)
        self._places.leave(self)
        self._backlog.stop()
        for timer in (self._header_timer, self._body_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._body_timer = None
        self._metrics.set("baton_open_connections", len(self.connections))
        self._lost = True
        if self._follower is not None:
            self._follower.on_lost()
        self.pipeline.clear()
        self.cycle = self.scope = None  # type: ignore[assignment]  # they refer to this connection

    @property
    def is_crowded(self) -> bool:
        """True if places are few; only then keys are looked up for them."""
        return self._places.is_crowded

    def _make_way(self, other: "LimitedProtocol | None") -> None:
        """Close a connection that has lost its place."""
        if other is not None:
            unread = other.transport.get_write_buffer_size()
            end = other.transport.abort if unread else other.transport.close
            self._metrics.inc("baton_connections_evicted")
            end()

    def _refuse_place(self) -> None:
        self._metrics.inc("baton_connections_refused")
        self._refuse(UnavailableError(no_place(self._places.limit)))

    def leave(self) -> None:
        """Close the connection after its next response, because the router is replaced."""
        if self.cycle is not None:
            self.cycle.keep_alive = False
        if not self._leaves:
            self._leaves = True
            self.loop.call_later(_LINGER_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        has_request = self._body_timer is not None
        if not has_request and not self.transport.is_closing():
            self.shutdown()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and start the header timeout of the next request."""
        if self.transport.is_closing():
            return
        self._began = False
        self._unset_keepalive_if_required()
        self._parse(data)
        if not self._began:
            self._spare_bytes -= len(data)
            if self._spare_bytes < 0 and not self.transport.is_closing():
                self._header_too_large()
                return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._body_timer is None and not self.transport.is_closing():
            self._await_header()

    def _parse(self, data: bytes) -> None:
        """Parse received bytes. An offer of another protocol (`Upgrade`) is ignored.

        The parser stops after the header of such a request, so the request is parsed again without
        the offer.
        """
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as offer:
                    if not self._is_offer:
                        return
                    data = self._without_offer() + data[offer.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        except httptools.HttpParserError as error:
            if not self.transport.is_closing():
                self.send_400_response(str(error))

    def _without_offer(self) -> bytes:
        """Return the header of the request without its offer of another protocol."""
        version = self.parser.get_http_version().encode()
        kept = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        return b"".join((line, *kept, b"\r\n"))

    def _await_header(self) -> None:
        if self._header_timer is None:
            self._places.await_header(self)
            limit_s = self._limits.header_timeout_s
            if self._is_late_place:
                limit_s = min(limit_s, _RESERVE_HEADER_S)
            self._header_timer = self.loop.call_later(limit_s, self._header_late)

    def _header_late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # the server, not the client, is slow
            self._await_header()
            return
        if self._is_late_place:
            self._refuse_place()
            return
        self._metrics.inc("baton_client_timeouts", kind="header")
        limit_s = self._limits.header_timeout_s
        error = SlowRequestError(
            f"the header was not complete within {limit_s:g} s (clients.header_timeout_s)"
        )
        self._refuse(error)

    def _header_too_large(self) -> None:
        """End a connection whose header, trailers or chunk sizes are too large."""
        if self._header_timer is None:  # not a header, or another response is being sent
            self.transport.abort()
            return
        self._refuse(_too_large())

    def on_headers_complete(self) -> None:
        """Start the timeout of the body, and the request."""
        if self._is_offer:
            return
        if len(self.pipeline) >= _MOST_PIPELINED:
            self.transport.abort()
            raise ConnectionAbortedError  # ends the parser's work
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._await_body()
        self._make_way(self._places.claim(self))
        self.is_reserved = self._places.is_reserved(self)
        self._is_late_place = False
        app = self.app
        problem = self._problem_of_header()
        if problem is not None:
            self.app = error_response(problem, more=((b"connection", b"close"),))
        try:
            super().on_headers_complete()
        finally:
            self.app = app
        self.cycle.transport = self._writer  # type: ignore[assignment]
        if self._is_old:
            self.cycle.__class__ = _OldCycle
            self.cycle.chunked_encoding = False
            self.cycle.keep_alive = False
            self.cycle.waiting_for_100_continue = False
        if self._leaves:
            self.cycle.keep_alive = False

    @property
    def _is_old(self) -> bool:
        return self.parser.get_http_version() < "1.1"

    @property
    def _is_offer(self) -> bool:
        """True for a request that is parsed again; `CONNECT` is no offer."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _problem_of_header(self) -> BatonError | None:
        """Return why a complete header is refused, or None."""
        size = len(self.parser.get_method()) + len(self.url) + _LINE_BYTES
        names: set[bytes] = set()
        for name, value in self.headers:
            size += len(name) + len(value) + _FIELD_BYTES
            if name == b"transfer-encoding" and value.strip(b" \t,").lower() != b"chunked":
                # The parser would take the compressed body for the body.
                return InvalidRequestError.at(name.decode(), "must be chunked")
            if name not in _ONCE:
                continue
            if name in names:
                return InvalidRequestError.at(name.decode(), "was sent more than once")
            names.add(name)
        if size > MAX_HEADER_BYTES:
            return _too_large()
        if b"host" not in names and not self._is_old:
            return InvalidRequestError.at("host", "is required by HTTP/1.1")
        return None

    def _await_body(self) -> None:
        limit_s = self._limits.body_timeout_s + _BODY_SLACK_S
        self._body_timer = self.loop.call_later(limit_s, self._body_late)

    def _body_late(self) -> None:
        self._body_timer = None
        if self.flow.read_paused:
            self._await_body()
            return
        self._metrics.inc("baton_client_timeouts", kind="body")
        self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Handle a piece of the body."""
        self._spare_bytes += _CHUNK_BYTES * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timeout of the body."""
        if self._is_offer:
            return
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def on_message_begin(self) -> None:
        """Start a request, and lend this connection to its response."""
        super().on_message_begin()
        self._spare_bytes = MAX_HEADER_BYTES
        self._began = True
        self.scope["extensions"] = {**self.scope.get("extensions", {}), _EXTENSION: self}  # type: ignore[dict-item]

    @property
    def writable(self) -> bool:
        """True if the client is connected and keeps up."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_piece(self, body: bytes) -> None:
        """Write a piece of a chunked body; ``send`` writes its beginning and its end."""
        self._writer.write(b"%x\r\n%b\r\n" % (len(body), body))

    def follow(self, follower: Follower) -> None:
        """Notify this follower only, from now on."""
        self._follower = follower
        if self._lost:  # a closing connection will be lost later
            follower.on_lost()

    def unfollow(self, follower: Follower) -> None:
        """Stop notifying this follower, unless the next request has replaced it."""
        if self._follower is follower:
            self._follower = None

    def pause_writing(self) -> None:
        """Start the write timeout, because the backlog is large."""
        super().pause_writing()
        self._backlog.watch()

    def resume_writing(self) -> None:
        """Stop the write timeout, because the client has read most of the backlog."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._backlog.stop()
        if self._follower is not None:
            self._follower.on_writable()

    def on_response_complete(self) -> None:
        """Start the write timeout if the client has not read the whole response."""
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:  # no other request waits
            self._places.rest(self, has_key=self.has_key)
        self._backlog.watch()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, within the write timeout."""
        super().timeout_keep_alive_handler()
        self._backlog.watch()

    def shutdown(self) -> None:
        """Close the connection after its response, within the write timeout."""
        super().shutdown()
        self._backlog.watch()

    def send_400_response(self, msg: str) -> None:
        """Reject invalid HTTP in the format of all errors."""
        self._refuse(InvalidRequestError(f"the HTTP request is invalid: {msg}"))

    def _refuse(self, error: BatonError) -> None:
        body = msgspec.json.encode(error.body())
        retry = b"retry-after: 1\r\n" if error.retryable else b""
        self._writer.flush()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n%sconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s"
            % (error.status, _REASONS[error.status], retry, len(body), body)
        )
        self.transport.close()
        self._backlog.watch()


def connection_of(scope: Scope) -> LimitedProtocol | None:
    """Return the connection of a call; None if another server runs it."""
    connection: LimitedProtocol | None = scope.get("extensions", {}).get(_EXTENSION)
    return connection


def _too_large() -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the header is larger than {MAX_HEADER_BYTES} bytes; send fewer or shorter fields"
    )
