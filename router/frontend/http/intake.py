"""Limit of calls that start in one turn of the event loop, so that running streams continue.

A call occupies the loop for about a millisecond until its request is at a worker. If thousands
arrived together and started in one turn, all streams would stop for seconds. Therefore a turn
starts a limited number, in order of arrival, and streams get their tokens between two turns. With
fewer calls per turn, first tokens come later, and writes to streams take more of the time.
"""

import asyncio
import time
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.telemetry.metrics import Metrics

_CALLS_PER_TURN = 256
_EXTENSION = "baton.arrived_ns"


def arrived_ns_of(scope: Scope) -> int:
    """Return the arrival of a call on the monotonic clock; now, if it did not pass an `Intake`."""
    arrived_ns: int = scope.get("extensions", {}).get(_EXTENSION) or time.monotonic_ns()
    return arrived_ns


class Intake:
    """ASGI middleware that limits the POST calls that start in each turn of the loop.

    Other calls are cheap or check the router's health, so they do not wait.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = _CALLS_PER_TURN
        self._scheduled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a call when it may start."""
        if scope["type"] == "http" and scope["method"] == "POST":
            arrived_ns = time.monotonic_ns()
            scope["extensions"] = {**scope.get("extensions", {}), _EXTENSION: arrived_ns}
            await self._wait_for_turn()
        await self._app(scope, receive, send)

    async def _wait_for_turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._begin_some)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin_some(self) -> None:
        self._left = _CALLS_PER_TURN
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise the server has cancelled the call
                turn.set_result(None)
                self._left -= 1
        self._metrics.set("baton_intake_waiting", len(self._waiting))
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._begin_some)
