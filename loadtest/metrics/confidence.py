"""Confidence interval of a figure that was measured a few times."""

import math
from collections.abc import Sequence
from typing import NamedTuple

# Two-sided 95 % quantiles of Student's t by degrees of freedom; three seeds have two.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_T95_LARGE = 1.960


class Interval(NamedTuple):
    """Mean with its 95 % confidence interval, which is infinitely wide for one value."""

    mean: float
    half_width: float
    runs: int


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent measurements, one per seed, with Student's interval."""
    if not values:
        raise ValueError("no values: a confidence interval needs at least one")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, math.inf, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    t = _T95[count - 2] if count - 2 < len(_T95) else _T95_LARGE
    return Interval(mean, t * math.sqrt(variance / count), count)
