"""Evidence about canaries in Redis, which all routers add to.

gate:<start in ms>:<name>           hash: sums of all routers, and the last golden round
gate:<start in ms>:<name>:runner    router that runs the golden prompts; lapses in 3 s
"""

from typing import NamedTuple

import msgspec

from baton.registry.redis_store import Registry
from baton.types.gates import Evidence, GoldenRound, Tally

_KEPT_MS = 24 * 3600 * 1000
_LEASE_MS = 3000
_COUNTS = ("requests", "errors", "same", "different")

# KEYS: sums, runner. ARGV: router, lease in ms, life of the key in ms, number of the evidence, then
# fields and increments. Redis may receive evidence again, if it did not answer in time.
_EXCHANGE = """
local seen = 'seen.' .. ARGV[1]
if tonumber(redis.call('HGET', KEYS[1], seen) or '0') < tonumber(ARGV[4]) then
    redis.call('HSET', KEYS[1], seen, ARGV[4])
    for i = 5, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if (redis.call('GET', KEYS[2]) or ARGV[1]) == ARGV[1] then
    redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
end
return {redis.call('GET', KEYS[2]), redis.call('HGETALL', KEYS[1])}
"""


class GateSums(NamedTuple):
    """State of a gate in Redis.

    Attributes:
        evidence: Sums of all routers.
        is_runner: Whether the caller runs the golden prompts.
        last_round: Last round of golden prompts; None before the first.
    """

    evidence: Evidence
    is_runner: bool
    last_round: GoldenRound | None


class SharedGates:
    """Evidence in Redis. Every call may raise the registry's ``RegistryUnavailableError``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def exchange(
        self, router_id: str, name: str, since_ms: int, fresh: Evidence, number: int
    ) -> GateSums:
        """Add evidence about a canary, and return the sums of all routers.

        Evidence with a number that Redis has already received from this router is not added again.
        """
        key = self._key(name, since_ms)
        added: list[object] = []
        for side, tally in (("canary", fresh.canary), ("stable", fresh.stable)):
            for field, count in _fields(side, tally).items():
                added += [field, count]
        keys = (key, key + b":runner")
        call = ("EVAL", _EXCHANGE, 2, *keys, router_id, _LEASE_MS, _KEPT_MS, number, *added)
        ((runner, flat),) = await self._registry.send(call)
        raw = {bytes(flat[i]): bytes(flat[i + 1]) for i in range(0, len(flat), 2)}
        golden = raw.pop(b"round", None)
        last_round = self._registry.decoded("gate", golden, GoldenRound, msgspec.json.decode)
        return GateSums(_evidence(raw), bytes(runner) == router_id.encode(), last_round)

    async def put_round(self, name: str, since_ms: int, golden: GoldenRound) -> None:
        """Write the last round of golden prompts."""
        key = self._key(name, since_ms)
        raw = msgspec.json.encode(golden)
        await self._registry.send(("HSET", key, "round", raw), ("PEXPIRE", key, _KEPT_MS))

    def _key(self, name: str, since_ms: int) -> bytes:
        return self._registry.key(f"gate:{since_ms}:{name}")


def _fields(side: str, tally: Tally) -> dict[str, int]:
    counts = {f"{side}.{kind}": getattr(tally, kind) for kind in _COUNTS}
    counts |= {f"{side}.ttft.{bucket}": count for bucket, count in tally.ttft.items()}
    counts |= {f"{side}.itl.{bucket}": count for bucket, count in tally.itl.items()}
    return {field: count for field, count in counts.items() if count}


def _evidence(raw: dict[bytes, bytes]) -> Evidence:
    evidence = Evidence()
    for field, value in raw.items():
        side, kind, *bucket = field.decode().split(".")
        if side == "seen":
            continue
        tally = evidence.canary if side == "canary" else evidence.stable
        if kind in _COUNTS:
            setattr(tally, kind, int(value))
        else:
            (tally.ttft if kind == "ttft" else tally.itl)[int(bucket[0])] = int(value)
    return evidence
