"""Table of routes in Redis."""

from baton.registry.redis_store import Registry
from baton.registry.shared_tables import VersionedTable
from baton.types.routes import RouteTable


class SharedRoutes(VersionedTable[RouteTable]):
    """Key ``routes``: the routes of names, and the golden prompts of models."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry, "routes", RouteTable, {"table": "names", "golden": "golden"})
