"""Audit log of one process.

On the host of the supervisor entries go to the file, and the process moves those of other hosts
from Redis to it. Elsewhere they go to Redis. An act does not fail because its entry cannot be
written: the entry is kept in memory and tried again, which is logged and counted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.registry.redis_store import RegistryUnavailableError
from baton.telemetry.tasks import BackgroundTasks
from baton.tenants.audit import file as audit_file
from baton.tenants.audit.chain import ChainHead, Entry
from baton.tenants.audit.inbox import AuditInbox

_LOG = logging.getLogger(__name__)

_PERIOD_S = 0.5
_KEPT = 1000


class AuditLog:
    """Writes entries, from anywhere to the file.

    Args:
        file: File of the log; None: it is on another host.
        export: Receives each line that this process has written.

    Attributes:
        on_failure: Called for each entry that could not be written at once.
        each_period: Sources of entries, asked twice a second.
    """

    def __init__(
        self,
        inbox: AuditInbox,
        file: Path | None = None,
        export: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._inbox = inbox
        self._file = file
        self.on_failure: Callable[[], None] = lambda: None
        self._export = export
        self._tasks = BackgroundTasks("audit")
        self._kept: deque[Entry] = deque(maxlen=_KEPT)
        self._noted = ChainHead()
        self.each_period: list[Callable[[], list[Entry]]] = []

    def start(self) -> None:
        """Start to move entries, and to try again."""
        self._tasks.keep(self._follow, "audit")

    async def close(self) -> None:
        """Try a last time, and stop."""
        await self._tasks.close()
        await self._again()

    async def write_soon(self, entry: Entry) -> None:
        """Write an entry, but do not wait for Redis, which a log on another host needs."""
        if self._file is not None:
            await self.write(entry)
        else:
            self._kept.append(entry)

    async def write(self, entry: Entry) -> None:
        """Write an entry. This raises nothing if it cannot be written."""
        if not await self._written(entry):
            self.on_failure()
            self._kept.append(entry)

    async def _written(self, entry: Entry) -> bool:
        why = ""
        if self._file is not None:
            try:
                await self._append([entry])
                return True
            except (OSError, ValueError) as error:
                why = f"{self._file}: {error}; "
        try:
            await self._inbox.put(entry)
        except RegistryUnavailableError as error:
            _LOG.warning("cannot write audit entry verb=%s: %s%s", entry.verb, why, error)
            return False
        if why:
            _LOG.warning("audit entry is in Redis only verb=%s: %s", entry.verb, why)
            self.on_failure()
        return True

    async def _append(self, entries: list[Entry]) -> None:
        if self._file is not None:
            for line in await asyncio.to_thread(audit_file.append, self._file, entries):
                self._export(line)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            for made in self.each_period:
                for entry in made():
                    await self.write(entry)
            await self._again()
            try:
                await self._collect()
            except RegistryUnavailableError:
                continue  # the registry counts it
            except (OSError, ValueError) as error:
                _LOG.warning("cannot write the audit log %s: %s", self._file, error)
                self.on_failure()

    async def _again(self) -> None:
        while self._kept:
            if not await self._written(self._kept[0]):
                return
            self._kept.popleft()

    async def _collect(self) -> None:
        """Move entries of other hosts to the file, and record its last line in Redis."""
        if self._file is None:
            return
        while raw := await self._inbox.waiting():
            await self._append(list(filter(None, map(_entry_of, raw))))
            await self._inbox.remove(raw)
        head = await asyncio.to_thread(audit_file.last, self._file)
        if head.seq and (head != self._noted or await self._inbox.head() is None):
            await self._inbox.note(head)
            self._noted = head


def _entry_of(raw: bytes) -> Entry | None:
    try:
        return msgspec.json.decode(raw, type=Entry)
    except msgspec.DecodeError as error:
        _LOG.warning("dropped an unreadable audit entry: %s", error)
        return None
