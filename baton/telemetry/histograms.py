"""Fast histograms: a router observes one value per token.

They export the same series as those of ``prometheus_client``, which search the buckets linearly and
take a lock for each of three numbers. Buckets may be finer than those that are exported, so that
other names of a metric have buckets of their own without counting anything twice.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from threading import Lock
from time import time

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

Labels = Mapping[str, str]
Group = Callable[[Labels], Labels | None]
"""Returns the labels of the series that one with these labels is counted in; None: in none."""

_INFINITE = float("inf")


class Histogram(Collector):
    """Histogram and its labelled series.

    Args:
        bounds: Upper bounds of the exported buckets.
        finer: Further bounds that `family` can export.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        finer: Iterable[float] = (),
    ) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._shown = tuple(map(float, bounds))
        self._bounds = tuple(sorted({*self._shown, *map(float, finer)}))
        self._series: dict[tuple[str, ...], Histogram] = {}
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}  # by bucket
        self._lock = Lock()

    def labels(self, *values: str) -> "Histogram":
        """Return the series of these label values, in the order of the label names."""
        if len(values) != len(self._labels) or not values:
            raise ValueError(f"{self._name} takes labels {self._labels}, got {values}")
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Histogram(
                self._name, self._text, (), self._shown, self._bounds
            )
        return series

    def observe(self, value: float, times: int = 1, *, trace_id: str = "") -> None:
        """Count a value, once or several times; ``trace_id`` is that of a recorded trace."""
        index = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += times
            self._sum += value * times
            if trace_id:
                self._exemplars[index] = Exemplar({"trace_id": trace_id}, value, time())

    def collect(self) -> Iterable[Metric]:
        """Yield the family in Prometheus' form."""
        yield self.family(self._name, self._text, self._shown)

    def family(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        group: Group = lambda labels: labels,
        start: Iterable[Labels] = (),
    ) -> Metric:
        """Return the series, added up by group, with some of the bounds, under a name.

        The exemplar of a bucket is the latest of a recorded trace. ``start`` has labels of groups
        that are exported even if nothing is counted.
        """
        size = len(self._counts) + 1  # of buckets, and the sum of the values
        sums = {tuple(labels.items()): [0.0] * size for labels in start}
        rows = list(self._series.items()) if self._labels else [((), self)]
        places = [bisect_left(self._bounds, bound) for bound in bounds]
        latest: dict[tuple[object, ...], Exemplar] = {}  # by group and place
        for values, series in rows:
            labels = group(dict(zip(self._labels, values, strict=True)))
            if labels is not None:
                key = tuple(labels.items())
                with series._lock:  # noqa: SLF001
                    added = (*series._counts, series._sum)  # noqa: SLF001
                    exemplars = list(series._exemplars.items())  # noqa: SLF001
                sums[key] = [a + b for a, b in zip(sums.get(key, [0.0] * size), added, strict=True)]
                for index, kept in exemplars:
                    at = (*key, next((place for place in places if place >= index), -1))
                    latest[at] = max(
                        kept, latest.get(at, kept), key=lambda each: float(each.timestamp or 0)
                    )
        family = Metric(name, text, "histogram")
        texts = [str(floatToGoString(bound)) for bound in (*bounds, _INFINITE)]  # type: ignore[no-untyped-call]
        for items, total in sums.items():
            labels = dict(items)
            counts = list(accumulate(total[:-1]))
            for le, place in zip(texts, (*places, -1), strict=True):
                family.add_sample(
                    f"{name}_bucket",
                    {**labels, "le": le},
                    counts[place],
                    exemplar=latest.get((*items, place)),
                )
            family.add_sample(f"{name}_count", labels, counts[-1])
            family.add_sample(f"{name}_sum", labels, total[-1])
        return family


def add_up(
    own: Metric,
    name: str,
    group: Group,
    start: Iterable[Labels] = (),
    *,
    inverted: bool = False,
    largest: bool = False,
) -> Metric:
    """Return a counter or gauge under another name, with its series added up by group.

    ``inverted`` exports 1 minus what was counted, ``largest`` the largest in place of the sum.
    """
    add = max if largest else operator.add
    sums = {tuple(labels.items()): 0.0 for labels in start}
    counted = set()
    for sample in own.samples:
        labels = group(sample.labels)
        if labels is not None:
            key = tuple(labels.items())
            counted.add(key)
            sums[key] = add(sums.get(key, 0.0), sample.value)
    family = Metric(name, own.documentation, own.type)
    suffix = "_total" if own.type == "counter" else ""
    for items, value in sums.items():
        shown = 1 - value if inverted and items in counted else value
        family.add_sample(name + suffix, dict(items), shown)
    return family
