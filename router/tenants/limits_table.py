"""Limits of all tenants at one router: a copy of the table in Redis, or those of a file.

Where the policies are in a file, Redis has no part in them, but in deletions of tenants.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from baton.config.secrets import SecretError
from baton.tenants.limits import Limits
from baton.tenants.shared_limits import MAX_TENANTS, LimitsTable, SharedLimits
from baton.tenants.tenants_file import TenantsFile
from baton.types.versioned import TableChangeError
from router.synced_table import SyncedVersions

_LOG = logging.getLogger(__name__)


class SyncedLimits(SyncedVersions[LimitsTable]):
    """Keeps the limits of one router equal to those in Redis, and changes both.

    Args:
        on_change: Receives the limits of all tenants when they have changed.
        source: File that is the only source of policies while it exists.
    """

    def __init__(
        self,
        shared: SharedLimits,
        on_change: Callable[[Mapping[str, Limits]], None],
        file: Path | None = None,
        source: TenantsFile | None = None,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__("tenants", shared, LimitsTable(), file, count_failure)
        self._on_change = on_change
        self._source = source
        self._problem = ""
        self._applied: Mapping[str, Limits] | None = None

    async def change_tenant(
        self, tenant: str, edit: Callable[[Limits | None], Limits | None]
    ) -> None:
        """Change the limits of a tenant.

        ``edit``: function from the present limits to the new ones; None: the tenant has none.

        Raises:
            TableChangeError: ``edit`` raised it, there are too many tenants, the policies are in a
                file, or Redis' table is unreadable.
            RegistryUnavailableError: Redis does not answer; nothing has changed.
        """
        if self._source is not None and self._in_file() is not None:
            raise TableChangeError(
                f"the policies of tenants are in {self._source.file}; change them there, on the "
                "host of each router"
            )

        def edited(before: LimitsTable, _now_ms: int) -> LimitsTable:
            tenants = dict(before.tenants)
            new = edit(tenants.pop(tenant, None))
            if new is not None:
                tenants[tenant] = new
            if len(tenants) > MAX_TENANTS:
                raise TableChangeError(f"more than {MAX_TENANTS} tenants would have limits")
            return msgspec.structs.replace(before, tenants=tenants)

        await self.change(edited)

    def _described(self) -> str:
        return f"limits of tenants={len(self._table.tenants)}"

    def _attempted(self) -> None:
        self._apply()

    def _use(self, table: LimitsTable) -> None:
        self._table = table
        self._apply()
        super()._use(table)

    def _apply(self) -> None:
        """Apply the policies of the file, or else those of the table, if they are others."""
        in_file = self._in_file()
        policies = self._table.tenants if in_file is None else in_file
        if policies is not self._applied:
            self._applied = policies
            self._on_change(policies)

    def _in_file(self) -> Mapping[str, Limits] | None:
        """Return the policies of the file; None if there is none."""
        try:
            return self._source.current() if self._source is not None else None
        except SecretError as error:
            if str(error) != self._problem:
                _LOG.error("%s; the previous policies stay in use", error)
            self._problem = str(error)
            return None
