"""Limits of all tenants in Redis: one table, which routers replace as a whole.

    tenants    hash: version, table (JSON: tenant -> limits), and forgotten (JSON: deletions)

A newer version replaces an older one. Redis may lose the table: each router has a copy and writes
it again.
"""

from collections.abc import Mapping

import msgspec

from baton.registry.redis_store import Registry
from baton.types.deletions import Forgotten
from baton.types.limits import Limits

MAX_TENANTS = 10_000

# KEYS: table. ARGV: version that the router has. Returns the version, Redis' time in ms, and the
# table and the deletions if its version is another.
_READ = """
local version = redis.call('HGET', KEYS[1], 'version') or '0'
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
if version == ARGV[1] then return {version, now} end
local raw = redis.call('HMGET', KEYS[1], 'table', 'forgotten')
return {version, now, raw[1] or '{}', raw[2] or '{}'}
"""

# KEYS: table. ARGV: expected version, new version, new table, deletions.
_SWAP = """
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'table', ARGV[3], 'forgotten', ARGV[4])
return 1
"""


class LimitsTable(msgspec.Struct, frozen=True):
    """Limits by tenant, and deletions.

    ``version`` is the time of the change in ms, or 0 for an empty table.
    """

    version: int = 0
    tenants: Mapping[str, Limits] = {}
    forgotten: Forgotten = Forgotten()


class SharedLimits:
    """Table in Redis. Every call may raise the registry's ``RegistryUnavailableError``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._key = registry.key("tenants")

    async def read(self, known: LimitsTable) -> tuple[LimitsTable | None, int]:
        """Return the table, and Redis' time in ms; ``known`` if it is the same.

        An unreadable table is logged, and None.
        """
        call = ("EVAL", _READ, 1, self._key, str(known.version))
        ((version, now_ms, *raw),) = await self._registry.send(call)
        if not raw:
            return known, int(now_ms)
        try:
            tenants = msgspec.json.decode(raw[0], type=dict[str, Limits])
            forgotten = msgspec.json.decode(raw[1], type=Forgotten)
            return LimitsTable(int(version), tenants, forgotten), int(now_ms)
        except (msgspec.DecodeError, ValueError) as error:
            self._registry.skip("tenants", str(error))
            return None, int(now_ms)

    async def swap(self, expected_version: int, table: LimitsTable) -> bool:
        """Replace the table; False if its version is not the expected one."""
        raw = map(msgspec.json.encode, (table.tenants, table.forgotten))
        call = ("EVAL", _SWAP, 1, self._key, str(expected_version), str(table.version), *raw)
        (done,) = await self._registry.send(call)
        return bool(done)
