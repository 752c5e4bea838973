"""Exchange of issued API keys between one router, Redis, and a copy on disk.

A comparison costs one round trip while nothing changes. The copy has hashes only.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.registry.json_file import keep
from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.key_record import KeyRecord
from baton.tenants.shared_keys import MAX_KEYS, Change, KeysSummary, SharedKeys
from router.synced_table import TRIES, SyncedTable
from router.tenants.key_table import IssuedKey, KeyTable

_LIMIT_S = 1.5  # of one change, after which Redis is unavailable and writes nothing
_REVOKE_S = 0.5  # of a revocation, which this router has made already
_SEEN_S = 0.3  # of the comparison after a change


class KeyChangeError(ValueError):
    """A change of keys is not possible; the message is for the operator."""


class UnknownKeyError(KeyChangeError):
    """No key has this id."""


class UnconfirmedChangeError(RegistryUnavailableError):
    """Redis did not confirm a change: it was made, or is not made any more."""


class KeyExchange(SyncedTable):
    """Merges the issued keys of one router with those in Redis, and changes both."""

    def __init__(
        self,
        table: KeyTable,
        shared: SharedKeys,
        file: Path | None = None,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__("keys", file, count_failure)
        self.table = table
        self._shared = shared
        self._saving = asyncio.Lock()
        self._seen: tuple[bytes, int] | None = None
        self._unwritten = False  # the table has a revocation that Redis may lack
        self._saved_changes = 0

    async def add(self, records: Sequence[KeyRecord]) -> int:
        """Issue keys, and return the number of those that did not exist.

        Raises:
            KeyChangeError: A key exists with other rights or another secret, or there are too many.
            RegistryUnavailableError: As `change` does.
        """

        def changes() -> list[Change]:
            fresh = [record for record in records if not self._has(record)]
            if len(self.table) + len(fresh) > MAX_KEYS:
                raise KeyChangeError(f"the fleet would have more than {MAX_KEYS} keys")
            return [Change(b"", record) for record in fresh]

        return len(await self._write(changes))

    async def change(
        self,
        key_id: str,
        edit: Callable[[KeyRecord], KeyRecord],
        beside: Callable[[KeyRecord], KeyRecord] | None = None,
        limit_s: float = _LIMIT_S,
    ) -> IssuedKey:
        """Change a key, and return it.

        ``edit``: function from the present record to the new one; it may raise KeyChangeError.
        ``beside``: function from the present record to that of a new key, issued in the same step.
        ``limit_s``: time after which Redis is unavailable and writes nothing.

        Raises:
            KeyChangeError: There is no such key, or ``edit`` raised it.
            RegistryUnavailableError: Redis did not answer in time; nothing has changed.
            UnconfirmedChangeError: Redis did not confirm the change in time.
        """

        def changes() -> list[Change]:
            key = self.table.get(key_id)
            if key is None:
                raise UnknownKeyError(f"no API key has the id {key_id}")
            made = [Change(key.seen, edit(key.record))]
            if beside is not None:
                made.append(Change(b"", beside(key.record)))
            return made

        await self._write(changes, limit_s)
        return self.table[key_id]

    async def revoke(
        self, key_id: str, revoked_ms: int, *, everywhere: bool = True
    ) -> tuple[IssuedKey, bool]:
        """Revoke a key at this router at once, then in Redis; return the key and whether Redis did.

        If Redis does not answer within half a second, it is written as soon as it answers.

        ``everywhere``: false: only this router; another one has tried Redis.

        Raises:
            UnknownKeyError: There is no such key.
        """

        def revoked(old: KeyRecord) -> KeyRecord:
            return msgspec.structs.replace(old, revoked_ms=old.revoked_ms or revoked_ms)

        everywhere = everywhere and not self.away
        if everywhere and self.table.get(key_id) is None:  # another router may have just issued it
            with contextlib.suppress(TimeoutError, RegistryUnavailableError):
                async with asyncio.timeout(_REVOKE_S):
                    await self.exchange()
        key = self.table.get(key_id)
        if key is None:
            raise UnknownKeyError(f"no API key has the id {key_id}")
        self.table.adopt(revoked(key.record))
        is_shared = False
        try:
            if everywhere:
                with contextlib.suppress(RegistryUnavailableError, KeyChangeError):
                    await self.change(key_id, revoked, limit_s=_REVOKE_S)
                    is_shared = True
        finally:
            if not is_shared:
                key.seen = b""  # what Redis has is older
                self._unwritten = True
        await self._save()
        return key, is_shared

    async def used(self) -> dict[str, int]:
        """Return the last day of use of each key; without Redis, of uses at this router."""
        own = {key.record.id: key.used_day for key in self.table if key.used_day}
        try:
            theirs = await self._shared.used()
        except RegistryUnavailableError:
            return own
        return {name: max(own.get(name, 0), theirs.get(name, 0)) for name in own | theirs}

    async def _write(
        self, changes: Callable[[], list[Change]], limit_s: float = _LIMIT_S
    ) -> list[Change]:
        """Write what ``changes`` returns for the present table, and return it."""
        end_s = time.monotonic() + limit_s
        sent = False
        try:
            async with asyncio.timeout(limit_s), self._lock:
                for _ in range(TRIES):
                    now_ms = await self._exchange()
                    made = changes()
                    until_ms = now_ms + int((end_s - time.monotonic()) * 1000)
                    sent = True
                    if await self._shared.put(made, until_ms):
                        records = (change.record for change in made)
                        self.table.merge({one.id: msgspec.json.encode(one) for one in records})
                        break
                    sent = False
                else:
                    raise KeyChangeError(
                        "other routers change the keys at the same time; try again"
                    )
        except (TimeoutError, RegistryUnavailableError) as error:
            if sent:
                raise UnconfirmedChangeError("Redis did not confirm the change") from error
            raise RegistryUnavailableError(str(error) or "Redis does not answer") from error
        async with self._lock:
            await self._save()
            try:
                async with asyncio.timeout(_SEEN_S):
                    await self._exchange()
            except (TimeoutError, RegistryUnavailableError):
                self._seen = None  # else an older table with that mark would pass for this one
        return made

    def _has(self, record: KeyRecord) -> bool:
        known = self.table.get(record.id)
        if known is None:
            return False
        if (known.record.sha256, known.record.rights) != (record.sha256, record.rights):
            raise KeyChangeError(f"the API key {record.id} exists with other rights")
        return True

    def _described(self) -> str:
        return f"API keys={len(self.table)}"

    async def _exchange(self) -> int:
        """Compare the table with Redis, and return the time of its clock in ms."""
        summary = await self._shared.summary()
        if self._unwritten or (summary.mark, summary.total) != self._seen:
            unwritten, self._unwritten = self._unwritten, False
            if unwritten:
                self._seen = None  # read all: what is newer here is then written
            try:
                await self._compare(summary)
            except (RegistryUnavailableError, asyncio.CancelledError):
                self._unwritten |= unwritten
                raise
        await self._report_use()
        self.table.compared_s = time.monotonic()
        return summary.now_ms

    async def _report_use(self) -> None:
        days = self.table.used
        if not days:
            return
        self.table.used = {}
        try:
            await self._shared.note_used(days)
        except (RegistryUnavailableError, asyncio.CancelledError):
            self.table.used = days | self.table.used
            raise

    async def _compare(self, summary: KeysSummary) -> None:
        table = self.table
        newer = await self._read_changed(summary)
        if newer is None:
            newer = await self._read_all(summary)
        for key_id, reason in table.unreadable.items():
            self._shared.skip(key_id, reason)
        table.unreadable.clear()
        await self._save()
        self._seen = None if newer else (summary.mark, summary.total)
        if newer:
            table.used |= {key.record.id: key.used_day for key in table if key.used_day}
            await self._shared.put(newer)  # the next comparison repeats what failed

    async def _read_changed(self, summary: KeysSummary) -> list[Change] | None:
        """Read what changed since the last comparison; None if that leaves a difference."""
        if self._seen is None:
            return None
        changed = await self._shared.changed(self._seen[0], summary.mark)
        if changed is None:
            return None
        newer = self.table.merge(await self._shared.some(changed))
        return newer if len(self.table) == summary.total else None

    async def _read_all(self, summary: KeysSummary) -> list[Change]:
        """Read the table in Redis, and return what it lacks."""
        newer: list[Change] = []
        there: set[str] = set()
        async for raws in self._shared.records():
            newer += self.table.merge(raws)
            there.update(raws)
        old = self.table.forget(summary.now_ms)
        if gone := there.intersection(old):
            await self._shared.drop(gone)
        newer = [change for change in newer if change.record.id not in old]
        return newer + self.table.missing(there)

    async def _save(self) -> None:
        async with self._saving:
            changes = self.table.changes
            if changes != self._saved_changes:
                records = [key.record for key in self.table]
                await asyncio.to_thread(keep, self._file, records)
                self._saved_changes = changes

    def _load(self, file: Path) -> None:
        records = msgspec.json.decode(file.read_bytes(), type=list[KeyRecord])
        age_s = time.time() - file.stat().st_mtime  # since the last change: at most that old
        for record in records:
            self.table.adopt(record)
        self.table.compared_s = time.monotonic() - age_s
        self._saved_changes = self.table.changes
