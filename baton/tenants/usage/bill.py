"""Sums of usage with their costs. Pure.

    time of all workers × price = Σ lines = Σ tenants' lines + idle line

The idle line has the time that no request was charged: waiting, probes, and work whose router or
worker died. Requests are charged when they end, so the idle time of one hour may be below 0.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from baton.tenants.usage.ledger import HOUR_S, WORKERS, Counters, RowName
from baton.tenants.usage.shared import HourUsage

IDLE = "(idle)"
"""Name in place of a tenant in lines of the time that no request was charged."""
GROUPS = ("hour", "tenant", "key", "model")
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_LineName = tuple[int | str | None, ...]  # a value for each of GROUPS; the idle line has two


class Line(msgspec.Struct, kw_only=True):
    """Sum of rows, with costs in the currency of the price.

    Attributes:
        hour: Start of the hour in Unix seconds; None if not grouped by it, as for the other names.
        input_worker_s: Worker time of prompts.
        output_worker_s: Worker time of generated tokens.
        cost_per_1000_computed: Cost of 1,000 prompt tokens that were not cached.
        cost_per_1000_input: Cost of 1,000 prompt tokens, those from caches included.
        cost_per_1000_output: Cost of 1,000 generated tokens.
    """

    hour: int | None = None
    tenant: str | None = None
    key: str | None = None
    model: str | None = None
    requests: int = 0
    refusals: dict[str, int] = {}
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    input_worker_s: float = 0.0
    output_worker_s: float = 0.0
    worker_s: float = 0.0
    cost: float = 0.0
    cost_per_1000_computed: float | None = None
    cost_per_1000_input: float | None = None
    cost_per_1000_output: float | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of one worker for one hour, in a fleet with several models.

    Attributes:
        lanes: Price of the workers of each lane.
        models: Price of the workers of each model and adapter.
    """

    lanes: Mapping[str, float] = field(default_factory=dict)
    models: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: RowName, otherwise: float) -> float:
        """Return the price of a row; ``otherwise`` if its lane has none."""
        if name.tenant == WORKERS:
            return self.lanes.get(name.key, otherwise)
        return self.models.get(name.model, otherwise)


class _Sum:
    """Counters of a line, and the costs of its hours, whose prices may differ."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.input_cost = 0.0
        self.output_cost = 0.0
        self.idle_cost = 0.0

    def add(self, counters: Counters, price_per_ns: float) -> None:
        self.counters.add(counters)
        self.input_cost += counters.input_ns * price_per_ns
        self.output_cost += counters.output_ns * price_per_ns
        self.idle_cost += counters.worker_ns * price_per_ns


def bill(
    hours: Iterable[HourUsage],
    by: Collection[str],
    price_per_hour: float,
    tenant: str | None = None,
    prices: Prices = Prices(),
) -> list[Line]:
    """Return the sums of usage, sorted by name, with the idle line last.

    ``by``: those of `GROUPS` that name a line. ``price_per_hour``: price in hours without one.
    ``tenant``: tenant whose usage is wanted; None: all, with the idle line. ``prices``: present
    prices of several models, which count for all hours.
    """
    sums: dict[_LineName, _Sum] = {}
    for hour in hours:
        price = price_per_hour if hour.price_per_hour is None else hour.price_per_hour
        idle: dict[float, Counters] = {}  # by price
        for name, counters in hour.rows.items():
            price_per_ns = prices.of(name, price) / (HOUR_S * 1e9)
            unused = idle.setdefault(price_per_ns, Counters())
            if name.tenant == WORKERS:
                unused.worker_ns += counters.worker_ns
                continue
            unused.worker_ns -= counters.charged_ns
            if tenant in (None, name.tenant):
                sums.setdefault(_line_name(name, by), _Sum()).add(counters, price_per_ns)
        if tenant is None and any(unused.worker_ns for unused in idle.values()):
            name = RowName(hour.hour, IDLE, "", "")
            line = sums.setdefault((*_line_name(name, by)[:1], IDLE), _Sum())
            for price_per_ns, unused in idle.items():
                line.add(unused, price_per_ns)
    return [_line(name, sums[name]) for name in sorted(sums, key=_order)]


def worker_seconds(hours: Iterable[HourUsage]) -> dict[str, float]:
    """Return the time that workers existed, by role."""
    times_ns: dict[str, int] = {}
    for hour in hours:
        for name, counters in hour.rows.items():
            if name.tenant == WORKERS:
                times_ns[name.model] = times_ns.get(name.model, 0) + counters.worker_ns
    return {role: times_ns[role] / 1e9 for role in sorted(times_ns)}


def _line_name(name: RowName, by: Collection[str]) -> _LineName:
    return (
        name.hour * HOUR_S if "hour" in by else None,
        name.tenant if "tenant" in by else None,
        name.key if "key" in by else None,
        name.model if "model" in by else None,
    )


def _order(name: _LineName) -> tuple[int, bool, str]:
    hour = name[0]
    is_idle = len(name) < len(GROUPS)
    rest = "\0".join(str(part or "") for part in name[1:])
    return (hour if isinstance(hour, int) else 0, is_idle, rest)


def _line(name: _LineName, total: _Sum) -> Line:
    counters = total.counters
    line = msgspec.convert(dict(zip(GROUPS, name, strict=False)), Line)
    for counter in ("requests", "refusals", *_TOKENS):
        setattr(line, counter, getattr(counters, counter))
    line.input_worker_s = counters.input_ns / 1e9
    line.output_worker_s = counters.output_ns / 1e9
    line.worker_s = (counters.charged_ns + counters.worker_ns) / 1e9
    line.cost = total.input_cost + total.output_cost + total.idle_cost
    computed_tokens = counters.input_tokens - counters.cached_tokens
    line.cost_per_1000_computed = _per_1000(total.input_cost, computed_tokens)
    line.cost_per_1000_input = _per_1000(total.input_cost, counters.input_tokens)
    line.cost_per_1000_output = _per_1000(total.output_cost, counters.output_tokens)
    return line


def _per_1000(cost: float, tokens: int) -> float | None:
    return cost / tokens * 1000 if tokens else None
