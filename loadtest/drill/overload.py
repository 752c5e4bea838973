"""Overload of a fleet with latency limits (``slo``): the load, and its judgement (no I/O).

    1.0 × the rate that the fleet holds ─▶ 1.5 × ─▶ 3 × ─▶ 1.0 × again

- goodput: under overload, good responses per second are at least 0.9 of those at 1.0 ×
- what the fleet admits is good: at least 95 % of the requests that were not refused
- refusals are 429 with ``Retry-After``; no request fails otherwise
- recovery: time from the end of the overload until as many responses are good as before it
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from loadtest.client.records import CallRecord
from loadtest.drill.phases import (
    GoodLimits,
    LoadPhase,
    PhaseFigures,
    figures_of,
    is_refused,
    phases_of,
)
from loadtest.drill.verdict import (
    DrillOutcome,
    DrillRun,
    ShownWorker,
    left_behind,
    shortened,
    wrong_ends,
    wrong_tokens,
)
from loadtest.metrics.summary import error_name

HOLDS_SHARE = 0.9
"""Share of good responses at 1.0 ×, below which the overload is not judged."""

KEPT_GOODPUT = 0.9
GOOD_OF_ADMITTED = 0.95
RECOVERY_LIMIT_S = 10.0
_NORMAL = 0.9  # of the good share at 1.0 ×
_BASE_S = 40.0
_OVERLOADS = ((1.5, 40.0), (3.0, 30.0))
_AFTER_S = 30.0
_STEP_S = 0.5


def overload_phases(rate: float) -> list[LoadPhase]:
    """Return the phases for a fleet that holds this rate in requests per second."""
    overloads = [(f"{factor:g} x", factor * rate, seconds) for factor, seconds in _OVERLOADS]
    return phases_of([("1.0 x", rate, _BASE_S), *overloads, ("after", rate, _AFTER_S)])


def judge_overload(
    load: DrillRun,
    phases: Sequence[LoadPhase],
    limits: GoodLimits,
    *,
    probes: Sequence[CallRecord],
    golden: Mapping[int, str],
    workers: Sequence[ShownWorker],
) -> DrillOutcome:
    """Judge the load of `overload_phases`.

    ``probes`` requested the ``golden`` responses after the load. ``workers`` is the state of the
    fleet some seconds after the last request.
    """
    records = load.records
    figures = [figures_of(phase, records, limits) for phase in phases]
    base, *overloads, _ = figures
    recovered_s = recovery_s(phases[-1], records, limits, base.good_share)
    faults = [
        *(fault for overload in overloads for fault in _overload_faults(overload, base)),
        *wrong_ends(load.planned, records, may_fail=True),
        *_wrong_refusals(records),
        *wrong_tokens(probes, golden),
        *wrong_ends([probe.index for probe in probes], probes, may_fail=True),
        *left_behind(workers),
    ]
    if recovered_s is None or recovered_s > RECOVERY_LIMIT_S:
        when = "never" if recovered_s is None else f"after {recovered_s:.1f} s"
        faults.append(f"service was normal again {when}, limit {RECOVERY_LIMIT_S:g} s")
    return DrillOutcome(
        drill="overload",
        what_was_done=f"{' and '.join(p.name for p in overloads)} {base.rate:.2f} requests/s",
        requests=len(load.planned),
        ends=dict(Counter(record.end for record in records)),
        errors=dict(Counter(error_name(r) for r in records if r.end != "ok")),
        compared=sum(bool(probe.answer) for probe in probes),
        recovered_s=recovered_s,
        faults=faults,
        phases=figures,
    )


def recovery_s(
    after: LoadPhase, records: Sequence[CallRecord], limits: GoodLimits, good_share: float
) -> float | None:
    """Return the time from the end of an overload until service is normal; None if never.

    It is normal from the moment when the requests of the rest of the phase, and those of the next
    10 s, are good in nearly the share ``good_share`` that was good before.
    """
    moment_s = after.begin_s
    while moment_s <= after.end_s - RECOVERY_LIMIT_S:
        spans = [(moment_s, after.end_s), (moment_s, moment_s + RECOVERY_LIMIT_S)]
        parts = [
            figures_of(LoadPhase(name="", rate=after.rate, begin_s=a, end_s=b), records, limits)
            for a, b in spans
        ]
        if all(part.sent and part.good_share >= _NORMAL * good_share for part in parts):
            return moment_s - after.begin_s
        moment_s += _STEP_S
    return None


def _overload_faults(overload: PhaseFigures, base: PhaseFigures) -> list[str]:
    faults = []
    kept = overload.good_per_s / max(base.good_per_s, 1e-9)
    if kept < KEPT_GOODPUT:
        faults.append(
            f"{overload.name}: {overload.good_per_s:.2f} good responses/s are {kept:.2f} of those "
            f"at 1.0 x, limit {KEPT_GOODPUT:g}"
        )
    if overload.good_of_admitted < GOOD_OF_ADMITTED:
        faults.append(
            f"{overload.name}: {100 * overload.good_of_admitted:.1f} % of the admitted requests "
            f"were good, limit {100 * GOOD_OF_ADMITTED:g} %"
        )
    return faults


def _wrong_refusals(records: Sequence[CallRecord]) -> list[str]:
    """Return failures other than 429, and refusals without a time to come again."""
    other = [
        f"#{record.index} got {record.status}: {record.detail}"
        for record in records
        if record.end == "http_error" and not is_refused(record)
    ]
    silent = [
        f"#{record.index} has {record.retry_after!r}"
        for record in records
        if is_refused(record) and not (record.retry_after.isdigit() and int(record.retry_after))
    ]
    return [
        *shortened("not refused but failed", other),
        *shortened("429 without Retry-After in seconds", silent),
    ]
