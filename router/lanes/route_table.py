"""Routes at one router: a copy of the table in Redis, without what has ended here only."""

from collections.abc import Callable
from pathlib import Path

from baton.registry.shared_tables import SharedRoutes
from baton.types.routes import NameRoute, RouteTable
from baton.types.versioned import TableChangeError
from router.lanes.routes import thrown_out
from router.synced_table import SyncedVersions


class SyncedRoutes(SyncedVersions[RouteTable]):
    """Routes of one router. Without Redis it can still end a canary or shadow for itself.

    Args:
        shared: Table in Redis; None: names lead to the models of these names.
    """

    def __init__(
        self,
        shared: SharedRoutes | None,
        file: Path | None = None,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__("routes", shared, RouteTable(), file, count_failure)
        self._ended_here: dict[str, tuple[NameRoute, str]] = {}
        self._in_use = self._table

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

    def _use(self, table: RouteTable) -> None:
        super()._use(table)
        for name, (tried, reason) in list(self._ended_here.items()):
            try:
                table = thrown_out(table, name, tried, reason)
            except TableChangeError:  # it has ended for all routers
                del self._ended_here[name]
        self._in_use = table
