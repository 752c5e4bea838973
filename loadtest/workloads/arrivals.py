"""When requests arrive."""

import numpy as np
from numpy.typing import NDArray


def arrival_times_s(
    rng: np.random.Generator, count: int, rate: float, cv: float = 1.0
) -> NDArray[np.float64]:
    """Moments of independent arrivals, ascending; the first one is one gap after 0 s.

    Gaps are gamma distributed with mean 1 / rate. The coefficient of variation says how bursty
    they are: 0 even, 1 Poisson, 2 to 4 what public chat traffic shows at its worst.

    Args:
        rng: Where randomness comes from.
        count: How many.
        rate: Requests per second, on average.
        cv: Standard deviation of the gaps / their mean.

    Returns:
        Seconds, shape (count,).

    Raises:
        ValueError: A rate that is not above 0, or a negative ``cv``.
    """
    if not rate > 0:
        raise ValueError(f"a rate of {rate:g} requests/s: it must be above 0")
    if not cv >= 0:
        raise ValueError(f"a coefficient of variation of {cv:g}: it cannot be below 0")
    if cv == 0:
        gaps = np.full(count, 1.0 / rate)
    else:
        gaps = rng.gamma(1.0 / cv**2, cv**2 / rate, count)
    return np.cumsum(gaps)


def spread_ticks_s(
    rng: np.random.Generator, arrivals_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Spread arrivals that were recorded at one moment evenly at random up to the next moment.

    Mooncake's conversation trace knows 1,180 moments, 3 s apart, for 12,031 requests: played as
    they stand, ten requests would arrive at once and nobody in between.

    Args:
        rng: Where randomness comes from.
        arrivals_s: Ascending, shape (n,).

    Returns:
        Ascending, shape (n,); an arrival alone at its moment stays where it is.
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
