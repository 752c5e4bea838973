"""A mean that follows its samples, for figures that a process measures of itself."""


class RunningMean:
    """Moves towards each sample by a fixed part of the way.

    Args:
        weight: Of a new sample, between 0 and 1.
        prior: The mean before the first sample, and part of all later ones; None: the first
            sample is taken as it is.
    """

    __slots__ = ("_value", "_weight")

    def __init__(self, weight: float, prior: float | None = None) -> None:
        self._weight = weight
        self._value = prior

    @property
    def measured(self) -> bool:
        """Whether there is a mean: a sample came, or there was a prior."""
        return self._value is not None

    @property
    def value(self) -> float:
        """The mean; 0 until there is one."""
        return self._value or 0.0

    def add(self, sample: float) -> None:
        """Take a new sample into the mean."""
        if self._value is None:
            self._value = sample
        else:
            self._value += self._weight * (sample - self._value)
