"""Policies of tenants at one router, and the tenants that were deleted."""

import secrets
from collections.abc import Mapping
from types import MappingProxyType

from baton.tenants.limits import NO_LIMITS, Limits
from baton.tenants.shared_limits import LimitsTable
from baton.tenants.tenants_file import TenantsFile


class TenantPolicies:
    """Policies that requests use.

    Attributes:
        file: File that is the only source of policies while it exists; None: they are in Redis.
        all: Policies by tenant, from Redis or from the file.
        table: Last known table of Redis, which has the deletions.
    """

    def __init__(self, file: TenantsFile | None = None) -> None:
        self.file = file
        self.all: Mapping[str, Limits] = MappingProxyType({})
        self.table = LimitsTable()
        self._unread = ""

    def expect(self) -> None:
        """Use a cache of this process alone until a table is adopted.

        Else a router without Redis would find the KV of deleted tenants.
        """
        self._unread = secrets.token_hex(16)

    def adopt(self, table: LimitsTable) -> None:
        """Replace the whole table of policies."""
        self.table = table
        self._unread = ""

    def replace(self, policies: Mapping[str, Limits]) -> None:
        """Use these policies from now on."""
        self.all = policies

    def of(self, tenant: str) -> Limits:
        """Return the policy of a tenant; one without limits if it has none."""
        return self.all.get(tenant, NO_LIMITS)

    def weight(self, tenant: str) -> float:
        """Return the weight of a tenant in queues."""
        weight = self.of(tenant).weight
        return 1.0 if weight is None else weight

    def owner_of(self, tenant: str, *, shared: bool) -> str:
        """Return the owner part of the cache scope of a tenant's requests."""
        if self._unread:
            return f"{'' if shared else tenant}:{self._unread}"
        return self.table.forgotten.owner_of(tenant, shared=shared)

    def deletion_of(self, tenant: str) -> str:
        """Return the id of the tenant's last deletion; empty if there was none."""
        deletion = self.table.forgotten.deletions.get(tenant)
        return deletion.id if deletion is not None else ""
