"""Table in Redis that routers replace as a whole.

    NAME    hash: version, and each part of the table as JSON

A newer version replaces an older one. Redis may lose the table: each router has a copy and writes
it again.
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from baton.registry.redis_store import Registry
from baton.types.routes import RouteTable
from baton.types.versioned import Versioned

# KEYS: table. ARGV: version that the router has, parts. Returns the version, Redis' time in ms,
# and the parts if the version is another.
_READ = """
local version = redis.call('HGET', KEYS[1], 'version') or '0'
local time = redis.call('TIME')
local answer = {version, string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))}
if version == ARGV[1] then return answer end
for i = 2, #ARGV do answer[#answer + 1] = redis.call('HGET', KEYS[1], ARGV[i]) or '' end
return answer
"""

# KEYS: table. ARGV: expected version, new version, names and values of the parts.
_SWAP = """
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[2])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""


TableT = TypeVar("TableT", bound=Versioned)


class VersionedTable(Generic[TableT]):
    """Table in Redis. Every call may raise the registry's ``RegistryUnavailableError``.

    Args:
        kind: Structure of the table; its ``version`` is the time of the change in ms, or 0.
        parts: Name of each part in Redis, and the attribute with its value.
    """

    def __init__(
        self, registry: Registry, name: str, kind: type[TableT], parts: Mapping[str, str]
    ) -> None:
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        self._registry = registry
        self._name = name
        self._key = registry.key(name)
        self._kind = kind
        self._parts = [(part, attribute, types[attribute]) for part, attribute in parts.items()]

    async def read(self, known: TableT) -> tuple[TableT | None, int]:
        """Return the table, and Redis' time in ms; ``known`` if it is the same.

        An unreadable table is logged, and None.
        """
        names = (part for part, _, _ in self._parts)
        call = ("EVAL", _READ, 1, self._key, str(known.version), *names)
        ((version, now_ms, *raw),) = await self._registry.send(call)
        if not raw:
            return known, int(now_ms)
        try:
            made: dict[str, Any] = {
                attribute: msgspec.json.decode(value, type=type_)
                for (_, attribute, type_), value in zip(self._parts, raw, strict=True)
                if value
            }
            return self._kind(version=int(version), **made), int(now_ms)
        except (msgspec.DecodeError, ValueError) as error:
            self._registry.skip(self._name, str(error))
            return None, int(now_ms)

    async def swap(self, expected_version: int, table: TableT) -> bool:
        """Replace the table; False if its version is not the expected one."""
        values: list[object] = []
        for part, attribute, _ in self._parts:
            values += [part, msgspec.json.encode(getattr(table, attribute))]
        call = ("EVAL", _SWAP, 1, self._key, str(expected_version), str(table.version), *values)
        (done,) = await self._registry.send(call)
        return bool(done)

    def decoded(self, raw: bytes) -> TableT:
        """Decode a copy on disk.

        Raises:
            msgspec.DecodeError: It is not one.
        """
        return msgspec.json.decode(raw, type=self._kind)


class SharedRoutes(VersionedTable[RouteTable]):
    """Key ``routes``: the routes of names, and the golden prompts of models."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry, "routes", RouteTable, {"table": "names", "golden": "golden"})
