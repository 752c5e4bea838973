"""Limits of tenants in Redis: the bank of each tenant, from which routers lease parts.

    quotas:TENANT    leases, and use of the last minute, day and month   33 days

One script answers the exchanges of ``bank.py``, by Redis' clock. Redis may lose the key: each
router then reports its use again.
"""

from collections.abc import Mapping

import msgspec

from baton.registry.redis_store import Registry
from baton.tenants.bank import CONCURRENT_RETRY_MS, SILENT_MS, SLACK_MS, Ask, Grant

_TTL_MS = 33 * 24 * 3600 * 1000

# KEYS: the bank. ARGV: ask as JSON, time to live in ms, and, for tests, a clock in ms. A bank's
# time does not follow steps of the clock.
_SCRIPT = """
local ask, clock = cjson.decode(ARGV[1]), tonumber(ARGV[3])
if not clock then
  local time = redis.call('TIME')
  clock = time[1] * 1000 + math.floor(time[2] / 1000)
end
local raw = redis.call('GET', KEYS[1])
local bank = raw and cmsgpack.unpack(raw) or {now = clock, clock = clock, routers = {}}
local mine = bank.routers[ask.router]
local passed = math.max(clock - bank.clock, 0)
if mine then passed = math.min(passed, ask.elapsed_ms + SLACK_MS) end
bank.now = bank.now + passed
bank.clock = clock
local now = bank.now

for name, router in pairs(bank.routers) do
  if router.seen + (router.silent or SILENT_MS) < now then
    local busy = false
    for _, account in pairs(router.accounts) do
      account.ceiling = account.spent
      account.used[0] = nil
      busy = busy or next(account.used) ~= nil
    end
    if not busy then bank.routers[name] = nil end
  end
end
mine = bank.routers[ask.router]

-- Calls visit(slot, amount) for all use that counts, and forgets the rest.
local function each_used(name, need, visit)
  local oldest = need.slots > 0 and math.floor(now / need.slot_ms) - need.slots + 1 or 0
  for _, router in pairs(bank.routers) do
    local account = router.accounts[name]
    if account then
      for slot, amount in pairs(account.used) do
        if slot < oldest then account.used[slot] = nil else visit(slot, amount) end
      end
    end
  end
end

local function wait_of(name, missing, need)
  if need.slots == 0 then return CONCURRENT_RETRY_MS end
  local used, order = {}, {}
  each_used(name, need, function(slot, amount)
    if not used[slot] then order[#order + 1] = slot end
    used[slot] = (used[slot] or 0) + amount
  end)
  table.sort(order)
  local wait = SILENT_MS
  for _, slot in ipairs(order) do
    if missing <= 0 then break end
    missing = missing - used[slot]
    wait = math.max((slot + need.slots) * need.slot_ms - now, 1)
  end
  return wait
end

local function granted(name, need)
  local account = mine.accounts[name] or {spent = 0, ceiling = 0, used = {}}
  mine.accounts[name] = account
  account.spent = need.spent_total
  account.ceiling = math.max(account.ceiling, account.spent)
  for slot, amount in pairs(need.used) do account.used[tonumber(slot)] = amount end
  local lower = math.max(math.min(account.ceiling, need.ceiling), account.spent)
  account.ceiling = lower
  local left, last, elsewhere = need.limit, 0, 0
  each_used(name, need, function(slot, amount)
    left = left - amount
    if amount > 0 and slot > last then last = slot end
  end)
  for _, router in pairs(bank.routers) do
    local lease = router.accounts[name]
    if lease then left = left - (lease.ceiling - lease.spent) end
    if lease and lease ~= account then elsewhere = elsewhere + lease.ceiling - lease.spent end
  end
  local more = math.max(math.min(need.ceiling - lower, left), 0)
  account.ceiling = account.ceiling + more
  left = left - more
  local wait, reset = 0, 0
  if need.ceiling > account.ceiling then
    wait = wait_of(name, need.ceiling - account.ceiling - left - elsewhere, need)
  end
  if last > 0 then reset = math.max((last + need.slots) * need.slot_ms - now, 0) end
  return {
    ceiling = account.ceiling, left = left, wait_ms = wait, reset_ms = reset, elsewhere = elsewhere
  }
end

local answer = {sequence = ask.sequence, now_ms = now}
if not mine and not ask.whole then
  answer.unknown = true
elseif not mine or ask.sequence > mine.sequence then
  if not mine or ask.whole then
    mine = {accounts = {}}
    bank.routers[ask.router] = mine
  end
  mine.sequence = ask.sequence
  mine.seen = now
  mine.silent = ask.silent_ms
  local parts = {}
  for name, need in pairs(ask.needs) do parts[name] = granted(name, need) end
  if next(parts) then answer.parts = parts end
end
redis.call('SET', KEYS[1], cmsgpack.pack(bank), 'PX', ARGV[2])
return cjson.encode(answer)
"""

_CONSTANTS = {
    "SLACK_MS": SLACK_MS,
    "SILENT_MS": SILENT_MS,
    "CONCURRENT_RETRY_MS": CONCURRENT_RETRY_MS,
}
for _name, _value in _CONSTANTS.items():
    _SCRIPT = _SCRIPT.replace(_name, str(_value))


class SharedQuotas:
    """Banks of all tenants. Every call may raise ``RegistryUnavailableError``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def exchange(self, asks: Mapping[str, Ask], clock_ms: int = 0) -> dict[str, Grant]:
        """Exchange reports for leases, by tenant, in one round trip, also without a report.

        Args:
            asks: Reports of one router.
            clock_ms: Time in place of Redis' clock, for tests; 0: none.
        """
        if not asks:
            await self._registry.send(("TIME",))
            return {}
        calls = [
            (
                "EVAL",
                _SCRIPT,
                1,
                self._registry.key("quotas", tenant),
                msgspec.json.encode(ask),
                _TTL_MS,
                clock_ms or "",
            )
            for tenant, ask in asks.items()
        ]
        answers = await self._registry.send(*calls)
        return {
            tenant: msgspec.json.decode(answer, type=Grant)
            for tenant, answer in zip(asks, answers, strict=True)
        }

    async def forget(self, tenant: str) -> None:
        """Remove the bank of a tenant. Routers with a lease of it report their use again."""
        await self._registry.send(("DEL", self._registry.key("quotas", tenant)))
