"""Pages of metrics in the OpenMetrics format, which has exemplars."""

import contextlib
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

__all__ = ["CONTENT_TYPE", "Page", "is_wanted", "openmetrics", "series_of"]
_MEDIA_TYPE = "application/openmetrics-text"


class Page(Collector):
    """Families of a page, in order."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Yield the families of the page."""
        return self._families()

    def openmetrics(self) -> bytes:
        """Return the page in OpenMetrics; other escaping replaces the colon of ``vllm:``."""
        return bytes(generate_latest(self, ALLOWUTF8))  # type: ignore[no-untyped-call]


def is_wanted(accept: str) -> bool:
    """Return whether a client prefers OpenMetrics to the text format, by its ``Accept``."""
    weights = {"text/plain": 0.0, _MEDIA_TYPE: 0.0}
    for item in accept.split(","):
        kind, *parameters = (part.strip() for part in item.split(";"))
        weight = next((each[2:] for each in parameters if each.startswith("q=")), "1")
        with contextlib.suppress(ValueError):
            weights[kind] = max(weights.get(kind, 0.0), float(weight))
    return weights[_MEDIA_TYPE] > 0 and weights[_MEDIA_TYPE] >= weights["text/plain"]


def series_of(sample: Sample) -> tuple[object, ...]:
    """Return what a sample has in common with others of its series."""
    return sample.name, *sorted(sample.labels.items())


def openmetrics(page: bytes, exemplars: Mapping[tuple[object, ...], Exemplar]) -> bytes:
    """Return a page of the text format in OpenMetrics, with exemplars by series."""
    families = list(text_string_to_metric_families(page.decode()))
    for family in families:
        family.samples = [
            sample._replace(exemplar=exemplars.get(series_of(sample))) for sample in family.samples
        ]
    return Page(lambda: families).openmetrics()
