"""The HTTP server: uvicorn's, with an end to every wait for a client.

uvicorn waits for ever for a header, for a body and for a client that does not read: an answer that
is not read lies in the connection's buffer after its handler has ended. So the limits stand here,
at the connection, where every answer passes: whole, streamed, or an error.

- header: begun or not, it must be complete after ``header_timeout_s``, and within
  `MAX_HEADER_BYTES`. So must be all that a body has around it: sizes of chunks, and trailers.
- body: complete after ``body_timeout_s``. Handlers refuse earlier, with an answer that says so
  (``router.frontend.api.parts.read_body``); this ends what no handler reads.
- write: what waits must become less within ``write_timeout_s``, and go at ``_SLOWEST`` at least.
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
"""More than 40 times what clients send; the parser itself has no limit."""

_CHUNK_BYTES = 16  # what stands around a chunk of one byte, generously
_LAST_WORD_S = 1.0  # a client may have sent a request that is not here yet
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
    """How a router's server runs; ``options`` are uvicorn's."""
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
    """One connection, whose client has limited time.

    Args:
        limits: How long, and how many connections there may be.
        metrics: Of the router.
    """

    def __init__(
        self, *args: Any, limits: ClientLimitsConfig, metrics: Metrics, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._metrics = metrics
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._spare_bytes = MAX_HEADER_BYTES  # that may still come and are no body
        self._began = False  # a request, with the bytes that are being read
        self._unread = 0  # bytes that waited for the client when last looked at
        self._write_until_s = 0.0
        self._follower: Follower | None = None
        self._lost = False
        self._leaves = False

    # --- connections -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or say that there are too many."""
        super().connection_made(transport)
        self._writer = HeadWriter(transport, self.loop)
        if len(self.connections) > self._limits.max_connections:
            self._metrics.inc("baton_connections_refused")
            self._refuse(
                UnavailableError(
                    f"{self._limits.max_connections} connections are open, which is the limit "
                    "(clients.max_connections)"
                )
            )
            return
        self._metrics.set("baton_open_connections", len(self.connections))
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget what was waited for."""
        super().connection_lost(exc)
        for timer in (self._header_timer, self._body_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._body_timer = self._write_timer = None
        self._metrics.set("baton_open_connections", len(self.connections))
        self._lost = True
        if self._follower is not None:
            self._follower.on_lost()

    def leave(self) -> None:
        """The router is replaced: this connection's next answer is its last."""
        if self.cycle is not None:
            self.cycle.keep_alive = False
        if not self._leaves:
            self._leaves = True
            self.loop.call_later(_LAST_WORD_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        """Nothing came any more, be it the rest of a request."""
        begun = self._body_timer is not None
        if not begun and not self.transport.is_closing():
            self.shutdown()

    # --- header ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read on; between two requests the first byte of the next one starts its time."""
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
        if self.flow.read_paused:  # we do not read, so it is not the client who is late
            self._await_header()
            return
        self._metrics.inc("baton_client_timeouts", kind="header")
        limit_s = self._limits.header_timeout_s
        error = SlowRequestError(f"the request's header did not come within {limit_s:g} s")
        self._refuse(error)

    def _header_too_large(self) -> None:
        """End a connection whose header, trailers or chunk sizes do not end."""
        if self._header_timer is None:  # it is no header, or another answer is under way
            self.transport.abort()
            return
        self._refuse(
            PayloadTooLargeError(
                f"the request's header is larger than {MAX_HEADER_BYTES} bytes; send less of it"
            )
        )

    def on_headers_complete(self) -> None:
        """The header is here; now its body has a time."""
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
        """Take a piece of the body."""
        self._spare_bytes += _CHUNK_BYTES * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is here."""
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    # --- answers ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins: its answer may write to this connection."""
        super().on_message_begin()
        self._spare_bytes = MAX_HEADER_BYTES
        self._began = True
        lend(self.scope, self)  # type: ignore[arg-type]

    @property
    def writable(self) -> bool:
        """See ``router.frontend.http.connection.Connection``."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_piece(self, body: bytes) -> None:
        """See ``router.frontend.http.connection.Connection``."""
        self._writer.write(b"%x\r\n%b\r\n" % (len(body), body))

    def follow(self, follower: Follower) -> None:
        """See ``router.frontend.http.connection.Connection``."""
        self._follower = follower
        if self._lost:  # not merely closing: that is followed by the loss, which uvicorn waits for
            follower.on_lost()

    def unfollow(self, follower: Follower) -> None:
        """See ``router.frontend.http.connection.Connection``."""
        if self._follower is follower:
            self._follower = None

    def pause_writing(self) -> None:
        """Much is written that the client has not read."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has read most of it."""
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None
        if self._follower is not None:
            self._follower.on_writable()

    def on_response_complete(self) -> None:
        """The answer is written; it may still have to be read."""
        super().on_response_complete()
        self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection; one whose client does not read would stay."""
        super().timeout_keep_alive_handler()
        self._await_reader()

    def shutdown(self) -> None:
        """End the connection with its answer."""
        super().shutdown()
        self._await_reader()

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if self._write_timer is not None or not unread:
            return
        self._unread = unread
        limit_s = self._limits.write_timeout_s
        self._write_until_s = self.loop.time() + limit_s + unread / _SLOWEST
        self._write_timer = self.loop.call_later(limit_s, self._look_whether_it_reads)

    def _look_whether_it_reads(self) -> None:
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
        self._write_timer = self.loop.call_later(limit_s, self._look_whether_it_reads)

    # --- errors before there is a request --------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP is refused in the shape of all errors."""
        self._refuse(InvalidRequestError(f"this is not a valid HTTP request: {msg}"))

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
