"""Responses that clients asked to store: in Redis, for a limited time and within size limits.

    responses:<tenant> <id>    one response                                        its time
    responses:of:<tenant>      sorted set: a tenant's responses, by last use       the same
    responses:all              sorted set: all responses, by last use              the same
    responses:sizes            hash: bytes of each response                        the same
    responses:totals           hash: bytes of each tenant, and of all              the same

Beyond a tenant's limit its least recently used responses are removed, then those of all tenants
beyond theirs. One script does it, so that concurrent routers agree on the sums. A key contains the
tenant's name, so a tenant cannot read another tenant's response.

A full Redis may evict any of these keys. A missing size is measured again, and a sum without
responses is reset.
"""

import re
from dataclasses import dataclass

from baton.registry.redis_store import Registry

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SCANNED = 1000  # keys of Redis in one call

# KEYS: the prefix. ARGV: verb, tenant, id, time to live in ms, that of this tenant, which is not
# longer, and for `put` the value, the tenant's limit and the limit of all. The script uses Redis'
# own clock, so that a host with a wrong clock does no harm. A tenant's name contains no space and
# no colon.
_SCRIPT = """
local prefix, verb, tenant, ttl = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[4])
local own = tonumber(ARGV[5])
local list = prefix .. 'of:' .. tenant
local member = tenant .. ' ' .. ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all, sizes, totals = prefix .. 'all', prefix .. 'sizes', prefix .. 'totals'

local function drop(gone)
  local owner = string.match(gone, '^[^ ]+')
  local size = tonumber(redis.call('HGET', sizes, gone) or redis.call('STRLEN', prefix .. gone))
  redis.call('UNLINK', prefix .. gone)
  redis.call('HDEL', sizes, gone)
  redis.call('ZREM', prefix .. 'of:' .. owner, gone)
  redis.call('HINCRBY', totals, '', 0 - size)
  if redis.call('HINCRBY', totals, owner, 0 - size) <= 0 then redis.call('HDEL', totals, owner) end
  return redis.call('ZREM', all, gone)
end

local function shrink(list, name, limit)
  while tonumber(redis.call('HGET', totals, name) or '0') > limit do
    local oldest = redis.call('ZRANGE', list, 0, 0)[1]
    if not oldest then
      redis.call('HDEL', totals, name)
      break
    end
    drop(oldest)
  end
end

local function touch()
  redis.call('ZADD', all, now, member)
  redis.call('ZADD', list, now, member)
  for _, key in ipairs({all, sizes, totals, list}) do
    redis.call('PEXPIRE', key, ttl)
  end
end

for _, gone in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', now - ttl)) do drop(gone) end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', list, '-inf', now - own)) do drop(gone) end
if verb == 'shorten' then
  for _, kept in ipairs(redis.call('ZRANGE', list, 0, -1)) do
    local left = redis.call('ZSCORE', list, kept) + own - now
    if left < redis.call('PTTL', prefix .. kept) then
      redis.call('PEXPIRE', prefix .. kept, left)
    end
  end
  return 1
end
if verb == 'delete' then
  return drop(member)
end
if verb == 'get' then
  local value = redis.call('GET', prefix .. member)
  if value then
    redis.call('PEXPIRE', prefix .. member, own)
    touch()
  end
  return value
end
local value = ARGV[6]
redis.call('SET', prefix .. member, value, 'PX', own)
redis.call('HSET', sizes, member, #value)
redis.call('HINCRBY', totals, '', #value)
redis.call('HINCRBY', totals, tenant, #value)
touch()
shrink(list, tenant, tonumber(ARGV[7]))
shrink(all, '', tonumber(ARGV[8]))
return 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Time that responses are kept after their last use, and size limits."""

    keep_s: float
    tenant_bytes: int
    total_bytes: int


class StoredResponses:
    """Responses by tenant and id. Every call may raise ``RegistryUnavailableError``."""

    def __init__(self, registry: Registry, limits: StoreLimits) -> None:
        self._registry = registry
        self._limits = limits

    async def put(self, tenant: str, name: str, value: bytes, keep_s: float | None = None) -> None:
        """Store a response under a new id, for ``keep_s`` if that is shorter than the limit."""
        more = (value, self._limits.tenant_bytes, self._limits.total_bytes)
        await self._run("put", tenant, name, *more, keep_s=keep_s)

    async def get(self, tenant: str, name: str, keep_s: float | None = None) -> bytes | None:
        """Return a tenant's response, if it exists, and restart its time to live."""
        if _ID.fullmatch(name) is None:
            return None
        value = await self._run("get", tenant, name, keep_s=keep_s)
        return value if isinstance(value, bytes) else None

    async def delete(self, tenant: str, name: str) -> bool:
        """Delete a response. Returns whether it existed."""
        return _ID.fullmatch(name) is not None and bool(await self._run("delete", tenant, name))

    async def shorten(self, tenant: str, keep_s: float) -> None:
        """Keep the present responses of a tenant for at most ``keep_s`` after their last use."""
        await self._run("shorten", tenant, "", keep_s=keep_s)

    async def delete_all(self, tenant: str) -> int:
        """Delete all responses of a tenant, and return their number."""
        prefix = self._registry.key("responses", f"{tenant} ")
        count = 0
        cursor = b"0"
        while True:
            call = ("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", _SCANNED)
            ((cursor, keys),) = await self._registry.send(call)
            for key in keys:
                count += bool(await self._run("delete", tenant, key.decode()[len(prefix) :]))
            if int(cursor) == 0:
                return count

    async def _run(
        self, verb: str, tenant: str, name: str, *more: bytes | int, keep_s: float | None = None
    ) -> object:
        prefix = self._registry.key("responses", "")
        ttl_ms = int(self._limits.keep_s * 1000)
        own_ms = ttl_ms if keep_s is None else min(ttl_ms, int(keep_s * 1000))
        call = ("EVAL", _SCRIPT, 1, prefix, verb, tenant, name, ttl_ms, own_ms, *more)
        (answer,) = await self._registry.send(call)
        return answer
