"""Limits how many calls begin in one turn of the event loop, so that answers under way go on.

A call costs the loop about a millisecond until its request is at a worker. A thousand calls that
arrive together would hold all streams for a second if they began in one turn, and all their answers
would then end together and bring the next thousand. So calls wait here in order of arrival, a few
begin in each turn, and between two turns the streams get their tokens.
"""

import asyncio
import time
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.telemetry.metrics import Metrics

_CALLS_PER_TURN = 32
_EXTENSION = "baton.arrived_ns"


def arrived_ns_of(scope: Scope) -> int:
    """Return when a call arrived, on the monotonic clock; now, where no `Intake` stands before."""
    arrived_ns: int = scope.get("extensions", {}).get(_EXTENSION) or time.monotonic_ns()
    return arrived_ns


class Intake:
    """An ASGI application that lets a few POST calls begin in each turn of the loop.

    Other calls are cheap or are questions about the router's health: they do not wait.

    Args:
        app: The application that answers.
        metrics: For the number of calls that wait.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = _CALLS_PER_TURN
        self._scheduled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call, when its turn has come."""
        if scope["type"] == "http" and scope["method"] == "POST":
            arrived_ns = time.monotonic_ns()
            scope["extensions"] = {**scope.get("extensions", {}), _EXTENSION: arrived_ns}
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
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
            if not turn.done():  # else the server gave the call up
                turn.set_result(None)
                self._left -= 1
        self._metrics.set("baton_intake_waiting", len(self._waiting))
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._begin_some)
