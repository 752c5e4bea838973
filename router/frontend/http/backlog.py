"""Write timeout of a connection: a client that does not read its response loses the connection."""

import asyncio

from baton.telemetry.metrics import Metrics

_SLOWEST = 64 * 1024  # bytes a second


class Backlog:
    """Bytes of responses that a client has not read yet.

    They must become fewer within ``limit_s``, at a rate of at least ``_SLOWEST``.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        limit_s: float,
        metrics: Metrics,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._limit_s = limit_s
        self._metrics = metrics
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes at the last check
        self._until_s = 0.0

    def watch(self) -> None:
        """Start the timeout if there are unread bytes."""
        unread = self._transport.get_write_buffer_size()
        if self._timer is not None or not unread:
            return
        self._unread = unread
        self._until_s = self._loop.time() + self._limit_s + unread / _SLOWEST
        self._timer = self._loop.call_later(self._limit_s, self._check)

    def stop(self) -> None:
        """Stop the timeout."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        unread = self._transport.get_write_buffer_size()
        if not unread:
            return
        if unread >= self._unread or self._loop.time() > self._until_s:
            self._metrics.inc("baton_client_timeouts", kind="write")
            self._transport.abort()
            return
        self._unread = unread
        self._timer = self._loop.call_later(self._limit_s, self._check)
