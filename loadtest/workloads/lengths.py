"""Distributions of prompt and output lengths, in the format of the command line.

256                        always 256 tokens
uniform:64-512             every length in the range is equally likely
lognormal:180,0.9          median 180, sigma 0.9 of the logarithm: chat, with its long tail
lognormal:180,0.9,2048     the same, at most 2,048
choice:32,32,1024          one of these; repeating one makes it more likely
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Lengths = Callable[[np.random.Generator, int], NDArray[np.int64]]
"""(random generator, count n) -> n lengths in tokens, shape (n,), each at least 1."""


class LengthsError(ValueError):
    """Text that is not a distribution."""


def parse_lengths(text: str) -> Lengths:
    """Parse a distribution in the format of this module."""
    kind, _, rest = text.partition(":")
    try:
        if not rest:
            return _fixed(int(kind))
        if kind == "uniform":
            low, high = rest.split("-")
            return _uniform(int(low), int(high))
        if kind == "lognormal":
            return _lognormal(*map(float, rest.split(",")))
        if kind == "choice":
            return _choice([int(part) for part in rest.split(",")])
    except LengthsError:
        raise
    except (TypeError, ValueError):
        pass
    raise LengthsError(
        f"{text!r} is not a distribution of lengths; use 256, uniform:64-512, "
        "lognormal:MEDIAN,SIGMA[,MAXIMUM], choice:32,1024"
    )


def _fixed(tokens: int) -> Lengths:
    _at_least_one(tokens)
    return lambda rng, count: np.full(count, tokens, dtype=np.int64)


def _uniform(low: int, high: int) -> Lengths:
    _at_least_one(low)
    if high < low:
        raise LengthsError(f"uniform:{low}-{high}: the second length must not be below the first")
    return lambda rng, count: rng.integers(low, high + 1, count)


def _lognormal(median: float, sigma: float, maximum: float = 2.0**31) -> Lengths:
    _at_least_one(min(median, maximum))
    if sigma < 0:
        raise LengthsError(f"lognormal: sigma {sigma:g} must be at least 0")

    def draw(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = median * np.exp(sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), 1, maximum).astype(np.int64)

    return draw


def _choice(lengths: list[int]) -> Lengths:
    _at_least_one(min(lengths))
    return lambda rng, count: rng.choice(np.array(lengths, dtype=np.int64), count)


def _at_least_one(tokens: float) -> None:
    if not tokens >= 1:
        raise LengthsError(f"length {tokens:g} must be at least 1 token")
