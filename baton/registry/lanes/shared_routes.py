"""Table of routes in Redis, which routers replace as a whole.

    routes    hash: version, table (JSON: name -> route)

A newer version replaces an older one. Redis may lose the table: each router has a copy and writes
it again.
"""

import msgspec

from baton.registry.redis_store import Registry
from baton.types.routes import NameRoute, RouteTable

# KEYS: table. ARGV: version that the router has. Returns the version, Redis' time in ms, and the
# table if its version is another.
_READ = """
local version = redis.call('HGET', KEYS[1], 'version') or '0'
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
if version == ARGV[1] then return {version, now} end
return {version, now, redis.call('HGET', KEYS[1], 'table') or '{}'}
"""

# KEYS: table. ARGV: expected version, new version, new table.
_SWAP = """
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'table', ARGV[3])
return 1
"""


class SharedRoutes:
    """Table in Redis. Every call may raise the registry's ``RegistryUnavailableError``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._key = registry.key("routes")

    async def read(self, known: RouteTable) -> tuple[RouteTable | None, int]:
        """Return the table, and Redis' time in ms; ``known`` if it is the same.

        An unreadable table is logged, and None.
        """
        call = ("EVAL", _READ, 1, self._key, str(known.version))
        ((version, now_ms, *raw),) = await self._registry.send(call)
        if not raw:
            return known, int(now_ms)
        try:
            names = msgspec.json.decode(raw[0], type=dict[str, NameRoute])
            return RouteTable(int(version), names), int(now_ms)
        except (msgspec.DecodeError, ValueError) as error:
            self._registry.skip("routes", str(error))
            return None, int(now_ms)

    async def swap(self, expected_version: int, table: RouteTable) -> bool:
        """Replace the table; False if its version is not the expected one."""
        raw = msgspec.json.encode(table.names)
        call = ("EVAL", _SWAP, 1, self._key, str(expected_version), str(table.version), raw)
        (done,) = await self._registry.send(call)
        return bool(done)
