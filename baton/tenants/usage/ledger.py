"""Usage that one process counts, and its reports to Redis: sans-IO.

A ledger has one row for each hour, tenant, key and model. Rows only grow, and a report has the
totals of all rows that changed since the last answer. So a lost, late or repeated report changes
nothing, and without Redis only the changed rows are kept. If Redis lost rows, the ledger reports
all rows of the last two days again.

    row ──▶ changed ──▶ report ──▶ applied: no longer changed, unless it changed since
                           └─────▶ Redis has an older sequence: all rows are changed
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

HOUR_S = 3600
KEPT_HOURS = 48
"""Hours of which a ledger can repeat its reports."""
MAX_REPORTED_ROWS = 2000
MAX_ROWS_PER_HOUR = 10_000
"""Rows of one hour, beyond which tenants are counted together as `OTHERS`."""

OTHERS = "(other)"
WORKERS = "(workers)"
"""Name in place of a tenant in rows of the time that workers exist.

The model is the role, and the key is the lane, or empty in a fleet with one model.
"""


class RowName(NamedTuple):
    """Name of a row.

    Attributes:
        hour: Unix time in hours.
        key: Id of the API key; empty if there is none.
    """

    hour: int
    tenant: str
    key: str
    model: str


class Counters(msgspec.Struct, array_like=True):
    """Counters of a row. New ones are added at the end.

    Attributes:
        requests: Calls that were answered, with those that the client left.
        input_tokens: Prompt tokens; ``cached_tokens`` of them were not computed.
        output_tokens: Generated tokens; ``reasoning_tokens`` of them are thinking.
        input_ns: Worker time of prompts.
        output_ns: Worker time of generated tokens.
        worker_ns: Time that workers existed, only in rows of `WORKERS`.
        refusals: Calls that ended with an error in place of an answer, by its code.
    """

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    input_ns: int = 0
    output_ns: int = 0
    worker_ns: int = 0
    refusals: dict[str, int] = {}

    def add(self, other: "Counters") -> None:
        """Add the counters of another row."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for code, count in other.refusals.items():
            self.refusals[code] = self.refusals.get(code, 0) + count

    @property
    def amount(self) -> int:
        """Sum of all counters, by which the later of two states of a row is known."""
        counters: list[int] = [getattr(self, name) for name in _SUMMED]
        return sum(counters) + sum(self.refusals.values())

    @property
    def charged_ns(self) -> int:
        """Worker time of the row's requests."""
        return self.input_ns + self.output_ns


_SUMMED = tuple(name for name in Counters.__struct_fields__ if name != "refusals")


class UsageReport(NamedTuple):
    """Totals of changed rows.

    Attributes:
        sequence: Number of the report in this ledger's life, from 1.
        acknowledged: Least sequence that Redis must know; 0: any.
    """

    life: str
    sequence: int
    acknowledged: int
    rows: dict[RowName, Counters]


class Ledger:
    """Usage that one life of a process counts."""

    def __init__(self, life: str) -> None:
        self.life = life
        self._rows: dict[RowName, Counters] = {}
        self._changed: dict[RowName, int] = {}  # with the last report before the change
        self._rows_per_hour: dict[int, int] = {}
        self._sequence = 0
        self._acknowledged = 0

    @property
    def unreported_rows(self) -> int:
        """Number of rows that Redis may not have."""
        return len(self._changed)

    def row(self, name: RowName) -> Counters:
        """Return a row, whose counters the caller is about to raise."""
        counters = self._rows.get(name)
        if counters is None:
            count = self._rows_per_hour.get(name.hour, 0)
            if count >= MAX_ROWS_PER_HOUR and name.tenant != OTHERS:
                return self.row(RowName(name.hour, OTHERS, "", name.model))
            self._rows_per_hour[name.hour] = count + 1
            counters = self._rows[name] = Counters()
        self._changed[name] = self._sequence
        return counters

    def report(self, hour: int, *, always: bool = False) -> UsageReport | None:
        """Return the next report, or None if nothing has changed; forget old rows.

        With ``always``, a report without rows asks whether Redis still has the others.
        """
        self._forget_before(hour - KEPT_HOURS)
        if not (self._changed or (always and self._rows)):
            return None
        self._sequence += 1
        names = list(self._changed)[:MAX_REPORTED_ROWS]
        rows = {name: self._rows[name] for name in names}
        return UsageReport(self.life, self._sequence, self._acknowledged, rows)

    def answered(self, report: UsageReport, known: int) -> bool:
        """Apply the answer to the last report; return whether another one is due at once.

        ``known``: sequence of this life that Redis knew before the report.
        """
        if known < report.acknowledged:
            self._acknowledged = 0
            self._changed = dict.fromkeys(self._rows, self._sequence)
            return True
        if known >= report.sequence:
            self._sequence = known
            return True
        self._acknowledged = report.sequence
        for name in report.rows:
            if self._changed[name] < report.sequence:
                del self._changed[name]
        return len(report.rows) == MAX_REPORTED_ROWS

    def fields(self) -> dict[int, dict[str, str]]:
        """Return all rows as fields in Redis, by hour."""
        hours: dict[int, dict[str, str]] = {}
        for name, row in self._rows.items():
            field = field_of(self.life, name).decode()
            counters = msgspec.json.encode(row).decode()
            hours.setdefault(name.hour, {})[field] = counters
        return hours

    def _forget_before(self, hour: int) -> None:
        if all(other >= hour for other in self._rows_per_hour):
            return
        old = [name for name in self._rows if name.hour < hour and name not in self._changed]
        for name in old:
            del self._rows[name]
            self._rows_per_hour[name.hour] -= 1
        self._rows_per_hour = {hour: n for hour, n in self._rows_per_hour.items() if n}


def field_of(life: str, name: RowName) -> bytes:
    """Return the field of a row of one life in the hash of its hour."""
    return msgspec.json.encode((life, name.tenant, name.key, name.model))


def summed(
    rows: Iterable[tuple[RowName, Counters]], named: Callable[[RowName], RowName]
) -> dict[RowName, Counters]:
    """Return the sums of rows that have the same name after ``named``."""
    sums: dict[RowName, Counters] = {}
    for name, counters in rows:
        sums.setdefault(named(name), Counters()).add(counters)
    return sums
