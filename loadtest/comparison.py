"""Comparison of A and B: two runs, or one run of each per seed."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from loadtest.metrics.summary import Summary
from loadtest.results.files import Results


class Interval(NamedTuple):
    """Mean with its 95 % confidence interval, which is infinitely wide for one value."""

    mean: float
    half_width: float
    runs: int


Row = tuple[str, float | None, float | None, Interval | None]
"""(name, A's mean, B's mean, B ÷ A)"""

_RATES: dict[str, Callable[[Summary], float]] = {
    "answered requests/s": lambda s: s.requests_per_s,
    "tokens written/s": lambda s: s.answer_tokens_per_s,
    "good requests/s": lambda s: s.good_per_s,
    "good of sent": lambda s: s.attainment,
    "failed": lambda s: float(sum(n for end, n in s.ends.items() if end not in ("ok", "aborted"))),
    "cached prompt tokens": lambda s: float(s.cached_tokens),
}
# Two-sided 95 % quantiles of Student's t by degrees of freedom; three seeds have two.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_T95_LARGE = 1.960


def compare(a: Sequence[Results], b: Sequence[Results]) -> list[Row]:
    """Compare the figures of A and B.

    Runs of equal index have the same seed: quotients are computed seed by seed, so that differences
    between seeds do not widen the interval.
    """
    names = list(dict.fromkeys(n for run in (*a, *b) for n in run.summary.distributions))
    rows = [
        _row(
            f"{name} {field}",
            [_percentile(run.summary, name, field) for run in a],
            [_percentile(run.summary, name, field) for run in b],
        )
        for name in names
        for field in ("p50", "p99")
    ]
    rows += [
        _row(what, [figure(run.summary) for run in a], [figure(run.summary) for run in b])
        for what, figure in _RATES.items()
    ]
    return rows


def unlike(a: Results, b: Results) -> list[str]:
    """Return the differences between the loads of two runs, which make them less comparable."""
    pairs = {
        "engine": tuple(run.server.get("emulated", "real or unknown") for run in (a, b)),
        "workload": (a.workload, b.workload),
        "seed": (a.seed, b.seed),
        "model": (a.model, b.model),
        "SLO": (a.summary.slo.label(), b.summary.slo.label()),
        "warm-up": (a.summary.warmup_s, b.summary.warmup_s),
    }
    for key in sorted(a.parameters.keys() | b.parameters.keys()):
        pairs[key] = (a.parameters.get(key, "–"), b.parameters.get(key, "–"))
    if a.parameters == b.parameters:  # else the number follows from them
        pairs["planned requests"] = (a.planned_requests, b.planned_requests)
    return [
        f"{what}: {a_value} and {other}"
        for what, (a_value, other) in pairs.items()
        if a_value != other
    ]


def _percentile(summary: Summary, name: str, field: str) -> float | None:
    distribution = summary.distributions.get(name)
    if distribution is None:
        return None
    return distribution.p50 if field == "p50" else distribution.p99


def _row(what: str, a: Sequence[float | None], b: Sequence[float | None]) -> Row:
    ratios = [
        two / one
        for one, two in zip(a, b, strict=True)
        if one is not None and two is not None and one
    ]
    return what, _mean(a), _mean(b), interval(ratios) if ratios else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent measurements, one per seed, with Student's interval."""
    count = len(values)
    if count == 1:
        return Interval(values[0], math.inf, 1)
    t = _T95[count - 2] if count - 2 < len(_T95) else _T95_LARGE
    return Interval(fmean(values), t * stdev(values) / math.sqrt(count), count)
