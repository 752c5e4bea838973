"""Cancellation of a call whose client disconnects before its response exists.

Afterwards the response itself follows the connection (``router/frontend/api/answer.py``).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Scope

from baton.types.errors import ClientClosedError
from router.frontend.http.protocol import connection_of


class _Departure:
    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self.happened = False

    def on_writable(self) -> None:
        pass

    def on_lost(self) -> None:
        if not self.happened:
            self.happened = True
            self._limit.reschedule(asyncio.get_running_loop().time())


@contextlib.asynccontextmanager
async def ended_by_departure(scope: Scope) -> AsyncIterator[None]:
    """Cancel the body of the context when the client disconnects.

    Raises:
        ClientClosedError: The client has disconnected.
    """
    connection = connection_of(scope)
    if connection is None:
        yield
        return
    limit = asyncio.timeout(None)
    departure = _Departure(limit)
    try:
        async with limit:
            connection.follow(departure)
            try:
                yield
            finally:
                connection.unfollow(departure)
    except TimeoutError as ended:
        if not departure.happened:
            raise
        raise ClientClosedError("the client disconnected before its request started") from ended
