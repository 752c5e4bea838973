"""Usage of all tenants in Redis.

    usage:hours:HOUR   hash: (life, tenant, key, model) -> counters; price -> price   100 days
    usage:life:LIFE    sequence of the last applied report                            4 days

A tenant's rows are found by the second part of the field. A row is the sum of its fields.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from baton.registry.redis_store import Registry
from baton.registry.worker_blocks import slices
from baton.tenants.usage.ledger import Counters, RowName, UsageReport, field_of, summed

KEPT_DAYS = 100
"""Days for which usage is kept."""
_DAY_MS = 24 * 3600 * 1000
_LIFE_TTL_MS = 4 * _DAY_MS  # longer than a ledger repeats its rows
_PRICE = b"price"

# KEYS: sequence of the life, then the hours. ARGV: sequence, least known sequence, time to live of
# the sequence and of hours in ms, price, then rows as (index of the hour in KEYS, field, counters).
# Returns the sequence that was known before.
_APPLY = """
local known = tonumber(redis.call('GET', KEYS[1]) or '0')
if known < tonumber(ARGV[2]) or known >= tonumber(ARGV[1]) then return known end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
for at = 6, #ARGV, 3 do
  redis.call('HSET', KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2])
end
for at = 2, #KEYS do
  if ARGV[5] ~= '' then redis.call('HSET', KEYS[at], 'price', ARGV[5]) end
  redis.call('PEXPIRE', KEYS[at], ARGV[4])
end
return known
"""

# KEYS: the hour. ARGV: fields as (field, expected value, new value).
_RESTORE = """
for at = 1, #ARGV, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[at]) or '') == ARGV[at + 1] then
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 2])
  end
end
"""


class HourUsage(NamedTuple):
    """Usage of one hour.

    Attributes:
        hour: Unix time in hours.
        price_per_hour: Price of one worker for one hour; None: no router reported one.
        rows: Rows of all processes together.
    """

    hour: int
    price_per_hour: float | None
    rows: dict[RowName, Counters]


class SharedUsage:
    """Usage in Redis. Every call may raise ``RegistryUnavailableError``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def apply(self, report: UsageReport, price_per_hour: float | None = None) -> int:
        """Write the rows of a report that is new, and return the sequence known before.

        Args:
            report: Report, which has no effect if a later one was applied, or if Redis does not
                know ``report.acknowledged``.
            price_per_hour: Price for the hours of the rows; None: leave it unchanged.
        """
        key = self._registry.key
        hours = sorted({name.hour for name in report.rows})
        places = {hour: index for index, hour in enumerate(hours, 2)}  # KEYS[1] is the life's
        arguments: list[bytes | int | str] = []
        for name, counters in report.rows.items():
            field = field_of(report.life, name)
            arguments += (places[name.hour], field, msgspec.json.encode(counters))
        keys = [key("usage:life", report.life)]
        keys += [key("usage:hours", str(hour)) for hour in hours]
        price = "" if price_per_hour is None else repr(price_per_hour)
        head = (report.sequence, report.acknowledged, _LIFE_TTL_MS, KEPT_DAYS * _DAY_MS, price)
        (known,) = await self._registry.send(("EVAL", _APPLY, len(keys), *keys, *head, *arguments))
        return int(known)

    async def read(self, hours: Iterable[int]) -> list[HourUsage]:
        """Return the usage of hours, in this order; unreadable rows are logged and left out."""
        usage = []
        for part in slices(list(hours)):
            calls = [("HGETALL", self._registry.key("usage:hours", str(hour))) for hour in part]
            answers = await self._registry.send(*calls)
            for hour, fields in zip(part, answers, strict=True):
                price = fields.pop(_PRICE, None)
                rows = [row for item in fields.items() if (row := self._decoded(hour, *item))]
                usage.append(
                    HourUsage(
                        hour,
                        None if price is None else float(price),
                        summed(rows, lambda name: name),
                    )
                )
        return usage

    async def fields(self, hour: int) -> dict[str, str]:
        """Return all fields of an hour as text, for a copy."""
        (raws,) = await self._registry.send(
            ("HGETALL", self._registry.key("usage:hours", str(hour)))
        )
        return {
            name.decode(errors="replace"): value.decode(errors="replace")
            for name, value in raws.items()
        }

    async def restore(self, hour: int, fields: Mapping[str, tuple[str, str]]) -> None:
        """Write fields of a copy, each with the value that it replaces; empty: there is none."""
        arguments = [part for name, values in fields.items() for part in (name, *values)]
        key = self._registry.key("usage:hours", str(hour))
        await self._registry.send(
            ("EVAL", _RESTORE, 1, key, *arguments), ("PEXPIRE", key, KEPT_DAYS * _DAY_MS)
        )

    def _decoded(self, hour: int, field: bytes, value: bytes) -> tuple[RowName, Counters] | None:
        try:
            _, tenant, key, model = msgspec.json.decode(field, type=tuple[str, str, str, str])
            counters = msgspec.json.decode(value, type=Counters)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._registry.skip(f"usage of hour {hour}", str(error))
            return None
        return RowName(hour, tenant, key, model), counters
