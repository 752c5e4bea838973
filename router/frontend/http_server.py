"""HTTP connections of uvicorn with timeouts for clients.

uvicorn waits without limit for headers, bodies and clients that do not read. Responses that are not
read stay in the connection's buffer after their handler has ended, so the timeouts apply to the
connection:

- header: complete within ``header_timeout_s`` and `MAX_HEADER_BYTES`. Chunk sizes and trailers of
  the body count towards the same limit of bytes.
- body: complete within ``body_timeout_s``. ``router.frontend.api.parts.read_body`` reports the
  timeout earlier; this timeout ends bodies that no handler reads.
- write: the backlog must shrink within ``write_timeout_s``, at a rate of at least ``_SLOWEST``.
"""

import asyncio
import functools
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.config.clients import ClientLimitsConfig
from baton.telemetry.metrics import Metrics
from baton.types.errors import (
    BatonError,
    InvalidRequestError,
    PayloadTooLargeError,
    SlowRequestError,
    UnavailableError,
)
from router.frontend.http.connection import Follower, lend
from router.frontend.http.head_writer import HeadWriter
from router.frontend.http.intake import Intake

MAX_HEADER_BYTES = 64 * 1024
"""More than 40 times the usual size; the parser itself has no limit."""

_CHUNK_BYTES = 16  # allowance for the frame of a chunk of one byte
_LINGER_S = 1.0  # a request of the client may be in transit
_SLOWEST = 64 * 1024  # bytes a second
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
    protocol: Any = functools.partial(LimitedProtocol, limits=limits, metrics=metrics)
    return uvicorn.Config(
        Intake(app, metrics),
        http=protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        **options,
    )


class LimitedProtocol(HttpToolsProtocol):
    """HTTP connection with timeouts for the client. See the module."""

    def __init__(
        self, *args: Any, limits: ClientLimitsConfig, metrics: Metrics, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._metrics = metrics
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._spare_bytes = MAX_HEADER_BYTES  # allowed bytes outside the body
        self._began = False  # whether the received bytes begin a request
        self._unread = 0  # backlog at the last check
        self._write_until_s = 0.0
        self._follower: Follower | None = None
        self._lost = False
        self._leaves = False

    # --- connections -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or reject it if there are too many."""
        super().connection_made(transport)
        self._writer = HeadWriter(transport, self.loop)
        if len(self.connections) > self._limits.max_connections:
            self._metrics.inc("baton_connections_refused")
            self._refuse(
                UnavailableError(
                    f"{self._limits.max_connections} connections are open, the limit "
                    "(clients.max_connections); retry later"
                )
            )
            return
        self._metrics.set("baton_open_connections", len(self.connections))
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers, and notify the follower."""
        super().connection_lost(exc)
        for timer in (self._header_timer, self._body_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._body_timer = self._write_timer = None
        self._metrics.set("baton_open_connections", len(self.connections))
        self._lost = True
        if self._follower is not None:
            self._follower.on_lost()
        self.pipeline.clear()
        self.cycle = self.scope = None  # type: ignore[assignment]  # they refer to this connection

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

    # --- header ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and start the header timeout of the next request."""
        if self.transport.is_closing():
            return
        self._began = False
        super().data_received(data)
        if not self._began:
            self._spare_bytes -= len(data)
            if self._spare_bytes < 0 and not self.transport.is_closing():
                self._header_too_large()
                return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._body_timer is None and not self.transport.is_closing():
            self._await_header()

    def _await_header(self) -> None:
        if self._header_timer is None:
            limit_s = self._limits.header_timeout_s
            self._header_timer = self.loop.call_later(limit_s, self._header_late)

    def _header_late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # the server, not the client, is slow
            self._await_header()
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
        self._refuse(
            PayloadTooLargeError(
                f"the header is larger than {MAX_HEADER_BYTES} bytes; send fewer or shorter fields"
            )
        )

    def on_headers_complete(self) -> None:
        """Start the timeout of the body."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._await_body()
        super().on_headers_complete()
        if self.cycle is None:
            return
        self.cycle.transport = self._writer  # type: ignore[assignment]
        if self._leaves:
            self.cycle.keep_alive = False

    # --- body ------------------------------------------------------------------------------------

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
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    # --- answers ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start a request, and lend this connection to its response."""
        super().on_message_begin()
        self._spare_bytes = MAX_HEADER_BYTES
        self._began = True
        lend(self.scope, self)  # type: ignore[arg-type]

    @property
    def writable(self) -> bool:
        """True if the client is connected and keeps up."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_piece(self, body: bytes) -> None:
        """Write a piece of a chunked body."""
        self._writer.write(b"%x\r\n%b\r\n" % (len(body), body))

    def follow(self, follower: Follower) -> None:
        """Notify this follower only, from now on."""
        self._follower = follower
        if self._lost:  # a closing connection will be lost later
            follower.on_lost()

    def unfollow(self, follower: Follower) -> None:
        """Stop notifying this follower."""
        if self._follower is follower:
            self._follower = None

    def pause_writing(self) -> None:
        """Start the write timeout, because the backlog is large."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Stop the write timeout, because the client has read most of the backlog."""
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None
        if self._follower is not None:
            self._follower.on_writable()

    def on_response_complete(self) -> None:
        """Start the write timeout if the client has not read the whole response."""
        super().on_response_complete()
        self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, within the write timeout."""
        super().timeout_keep_alive_handler()
        self._await_reader()

    def shutdown(self) -> None:
        """Close the connection after its response, within the write timeout."""
        super().shutdown()
        self._await_reader()

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if self._write_timer is not None or not unread:
            return
        self._unread = unread
        limit_s = self._limits.write_timeout_s
        self._write_until_s = self.loop.time() + limit_s + unread / _SLOWEST
        self._write_timer = self.loop.call_later(limit_s, self._check_backlog)

    def _check_backlog(self) -> None:
        self._write_timer = None
        unread = self.transport.get_write_buffer_size()
        if not unread:
            return
        if unread >= self._unread or self.loop.time() > self._write_until_s:
            self._metrics.inc("baton_client_timeouts", kind="write")
            self.transport.abort()
            return
        self._unread = unread
        limit_s = self._limits.write_timeout_s
        self._write_timer = self.loop.call_later(limit_s, self._check_backlog)

    # --- errors before there is a request --------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Reject invalid HTTP in the format of all errors."""
        self._refuse(InvalidRequestError(f"the HTTP request is invalid: {msg}"))

    def _refuse(self, error: BatonError) -> None:
        body = orjson.dumps(error.body())
        retry = b"retry-after: 1\r\n" if error.retryable else b""
        self._writer.flush()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n%sconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s"
            % (error.status, _REASONS[error.status], retry, len(body), body)
        )
        self.transport.close()
        self._await_reader()
