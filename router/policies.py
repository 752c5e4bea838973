"""Policies of tenants at one router, as the last table of Redis has them."""

import secrets

from baton.registry.tenants.policies import LimitsTable
from baton.types.limits import Limits

_NONE = Limits()


class TenantPolicies:
    """Policies that requests use; `adopt` replaces them.

    Attributes:
        table: Last known table.
    """

    def __init__(self) -> None:
        self.table = LimitsTable()
        self._unread = ""

    def expect(self) -> None:
        """Use a cache of this process alone until a table is adopted.

        Else a router without Redis would find the KV of deleted tenants.
        """
        self._unread = secrets.token_hex(16)

    def adopt(self, table: LimitsTable) -> None:
        """Replace the table."""
        self.table = table
        self._unread = ""

    def of(self, tenant: str) -> Limits:
        """Return the policy of a tenant."""
        return self.table.tenants.get(tenant, _NONE)

    def owner_of(self, tenant: str, *, shared: bool) -> str:
        """Return the owner part of the cache scope of a tenant's requests."""
        if self._unread:
            return f"{'' if shared else tenant}:{self._unread}"
        return self.table.forgotten.owner_of(tenant, shared=shared)

    def deletion_of(self, tenant: str) -> str:
        """Return the id of the tenant's last deletion; empty if there was none."""
        deletion = self.table.forgotten.deletions.get(tenant)
        return deletion.id if deletion is not None else ""
