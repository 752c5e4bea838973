"""Exponentially weighted mean, for figures that a process measures of itself."""


class RunningMean:
    """Mean that moves towards each sample by the share ``weight`` of the difference.

    Without a prior it starts with the first sample.
    """

    __slots__ = ("_value", "_weight")

    def __init__(self, weight: float, prior: float | None = None) -> None:
        self._weight = weight
        self._value = prior

    @property
    def measured(self) -> bool:
        """True if there is a mean: from a sample or a prior."""
        return self._value is not None

    @property
    def value(self) -> float:
        """Current mean; 0 before the first sample."""
        return self._value or 0.0

    def add(self, sample: float) -> None:
        """Add a sample to the mean."""
        if self._value is None:
            self._value = sample
        else:
            self._value += self._weight * (sample - self._value)
