"""Routes at one router: a copy of the table in Redis, and one on disk.

Twice a second the router compares its copy with Redis. Without Redis, or with a table that it
cannot read, it uses the last one, also after a restart. Without Redis a router can still end a
canary or shadow for itself: `RouteMirror.end_here`.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.registry.json_file import keep
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.shared_routes import SharedRoutes
from baton.telemetry.tasks import BackgroundTasks
from baton.types.routes import NameRoute, RouteTable
from router.lanes.routes import RouteChangeError, thrown_out

_LOG = logging.getLogger(__name__)

POLL_S = 0.5
_TRIES = 10


class RouteMirror:
    """Keeps the routes of one router equal to those in Redis, and changes both.

    Args:
        shared: Table in Redis; None: names lead to the models of these names.
        file: Copy on disk; None: no copy.
        count_failure: Receives the name of a failed task.
    """

    def __init__(
        self,
        shared: SharedRoutes | None,
        file: Path | None = None,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._table = RouteTable()
        self._ended_here: dict[str, tuple[NameRoute, str]] = {}
        self._in_use = self._table
        self._shared = shared
        self._file = file
        self._tasks = BackgroundTasks("routes", count_failure)
        self._lock = asyncio.Lock()
        self._tried = asyncio.Event()
        self.away = False
        """True if Redis did not answer the last comparison."""

    @property
    def table(self) -> RouteTable:
        """Table that the router uses: the shared one, without what has ended here only."""
        return self._in_use

    def end_here(self, name: str, tried: NameRoute, reason: str) -> None:
        """End the canary or shadow of the entry ``tried`` at this router, but not in Redis."""
        self._ended_here[name] = (tried, reason)
        self._use(self._table)

    def needs_conversation(self, name: str) -> bool:
        """Return whether the model of a name depends on the conversation."""
        entry = self.table.names.get(name)
        return entry is not None and (entry.share > 0 or entry.shadow_share > 0)

    async def start(self) -> None:
        """Read the copy on disk, and follow Redis; return after the first attempt."""
        if self._shared is None:
            return
        if self._file is not None and self._file.exists():
            try:
                self._use(msgspec.json.decode(self._file.read_bytes(), type=RouteTable))
            except (OSError, msgspec.DecodeError) as error:
                _LOG.warning("cannot read routes from %s: %s", self._file, error)
        self._tasks.keep(self._follow, "routes")
        await self._tried.wait()

    async def close(self) -> None:
        """Stop following."""
        await self._tasks.close()

    async def change(
        self, edit: Callable[[RouteTable], RouteTable]
    ) -> tuple[RouteTable, RouteTable]:
        """Change the table by a function of the present one; return the tables before and after.

        Raises:
            RouteChangeError: ``edit`` raised it, or Redis' table is unreadable.
            RegistryUnavailableError: Redis does not answer; nothing has changed.
        """
        if self._shared is None:
            raise RegistryUnavailableError("this router has no connection to the fleet's Redis")
        async with self._lock:
            for _ in range(_TRIES):
                now_ms = await self._exchange(self._shared)
                before = self._table
                version = max(now_ms, before.version + 1)
                table = msgspec.structs.replace(edit(before), version=version)
                if await self._shared.swap(before.version, table):
                    await self._keep(table)
                    return before, table
        raise RouteChangeError("the table in Redis is unreadable or changes all the time")

    async def _follow(self) -> None:
        while True:
            try:
                if self._shared is not None:
                    async with self._lock:
                        await self._exchange(self._shared)
            except RegistryUnavailableError as error:
                if not self.away:
                    _LOG.warning("using the last known routes: %s", error)
                self.away = True
            else:
                self.away = False
            finally:
                self._tried.set()
            await asyncio.sleep(POLL_S)

    async def _exchange(self, shared: SharedRoutes) -> int:
        found, now_ms = await shared.read(self._table)
        if found is not None and found.version > self._table.version:
            await self._keep(found)
        elif found is not None and found.version < self._table.version:
            await shared.swap(found.version, self._table)  # Redis lost it
        return now_ms

    async def _keep(self, table: RouteTable) -> None:
        self._use(table)
        await asyncio.to_thread(keep, self._file, table)

    def _use(self, table: RouteTable) -> None:
        self._table = table
        for name, (tried, reason) in list(self._ended_here.items()):
            try:
                table = thrown_out(table, name, tried, reason)
            except RouteChangeError:  # it has ended for all routers
                del self._ended_here[name]
        self._in_use = table
