"""Arrival times of requests."""

import numpy as np
from numpy.typing import NDArray


def arrival_times_s(
    rng: np.random.Generator, count: int, rate: float, cv: float = 1.0
) -> NDArray[np.float64]:
    """Return ascending times of independent arrivals; the first is one gap after 0 s.

    Gaps are gamma distributed with mean 1 / rate. Their coefficient of variation ``cv`` is the
    burstiness: 0 even, 1 Poisson, 2 to 4 the worst of public chat traffic.

    Raises:
        ValueError: ``rate`` is not positive, or ``cv`` is negative.
    """
    if not rate > 0:
        raise ValueError(f"rate {rate:g} requests/s must be above 0")
    if not cv >= 0:
        raise ValueError(f"coefficient of variation {cv:g} must be at least 0")
    if cv == 0:
        gaps = np.full(count, 1.0 / rate)
    else:
        gaps = rng.gamma(1.0 / cv**2, cv**2 / rate, count)
    return np.cumsum(gaps)


def spread_ticks_s(
    rng: np.random.Generator, arrivals_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Spread arrivals that were recorded at one moment at random up to the next moment.

    Mooncake's conversation trace has 1,180 moments, 3 s apart, for 12,031 requests: replayed
    unchanged, ten requests would arrive at once and none in between. Times are ascending; an
    arrival alone at its moment stays unchanged.
    """
    moments, first, counts = np.unique(arrivals_s, return_index=True, return_counts=True)
    if len(moments) < 2 or counts.max() == 1:
        return arrivals_s
    gaps = np.diff(moments)
    widths = np.append(gaps, np.median(gaps))
    spread = arrivals_s.astype(np.float64)
    for begin, count, width in zip(first, counts, widths, strict=True):
        if count > 1:
            spread[begin : begin + count] += np.sort(rng.random(count)) * width
    return spread
