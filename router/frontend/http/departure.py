"""A client that leaves while its call is prepared: nothing more is done for it.

Once there is an answer, the answer itself follows the connection
(``router/frontend/api/answer.py``).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Scope

from baton.types.errors import ClientClosedError
from router.frontend.http.connection import connection_of


class _Departure:
    """Ends a block when the client has gone.

    Args:
        limit: Of the block.
    """

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self.happened = False

    def on_writable(self) -> None:
        """See ``router.frontend.http.connection.Follower``."""

    def on_lost(self) -> None:
        """See ``router.frontend.http.connection.Follower``."""
        if not self.happened:
            self.happened = True
            self._limit.reschedule(asyncio.get_running_loop().time())


@contextlib.asynccontextmanager
async def ended_by_departure(scope: Scope) -> AsyncIterator[None]:
    """Cancel what runs inside as soon as the client of a call has gone.

    Args:
        scope: Of the call. Without a connection of our server nothing is watched.

    Raises:
        ClientClosedError: The client has gone.
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
        raise ClientClosedError("the client left before its request began") from ended
