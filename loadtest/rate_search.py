"""Search for the highest rate that meets an SLO, by doubling and then bisection."""

from loadtest.results.files import SearchPoint

_LOWEST = 0.01


class RateSearch:
    """Chooses the next rate to try. Does no I/O.

    Doubles from ``first`` while the SLO is met (or halves while it is missed) until one rate meets
    it and a higher one misses it. Then bisects the interval, on a logarithmic scale, until the two
    rates are within ``precision`` of each other. Gives up below 0.01 requests per second, or
    after ``max_points`` rates.
    """

    def __init__(self, first: float, *, precision: float = 0.1, max_points: int = 12) -> None:
        if not first > 0 or not precision > 0:
            raise ValueError(f"first rate {first:g} and precision {precision:g} must be above 0")
        self._first = first
        self._precision = precision
        self._max_points = max_points
        self.points: list[SearchPoint] = []

    def next_rate(self) -> float | None:
        """Return the next rate to try; None when the search has ended."""
        if len(self.points) >= self._max_points:
            return None
        if not self.points:
            return self._first
        met = self.best
        missed = self._lowest_missed
        if met is None:
            rate = min(point.rate for point in self.points) / 2
            return rate if rate >= _LOWEST else None
        if missed is None:
            return 2 * met.rate
        if missed <= met.rate * (1 + self._precision):
            return None
        return float((met.rate * missed) ** 0.5)

    @property
    def best(self) -> SearchPoint | None:
        """Highest rate that met the SLO below every rate that missed it."""
        missed = self._lowest_missed
        met = [p for p in self.points if p.met and (missed is None or p.rate < missed)]
        return max(met, key=lambda point: point.rate, default=None)

    @property
    def _lowest_missed(self) -> float | None:
        return min((point.rate for point in self.points if not point.met), default=None)
