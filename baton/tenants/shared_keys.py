"""Table of issued API keys in Redis.

    keys         hash: id -> record as JSON, see record.py          bounded by MAX_KEYS
    keys:mark    random; it changes with every change of the table
    keys:log     list: mark and ids of each change, newest first    64 changes
    keys:used    hash: id -> last day of use, counted from 1970     one field per key

Redis may lose the table, or evict a part of it. Every router has a copy and writes it again.
"""

import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.tenants.key_record import KeyRecord

MAX_KEYS = 100_000
_SLICE = 256  # records that are read or written at once

# KEYS: table, mark, log. ARGV: new mark, time in ms after which nothing is written (0: none), then
# for each record its id, expected and new value.
_SWAP = """
local line, time = {ARGV[1]}, redis.call('TIME')
local until_ms = tonumber(ARGV[2])
if until_ms > 0 and time[1] * 1000 + time[2] / 1000 > until_ms then return -1 end
for at = 3, #ARGV, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[at]) or '') ~= ARGV[at + 1] then return 0 end
end
for at = 3, #ARGV, 3 do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 2])
  line[#line + 1] = ARGV[at]
end
redis.call('SET', KEYS[2], ARGV[1])
redis.call('LPUSH', KEYS[3], table.concat(line, ' '))
redis.call('LTRIM', KEYS[3], 0, 63)
return 1
"""


class KeysSummary(NamedTuple):
    """State of the table without its records. ``now_ms`` is the time of Redis' clock."""

    mark: bytes
    total: int
    now_ms: int


class Change(NamedTuple):
    """Record to write, and the value that it replaces; empty: there must be none."""

    expected: bytes
    record: KeyRecord


class SharedKeys:
    """Issued API keys of a fleet.

    Every call may raise the registry's ``RegistryUnavailableError``.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._table = registry.key("keys")
        self._mark = registry.key("keys", "mark")
        self._log = registry.key("keys", "log")
        self._used = registry.key("keys", "used")

    async def summary(self) -> KeysSummary:
        """Return the state of the table, which differs after each change and each loss."""
        mark, total, now = await self._registry.send(
            ("GET", self._mark), ("HLEN", self._table), ("TIME",)
        )
        seconds, micros = now
        return KeysSummary(mark or b"", int(total), int(seconds) * 1000 + int(micros) // 1000)

    async def changed(self, since: bytes, until: bytes) -> set[str] | None:
        """Return the ids of the records that changed between two marks; None: unknown."""
        (entries,) = await self._registry.send(("LRANGE", self._log, 0, -1))
        changed: set[str] = set()
        for number, entry in enumerate(entries):
            mark, *ids = bytes(entry).split()
            if number == 0 and mark != until:
                return None  # Redis has lost a part, or changes again
            if mark == since:
                return changed
            changed.update(raw.decode() for raw in ids)
        return None

    async def some(self, ids: Collection[str]) -> dict[str, bytes]:
        """Return those of the records that exist, undecoded."""
        names = list(ids)
        if not names:
            return {}
        (raws,) = await self._registry.send(("HMGET", self._table, *names))
        pairs = zip(names, raws, strict=True)
        return {name: bytes(raw) for name, raw in pairs if raw is not None}

    async def records(self) -> AsyncIterator[dict[str, bytes]]:
        """Yield the records by id, undecoded, in slices."""
        cursor = 0
        while True:
            ((cursor, raws),) = await self._registry.send(
                ("HSCAN", self._table, cursor, "COUNT", _SLICE)
            )
            names = self._registry.names_in(raws)
            yield {name: bytes(raws[raw]) for name, raw in names.items()}
            if not int(cursor):
                return

    async def put(self, changes: Sequence[Change], until_ms: int = 0) -> bool:
        """Write records; all of up to 256 or none.

        ``until_ms``: time of Redis' clock after which nothing is written, so that a delayed call
        has no effect; 0: none.

        Returns:
            False if a value is not the expected one: another router has changed it.

        Raises:
            RegistryUnavailableError: Redis did not answer, or received the call too late.
        """
        for at in range(0, len(changes), _SLICE):
            arguments: list[str | bytes] = []
            for expected, record in changes[at : at + _SLICE]:
                arguments += (record.id, expected, msgspec.json.encode(record))
            tables = (self._table, self._mark, self._log)
            call = ("EVAL", _SWAP, len(tables), *tables, secrets.token_hex(8), until_ms, *arguments)
            (done,) = await self._registry.send(call)
            if done < 0:
                raise RegistryUnavailableError("Redis: the call came too late")
            if not done:
                return False
        return True

    async def drop(self, ids: Collection[str]) -> None:
        """Remove records and their days of use."""
        await self._registry.send(
            ("HDEL", self._table, *ids),
            ("HDEL", self._used, *ids),
            ("SET", self._mark, secrets.token_hex(8)),
            atomic=True,
        )

    async def used(self) -> dict[str, int]:
        """Return the last day of use by id."""
        (raw_days,) = await self._registry.send(("HGETALL", self._used))
        names = self._registry.names_in(raw_days)
        return {name: int(raw_days[raw]) for name, raw in names.items() if raw_days[raw].isdigit()}

    async def note_used(self, days: Mapping[str, int]) -> None:
        """Write the last day of use of some keys."""
        fields = [part for key_id, day in days.items() for part in (key_id, day)]
        await self._registry.send(("HSET", self._used, *fields))

    def skip(self, key_id: str, reason: str) -> None:
        """Log an unreadable record, once per id and reason."""
        self._registry.skip(f"key {key_id}", reason)
