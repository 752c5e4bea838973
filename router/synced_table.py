"""Copies at one router of tables that all routers share through Redis.

Twice a second a router compares its copy with Redis. Without Redis, or with a table that it cannot
read, it uses the last one, also after a restart. Redis may lose a table: each router writes its
copy again.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from baton.registry.json_file import keep
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.shared_tables import VersionedTable
from baton.telemetry.tasks import BackgroundTasks
from baton.types.versioned import TableChangeError, Versioned

_LOG = logging.getLogger(__name__)

POLL_S = 0.5
TRIES = 10
"""Attempts of a change while other routers change the same table."""

TableT = TypeVar("TableT", bound=Versioned)


class SyncedTable(ABC):
    """Keeps a table of one router equal to that in Redis; subclasses compare the two.

    Args:
        name: Name of the task.
        file: Copy on disk; None: no copy.
        count_failure: Receives the name of a failed task.
    """

    def __init__(
        self,
        name: str,
        file: Path | None = None,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._file = file
        self._tasks = BackgroundTasks(name, count_failure)
        self._lock = asyncio.Lock()
        self._tried = asyncio.Event()
        self.away = False
        """True if Redis did not answer the last comparison."""

    async def start(self) -> None:
        """Read the copy on disk, and follow Redis; return after the first attempt."""
        if self._file is not None and self._file.exists():
            try:
                self._load(self._file)
            except (OSError, msgspec.DecodeError) as error:
                _LOG.warning("cannot read %s from %s: %s", self._described(), self._file, error)
        self._tasks.keep(self._follow, self._name)
        await self._tried.wait()

    async def close(self) -> None:
        """Stop following."""
        await self._tasks.close()

    async def exchange(self) -> None:
        """Compare the copy with Redis, and bring both to the same state.

        Raises:
            RegistryUnavailableError: Redis does not answer.
        """
        async with self._lock:
            await self._exchange()

    async def _follow(self) -> None:
        while True:
            try:
                await self.exchange()
            except RegistryUnavailableError as error:
                if not self.away:
                    _LOG.warning("using the last known %s: %s", self._described(), error)
                self.away = True
            else:
                if self.away:
                    _LOG.info("compared %s with Redis again", self._described())
                self.away = False
            finally:
                self._attempted()
                self._tried.set()
            await asyncio.sleep(POLL_S)

    def _described(self) -> str:
        """Return the name of the entries in log lines."""
        return self._name

    def _attempted(self) -> None:  # noqa: B027 - most have nothing to do
        """React to the end of a comparison, which may have failed."""

    @abstractmethod
    async def _exchange(self) -> int:
        """Compare under the lock; return Redis' time in ms."""

    @abstractmethod
    def _load(self, file: Path) -> None:
        """Read the copy on disk."""


class SyncedVersions(SyncedTable, Generic[TableT]):
    """Copy of a table that routers replace as a whole: the newer one wins.

    Args:
        name: Name of the task.
        shared: Table in Redis; None: the copy stays empty.
        empty: Table without entries.
        file: Copy on disk; None: no copy.
        count_failure: Receives the name of a failed task.

    Attributes:
        on_table: Receivers of the whole table after each comparison with Redis or the disk.
    """

    def __init__(
        self,
        name: str,
        shared: VersionedTable[TableT] | None,
        empty: TableT,
        file: Path | None = None,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(name, file, count_failure)
        self._shared = shared
        self._table = empty
        self.on_table: list[Callable[[TableT], None]] = []

    @property
    def table(self) -> TableT:
        """Table that the router uses."""
        return self._table

    async def start(self) -> None:
        """Read the copy on disk, and follow Redis; return after the first attempt."""
        if self._shared is not None:
            await super().start()

    async def change(self, edit: Callable[[TableT, int], TableT]) -> tuple[TableT, TableT]:
        """Change the table by a function of the present one and of Redis' time in ms.

        Returns:
            The tables before and after.

        Raises:
            TableChangeError: ``edit`` raised it, or Redis' table is unreadable.
            RegistryUnavailableError: Redis does not answer; nothing has changed.
        """
        if self._shared is None:
            raise RegistryUnavailableError("this router has no connection to the fleet's Redis")
        async with self._lock:
            for _ in range(TRIES):
                now_ms = await self._exchange()
                before = self._table
                version = max(now_ms, before.version + 1)
                table = msgspec.structs.replace(edit(before, now_ms), version=version)
                if await self._shared.swap(before.version, table):
                    await self._keep(table)
                    return before, table
        raise TableChangeError("the table in Redis is unreadable or changes all the time")

    async def _exchange(self) -> int:
        if self._shared is None:
            raise RegistryUnavailableError("this router has no connection to the fleet's Redis")
        theirs, now_ms = await self._shared.read(self._table)
        if theirs is None:
            return now_ms
        if theirs.version > self._table.version:
            await self._keep(theirs)
        else:
            if theirs.version < self._table.version:
                await self._shared.swap(theirs.version, self._table)  # Redis lost it
            self._use(self._table)
        return now_ms

    async def _keep(self, table: TableT) -> None:
        self._use(table)
        await asyncio.to_thread(keep, self._file, table)

    def _load(self, file: Path) -> None:
        if self._shared is not None:
            self._use(self._shared.decoded(file.read_bytes()))

    def _use(self, table: TableT) -> None:
        self._table = table
        for receive in self.on_table:
            receive(table)
