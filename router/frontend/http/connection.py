"""Direct access of a response to its connection.

ASGI's ``send`` requires a task that waits. Streams send a few bytes for every token, so they write
to the connection directly, without waking a task. The bytes are the same.

    frame of a worker ── records ── Deliveries ── once a pass ──▶ one write per stream with tokens
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from router.frontend.http.pace import Pace


class Follower(Protocol):
    """Receiver of a connection's events."""

    def on_writable(self) -> None:
        """Handle that the client has read most of the backlog."""

    def on_lost(self) -> None:
        """Handle that the client has disconnected."""


class Deliveries:
    """Streams with new tokens.

    One pass writes to all of them after all received frames are processed, so that two tokens of a
    stream are sent as one piece. If the event loop is overloaded, a pass is delayed (``pace.py``).
    """

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], None], None] = {}
        self._pace = Pace()
        self._planned_ns = 0  # CPU time of the loop's thread

    def add(self, deliver: Callable[[], None]) -> None:
        """Call ``deliver``, which must not raise, in the next pass."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            self._planned_ns = time.thread_time_ns()
            if hold_ns := self._pace.hold_ns:
                loop.call_later(hold_ns / 1e9, self._deliver)
            else:
                loop.call_soon(self._deliver)
        self._waiting[deliver] = None

    def _deliver(self) -> None:
        waiting = self._waiting
        self._waiting = {}
        self._pace.passed(time.thread_time_ns() - self._planned_ns)
        for deliver in waiting:
            deliver()
