"""Limits of all tenants at one router: a copy of the table in Redis, and one on disk.

Twice a second the router compares its copy with Redis. Without Redis, or with a table that it
cannot read, it uses the last one, also after a restart. Where the policies are in a file, Redis has
no part in them, but in deletions of tenants.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from baton.config.secrets import SecretError
from baton.registry.json_file import keep
from baton.registry.redis_store import RegistryUnavailableError
from baton.telemetry.tasks import BackgroundTasks
from baton.tenants.limits import Limits
from baton.tenants.shared_limits import MAX_TENANTS, LimitsTable, SharedLimits
from baton.tenants.tenants_file import TenantsFile

_LOG = logging.getLogger(__name__)

POLL_S = 0.5
_TRIES = 10


class LimitsChangeError(ValueError):
    """A change of limits is not possible; the message is for the operator."""


class LimitsMirror:
    """Keeps the limits of one router equal to those in Redis, and changes both.

    Args:
        shared: Table in Redis.
        on_change: Receives the limits of all tenants when they have changed.
        file: Copy on disk; None: no copy.
        source: File that is the only source of policies while it exists.
        count_failure: Receives the name of a failed task.

    Attributes:
        on_table: Receivers of the whole table after each comparison with Redis or the disk.
    """

    def __init__(
        self,
        shared: SharedLimits,
        on_change: Callable[[Mapping[str, Limits]], None],
        file: Path | None = None,
        source: TenantsFile | None = None,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.table = LimitsTable()
        self.on_table: list[Callable[[LimitsTable], None]] = []
        self._shared = shared
        self._on_change = on_change
        self._file = file
        self._source = source
        self._tasks = BackgroundTasks("tenants", count_failure)
        self._lock = asyncio.Lock()
        self._tried = asyncio.Event()
        self._away = False
        self._problem = ""
        self._told: Mapping[str, Limits] | None = None

    async def start(self) -> None:
        """Read the copy on disk, and follow Redis; return after the first attempt."""
        if self._file is not None and self._file.exists():
            try:
                self._adopt(msgspec.json.decode(self._file.read_bytes(), type=LimitsTable))
            except (OSError, msgspec.DecodeError) as error:
                _LOG.warning("cannot read limits from %s: %s", self._file, error)
        self._tasks.keep(self._follow, "tenants")
        await self._tried.wait()

    async def close(self) -> None:
        """Stop following."""
        await self._tasks.close()

    async def exchange(self) -> None:
        """Compare the copy with Redis; the newer table replaces the other.

        Raises:
            RegistryUnavailableError: Redis does not answer.
        """
        async with self._lock:
            await self._exchange()

    async def change(self, tenant: str, edit: Callable[[Limits | None], Limits | None]) -> None:
        """Change the limits of a tenant.

        Args:
            tenant: Name of the tenant.
            edit: Function from the present limits to the new ones; None: the tenant has none.

        Raises:
            LimitsChangeError: ``edit`` raised it, there are too many tenants, the policies are in
                a file, or Redis' table is unreadable.
            RegistryUnavailableError: Redis does not answer; nothing has changed.
        """
        if self._source is not None and self._in_file() is not None:
            raise LimitsChangeError(
                f"the policies of tenants are in {self._source.file}; change them there, on the "
                "host of each router"
            )

        def edited(before: LimitsTable, _now_ms: int) -> LimitsTable:
            tenants = dict(before.tenants)
            new = edit(tenants.pop(tenant, None))
            if new is not None:
                tenants[tenant] = new
            if len(tenants) > MAX_TENANTS:
                raise LimitsChangeError(f"more than {MAX_TENANTS} tenants would have limits")
            return msgspec.structs.replace(before, tenants=tenants)

        await self.change_table(edited)

    async def change_table(self, edit: Callable[[LimitsTable, int], LimitsTable]) -> None:
        """Change the table by a function of the present one and Redis' time in ms.

        Raises:
            LimitsChangeError, RegistryUnavailableError: As `change` does.
        """
        async with self._lock:
            for _ in range(_TRIES):
                now_ms = await self._exchange()
                before = self.table
                version = max(now_ms, before.version + 1)
                table = msgspec.structs.replace(edit(before, now_ms), version=version)
                if await self._shared.swap(before.version, table):
                    await self._keep(table)
                    return
        raise LimitsChangeError("the table in Redis is unreadable or changes all the time")

    async def _follow(self) -> None:
        while True:
            try:
                await self.exchange()
            except RegistryUnavailableError as error:
                if not self._away:
                    count = len(self.table.tenants)
                    _LOG.warning("using the last known limits of tenants=%d: %s", count, error)
                self._away = True
            else:
                self._away = False
            finally:
                self._refresh()
                self._tried.set()
            await asyncio.sleep(POLL_S)

    def _refresh(self) -> None:
        """Tell the policies of the file, or else those of the table, if they are others."""
        found = self._in_file()
        policies = self.table.tenants if found is None else found
        if policies is not self._told:
            self._told = policies
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

    async def _exchange(self) -> int:
        found, now_ms = await self._shared.read(self.table)
        if found is not None and found.version > self.table.version:
            await self._keep(found)
        elif found is not None and found.version < self.table.version:
            await self._shared.swap(found.version, self.table)  # Redis lost it
        if found is not None:
            self._tell()
        return now_ms

    async def _keep(self, table: LimitsTable) -> None:
        self._adopt(table)
        await asyncio.to_thread(keep, self._file, table)

    def _adopt(self, table: LimitsTable) -> None:
        self.table = table
        self._refresh()
        self._tell()

    def _tell(self) -> None:
        for receive in self.on_table:
            receive(self.table)
