"""Group of routers, as one of its members uses it."""

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp

from baton.telemetry.metrics import Metrics
from router.frontend.group.any_router import AnyRouter
from router.frontend.group.member import Member
from router.frontend.group.past_pages import PastPages
from router.frontend.group.siblings import Accept, MakeConnection, Siblings

_LOG = logging.getLogger(__name__)


class RouterGroup:
    """The other routers of a group, and the group's metrics."""

    def __init__(
        self, member: Member, metrics: Metrics, count_failure: Callable[[str], None]
    ) -> None:
        self._member = member
        self._metrics = metrics
        self._siblings = Siblings(member, count_failure)
        self._past = PastPages(member.folder, member.index, metrics.together)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Wrap the router's application in that of the group."""
        metrics = self._metrics
        return AnyRouter(app, self._siblings, self._past, metrics.together, metrics.exemplars)

    async def join(self, make_connection: MakeConnection, accept: Accept) -> None:
        """Join the group, now that this router serves; see `Siblings.start`."""
        await asyncio.to_thread(self._past.sum_up)
        await self._siblings.start(make_connection, accept)

    async def leave(self) -> None:
        """Stop accepting connections of clients."""
        await self._siblings.leave()

    async def close(self) -> None:
        """Leave the group and save this router's metrics."""
        await self._siblings.close()
        self._past.keep(self._metrics.render())
