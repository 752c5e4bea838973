"""Export of metrics by OTLP, beside Prometheus' page, by the standard ``OTEL_*`` variables.

``OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_ENDPOINT`` switches it on,
``OTEL_METRICS_EXPORTER=none`` off. ``OTEL_METRIC_EXPORT_INTERVAL`` is in milliseconds. Sums are
cumulative. Names of vLLM are not exported: they are sums of Baton's.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric

from baton.telemetry.metrics import Metrics
from baton.telemetry.otlp import exporter_of, is_on, resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData

_INTERVAL_MS = "60000"
_OWN = ("baton_", "gen_ai_")
_UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}


class MetricExport:
    """Exporter of one component; ``refresh`` sets the gauges that are computed when read."""

    def __init__(
        self,
        metrics: Metrics,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self._metrics = metrics
        self._refresh = refresh
        self._began_ns = time.time_ns()
        self.is_on = is_on("METRICS")

    async def run(self) -> None:
        """Export at each interval, and a last time when cancelled."""
        if not self.is_on:
            return
        interval_s = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or _INTERVAL_MS) / 1000
        exporter = exporter_of("METRICS")
        try:
            while True:
                await asyncio.sleep(interval_s)
                await self._export(exporter)
        finally:
            await self._export(exporter, timeout_millis=1000)
            exporter.shutdown(1000)

    async def _export(self, exporter: Any, **limit: int) -> None:
        """Export once; what takes long is in a thread, one at a time."""
        self._refresh()
        self._metrics.refresh()
        await asyncio.to_thread(lambda: exporter.export(self._data(), **limit))

    def _data(self) -> "MetricsData":
        """Return the present values, in the SDK's form."""
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        component = self._metrics.component
        families = (f for f in self._metrics.families() if f.name.startswith(_OWN))
        metrics = [_converted(family, self._began_ns, time.time_ns()) for family in families]
        scope = ScopeMetrics(InstrumentationScope(f"baton.{component}"), metrics, "")
        return MetricsData([ResourceMetrics(resource_of(component), [scope], "")])


def _converted(family: Metric, began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics import export

    name = family.name
    if name.startswith("gen_ai_"):
        parts = name.removesuffix("_seconds").replace("gen_ai_server_", "gen_ai.server.")
        name = parts.replace("request_", "request.")
    unit = next((unit for end, unit in _UNITS.items() if family.name.endswith(end)), "")
    cumulative = export.AggregationTemporality.CUMULATIVE
    data: Any
    if family.type == "histogram":
        data = export.Histogram(list(_histograms(family, began_ns, now_ns)), cumulative)
        return export.Metric(name, family.documentation, unit, data)
    points = [
        export.NumberDataPoint(_attributes(sample.labels), began_ns, now_ns, sample.value)
        for sample in family.samples
    ]
    is_sum = family.type == "counter"
    data = export.Sum(points, cumulative, is_monotonic=True) if is_sum else export.Gauge(points)
    return export.Metric(name, family.documentation, unit, data)


def _histograms(family: Metric, began_ns: int, now_ns: int) -> Iterable[Any]:
    """Yield a point for each series, whose samples stand one after another."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    bounds: list[float] = []
    totals: list[float] = []
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            totals.append(sample.value)
        elif sample.name.endswith("_sum"):
            counts = [int(b - a) for a, b in zip([0, *totals], totals, strict=False)]
            of: Any = (_attributes(sample.labels), began_ns, now_ns, int(totals[-1]), sample.value)
            yield HistogramDataPoint(*of, counts, bounds[:-1], None, None)  # type: ignore[call-arg]
            bounds = []
            totals = []


def _attributes(labels: Mapping[str, str]) -> dict[str, str | int]:
    """Return attributes under their names in the conventions, without empty ones."""
    named = {_dotted(label): value for label, value in labels.items() if value}
    return {name: int(v) if name == "server.port" else v for name, v in named.items()}


def _dotted(name: str) -> str:
    """Return a label of the conventions as an attribute; other labels have one word or stay."""
    if not name.startswith(("gen_ai_", "server_", "error_")):
        return name
    return name.replace("_", ".").replace("gen.ai", "gen_ai")
