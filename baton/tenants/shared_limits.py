"""Limits of all tenants in Redis."""

from collections.abc import Mapping

from baton.registry.redis_store import Registry
from baton.registry.shared_tables import VersionedTable
from baton.tenants.deletions import Forgotten
from baton.tenants.limits import Limits
from baton.types.versioned import Versioned

MAX_TENANTS = 10_000


class LimitsTable(Versioned, frozen=True):
    """Limits by tenant, and deletions."""

    tenants: Mapping[str, Limits] = {}
    forgotten: Forgotten = Forgotten()


class SharedLimits(VersionedTable[LimitsTable]):
    """Key ``tenants``: limits and deletions of tenants."""

    def __init__(self, registry: Registry) -> None:
        parts = {"table": "tenants", "forgotten": "forgotten"}
        super().__init__(registry, "tenants", LimitsTable, parts)
