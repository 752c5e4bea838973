"""The connection of one call, where the server lends it to who writes the answer.

ASGI's ``send`` is for a task that waits. A stream gets a few bytes for every token, from whoever
has the token: it writes to the connection itself, without a task to wake. The bytes are the same.

    frame of a worker ── records ── Deliveries ── once a pass ──▶ each stream with news: one write
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

from router.frontend.http.pace import Pace

_EXTENSION = "baton.connection"


class Follower(Protocol):
    """Told what becomes of a connection."""

    def on_writable(self) -> None:
        """The client has read most of what waited for it."""

    def on_lost(self) -> None:
        """The client has gone."""


class Connection(Protocol):
    """``router.frontend.http_server.LimitedProtocol``, as an answer sees it."""

    @property
    def writable(self) -> bool:
        """Whether it may be written to: the client is there, and is not far behind."""

    def write_piece(self, body: bytes) -> None:
        """Write a piece of a body whose beginning ``send`` has written, and whose end it will."""

    def follow(self, follower: Follower) -> None:
        """Tell ``follower`` from now on, and nobody else."""

    def unfollow(self, follower: Follower) -> None:
        """Tell it no more. The next request of the connection may have another already."""


def lend(scope: Scope, connection: Connection) -> None:
    """Put the connection of a call where `connection_of` finds it."""
    scope["extensions"] = {**scope.get("extensions", {}), _EXTENSION: connection}


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a call; None where something else than our server runs it."""
    connection: Connection | None = scope.get("extensions", {}).get(_EXTENSION)
    return connection


class Deliveries:
    """The streams that have news.

    All are written to in one pass, when the frames that are here have been taken in: two tokens of
    one stream go out as one piece. While the loop is behind, the pass waits for more of them
    (``pace.py``).
    """

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], None], None] = {}
        self._pace = Pace()

    def add(self, deliver: Callable[[], None]) -> None:
        """Call ``deliver``, which must not raise, in the next pass."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            hold_ns = self._pace.hold_ns
            if hold_ns:
                loop.call_later(hold_ns / 1e9, self._deliver)
            else:
                loop.call_soon(self._deliver)
        self._waiting[deliver] = None

    def _deliver(self) -> None:
        waiting = self._waiting
        self._waiting = {}
        for deliver in waiting:
            deliver()
        self._pace.passed(time.monotonic_ns(), time.thread_time_ns())
