"""Fast histograms: a router observes one value per token.

They export the same series as those of ``prometheus_client``, which search the buckets linearly and
take a lock for each of three numbers.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from threading import Lock

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """Histogram and its labelled series; ``bounds`` are increasing upper bounds of the buckets."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = tuple(map(float, bounds))
        self._series: dict[tuple[str, ...], Histogram] = {}
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = Lock()

    def labels(self, *values: str) -> "Histogram":
        """Return the series of these label values, in the order of the label names."""
        if len(values) != len(self._labels) or not values:
            raise ValueError(f"{self._name} takes labels {self._labels}, got {values}")
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Histogram(self._name, self._text, (), self._bounds)
        return series

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, once or several times."""
        index = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += times
            self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        """Yield the family in Prometheus' form."""
        family = Metric(self._name, self._text, "histogram")
        series = list(self._series.items()) if self._labels else [((), self)]
        for values, histogram in series:
            histogram._add_to(family, dict(zip(self._labels, values, strict=True)))  # noqa: SLF001
        yield family

    def _add_to(self, family: Metric, labels: dict[str, str]) -> None:
        with self._lock:
            totals = list(accumulate(self._counts))
            total = self._sum
        for bound, count in zip((*self._bounds, float("inf")), totals, strict=True):
            text = str(floatToGoString(bound))  # type: ignore[no-untyped-call]
            family.add_sample(f"{self._name}_bucket", {**labels, "le": text}, count)
        family.add_sample(f"{self._name}_count", labels, totals[-1])
        family.add_sample(f"{self._name}_sum", labels, total)
