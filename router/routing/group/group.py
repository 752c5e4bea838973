"""What one router has of its group: the others, and their metrics."""

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp

from baton.telemetry.metrics import Metrics
from router.routing.group.any_router import AnyRouter
from router.routing.group.member import Member
from router.routing.group.past_pages import PastPages
from router.routing.group.siblings import MakeConnection, Siblings

_LOG = logging.getLogger(__name__)


class RouterGroup:
    """The group, as one of its routers has it.

    Args:
        member: Which one it is.
        metrics: Its own.
        count_failure: Told of a background task's name when it raised.
    """

    def __init__(
        self, member: Member, metrics: Metrics, count_failure: Callable[[str], None]
    ) -> None:
        self._member = member
        self._metrics = metrics
        self._siblings = Siblings(member, count_failure)
        self._past = PastPages(member.folder, member.index, metrics.together)

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application of the group, around that of the router."""
        if self._member.count == 1:
            return app
        return AnyRouter(app, self._siblings, self._past, self._metrics.together)

    async def join(self, make_connection: MakeConnection, tls: object | None) -> None:
        """This router serves now: see `Siblings.start`."""
        await asyncio.to_thread(self._past.sum_up)
        await self._siblings.start(make_connection, tls)

    def leave(self) -> None:
        """It accepts no more."""
        self._siblings.leave()

    async def close(self) -> None:
        """It ends."""
        await self._siblings.close()
        if self._member.count > 1:
            self._past.keep(self._metrics.render())
