"""Metrics of one component, and the HTTP server for its ``/metrics`` page.

    metrics = Metrics("worker", model="smollm2")
    metrics.inc("baton_transfer_bytes", 4096, direction="received")
    async with serve_metrics(metrics) as address:  # http://127.0.0.1:<free port>/metrics

Nothing is global: each component has its own registry.
"""

import asyncio
import contextlib
import copy
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from math import inf
from time import time

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

from baton.addresses import join_address
from baton.telemetry import openmetrics
from baton.telemetry.histograms import Histogram, add_up
from baton.telemetry.metric_names import METRICS_BY_COMPONENT, MetricSpec
from baton.telemetry.version import version
from baton.telemetry.vllm_names import VLLM_SERIES, VllmSeries, finer_bounds

MAX_LABEL_SETS = 256  # per metric; further label values are counted as "other"
_OTHER = "other"
_MODEL = "model_name"
_REQUEST_LIMIT_S = 5.0

_Instrument = Counter | Gauge | Histogram


class Metrics:
    """Declared metrics of one component, ``router`` or ``worker``.

    A name that is not declared raises ``KeyError``, and labels that differ from the declaration
    raise ``ValueError``: both are programming errors. ``model`` is the served model name, for the
    label of the ``vllm:*`` series. Their buckets of tokens end at ``context_tokens``. What these
    series read is counted by model, and added up under Baton's own name.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, component: str, *, model: str = "", context_tokens: int = 1_000_000) -> None:
        self.component = component
        self._registry = CollectorRegistry(auto_describe=False)
        self._specs = METRICS_BY_COMPONENT[component]
        self._by_model = {series.of for series in VLLM_SERIES[component]}
        self._instruments = {
            name: self._instrument(name, spec) for name, spec in self._specs.items()
        }
        self._children: dict[tuple[str, tuple[str, ...]], _Instrument] = {}
        self._label_sets: dict[tuple[str, ...], int] = {}  # by metric and model
        self._context_tokens: dict[str, int] = {}  # by model
        self._begin(model, context_tokens)
        for name, spec in self._specs.items():
            for value in spec.from_start:
                self._child(name, {spec.labels[0]: value})
        self._process = ProcessCollector(registry=self._registry)
        self.set("baton_build_info", 1, version=version())
        self.before_page: list[Callable[[], None]] = []  # set the gauges that are read on demand

    def of_model(self, model: str, context_tokens: int) -> "Metrics":
        """Return these metrics for what concerns another model of the component."""
        if model == self._model:
            return self
        other = copy.copy(self)
        other._begin(model, context_tokens)  # noqa: SLF001
        return other

    def _begin(self, model: str, context_tokens: int) -> None:
        self._model = model
        self._context_tokens[model] = context_tokens
        self._found: dict[tuple[object, ...], _Instrument] = {}  # children, by call signature
        self._infos: dict[str, tuple[str, ...]] = {}  # label values, by metric
        for name in self._by_model:
            if not self._specs[name].labels:
                self._child(name, {})

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter or gauge."""
        child = self._child(name, labels)
        if not isinstance(child, Counter | Gauge):  # in this order it takes a tenth of the time
            raise ValueError(f"{name} is a histogram: use observe()")
        child.inc(value)

    def count_up(self, name: str, total: float, **labels: str) -> None:
        """Raise a counter to a total that another component counts.

        Reads one series only, since an engine reports its totals after each step.
        """
        if total <= 0:
            return
        child = self._child(name, labels)
        if not isinstance(child, Counter):
            raise ValueError(f"{name} is not a counter")
        [family] = child.collect()
        if (delta := total - family.samples[0].value) > 0:
            child.inc(delta)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge to ``value``."""
        child = self._child(name, labels)
        if not isinstance(child, Gauge):
            raise ValueError(f"{name} is not a gauge")
        child.set(value)

    def set_info(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge with a single series for each model, whose labels carry the information."""
        gauge = self._instruments[name]
        if not isinstance(gauge, Gauge):
            raise ValueError(f"{name} is not a gauge")
        values = (*(labels[label] for label in self._specs[name].labels), self._model)
        if (earlier := self._infos.get(name, values)) != values:
            gauge.remove(*earlier)
        self._infos[name] = values
        gauge.labels(*values).set(value)

    def set_cache_info(self, blocks: int, block_tokens: int, dtype: str = "auto") -> None:
        """Export the number and size of the KV blocks of a fleet or a worker, as vLLM does."""
        size = {"block_size": str(block_tokens), "num_gpu_blocks": str(blocks)}
        kind = {"num_cpu_blocks": "0", "cache_dtype": dtype, "enable_prefix_caching": "True"}
        self.set_info("baton_kv_cache_info", 1, **size, **kind)

    def set_adapter_info(self, most: int, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Export the adapters of requests, as vLLM does."""
        names = {"running_lora_adapters": running, "waiting_lora_adapters": waiting}
        shown = {label: ",".join(sorted(adapters)) for label, adapters in names.items()}
        self.set_info("baton_adapter_requests_info", time(), max_lora=str(most), **shown)

    def observe(self, name: str, value: float, *, trace_id: str = "", **labels: str) -> None:
        """Add one value to a histogram; ``trace_id`` becomes the exemplar of its bucket."""
        self.histogram(name, **labels).observe(value, trace_id=trace_id)

    def exemplars(self) -> dict[tuple[object, ...], Exemplar]:
        """Return the exemplars of the page, by series."""
        samples = (sample for family in self.families() for sample in family.samples)
        return {openmetrics.series_of(s): s.exemplar for s in samples if s.exemplar}

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return one series of a histogram, for callers that observe once per token."""
        child = self._child(name, labels)
        if not isinstance(child, Histogram):
            raise ValueError(f"{name} is not a histogram")
        return child

    def render(self, *, in_openmetrics: bool = False) -> bytes:
        """Return the page in Prometheus' text format, or in OpenMetrics."""
        self.refresh()
        page = openmetrics.Page(lambda: chain(self.families(), self._process.collect()))
        return page.openmetrics() if in_openmetrics else generate_latest(page)

    def refresh(self) -> None:
        """Set the gauges that are read on demand."""
        for show in self.before_page:
            show()

    @property
    def together(self) -> dict[str, str]:
        """Rule to combine the gauges of several routers, by name and name of vLLM."""
        own: dict[str, str] = {
            name: spec.together for name, spec in self._specs.items() if spec.kind == "gauge"
        }
        alike = VLLM_SERIES[self.component]
        return own | {series.full_name: own[series.of] for series in alike if series.of in own}

    def families(self) -> Iterable[Metric]:
        """Yield all families: own names, then those of vLLM.

        Without the ``_created`` series, which double the page and are unused. Threads may read
        them: `refresh` comes before.
        """
        own: dict[str, Metric] = {}
        for name, instrument in self._instruments.items():
            [family] = instrument.collect()
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            own[name] = family
            yield self._added_up(name, family) if name in self._by_model else family
        for series in VLLM_SERIES[self.component]:
            yield self._vllm_family(series, own[series.of])

    def _added_up(self, name: str, family: Metric) -> Metric:
        """Return a family that is counted by model without its model."""
        spec = self._specs[name]
        if isinstance(instrument := self._instruments[name], Histogram):
            return instrument.family(name, spec.help, spec.buckets, _without_model)
        return add_up(family, name, _without_model, largest=spec.is_alike)

    def _vllm_family(self, series: VllmSeries, own: Metric) -> Metric:
        name = series.full_name
        text = self._specs[series.of].help
        instrument = self._instruments[series.of]
        shown = Metric(name, text, own.type)
        for model, bounds in self._bounds_of(series):
            group = partial(_group_of, series, model)
            start = [{**_of_vllm(series, model), **labels} for labels in series.groups]
            if isinstance(instrument, Histogram):
                family = instrument.family(name, text, bounds, group, start)
            else:
                family = add_up(own, name, group, start, inverted=series.inverted)
            shown.samples += family.samples
        return shown

    def _bounds_of(self, series: VllmSeries) -> Iterator[tuple[str, list[float]]]:
        """Yield each model and its bounds of a series' buckets."""
        for model, context_tokens in self._context_tokens.items():
            most = context_tokens if series.is_capped else inf
            yield model, [bound for bound in series.buckets if bound <= most]

    def _instrument(self, name: str, spec: MetricSpec) -> _Instrument:
        labels = (*spec.labels, _MODEL) if name in self._by_model else spec.labels
        if spec.kind == "counter":
            return Counter(name, spec.help, labels, registry=self._registry)
        if spec.kind == "gauge":
            return Gauge(name, spec.help, labels, registry=self._registry)
        finer = finer_bounds(self.component, name)
        histogram = Histogram(name, spec.help, labels, spec.buckets, finer)
        self._registry.register(histogram)
        return histogram

    def _child(self, name: str, labels: Mapping[str, str]) -> _Instrument:
        found = self._found.get((name, *labels.items()))
        return self._find(name, labels) if found is None else found

    def _find(self, name: str, labels: Mapping[str, str]) -> _Instrument:
        spec = self._specs[name]
        model = (self._model,) if name in self._by_model else ()
        if not spec.labels and not labels and not model:
            return self._instruments[name]
        if set(labels) != set(spec.labels):
            raise ValueError(f"{name} takes labels {spec.labels}, got {tuple(labels)}")
        values = (*(str(labels[label]) for label in spec.labels), *model)
        child = self._children.get((name, values))
        if child is not None:
            self._found[name, *labels.items()] = child
            return child
        known = self._label_sets.get((name, *model), 0)
        if known >= MAX_LABEL_SETS:
            # Values may come from requests (a tenant's name) and must not grow this process.
            self.inc("baton_label_overflows", metric=name)
            return self._instruments[name].labels(*(_OTHER for _ in spec.labels), *model)
        self._label_sets[name, *model] = known + 1
        child = self._children[name, values] = self._instruments[name].labels(*values)
        return child


def _without_model(labels: Mapping[str, str]) -> Mapping[str, str]:
    return {label: value for label, value in labels.items() if label != _MODEL}


def _of_vllm(series: VllmSeries, model: str) -> dict[str, str]:
    return {"engine": "0", _MODEL: model} if series.has_engine else {_MODEL: model}


def _group_of(
    series: VllmSeries, model: str, labels: Mapping[str, str]
) -> Mapping[str, str] | None:
    """Return the labels of a model's series that one of Baton's is counted in; None: in none."""
    if labels[_MODEL] != model:
        return None
    grouped = series.group_of(_without_model(labels))
    return None if grouped is None else {**_of_vllm(series, model), **grouped}


@contextlib.asynccontextmanager
async def serve_metrics(
    metrics: Metrics, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve ``/metrics`` by HTTP, or HTTPS with ``tls``, within the context; yield its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A peer that disconnects or sends an invalid request affects only this connection.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_REQUEST_LIMIT_S):
                writer.write(_response(metrics, await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        writer.close()

    limit_s = None if tls is None else _REQUEST_LIMIT_S
    server = await asyncio.start_server(answer, host, port, ssl=tls, ssl_handshake_timeout=limit_s)
    try:
        yield join_address(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        if sys.version_info >= (3, 13):  # in older versions connections end by themselves
            server.close_clients()


def _response(metrics: Metrics, head: bytes) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    status, kind, body = "200 OK", metrics.content_type, b""
    if method not in (b"GET", b"HEAD"):
        status, kind, body = "405 Method Not Allowed", "text/plain", b"only GET\n"
    elif path != b"/metrics":
        status, kind, body = "404 Not Found", "text/plain", b"see /metrics\n"
    else:
        body = metrics.render()
    header = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return header.encode() + b"Connection: close\r\n\r\n" + (b"" if method == b"HEAD" else body)


def count_cached(metrics: Metrics, tier_tokens: Mapping[str, int], cached_tokens: int) -> None:
    """Count prompt tokens from tiers; the other cached tokens were in the pool."""
    left = cached_tokens
    for tier, brought in tier_tokens.items():
        tokens = min(brought, left)  # a restored block may have been evicted again
        metrics.inc("baton_prefix_tokens", tokens, source=tier)
        left -= tokens
    metrics.inc("baton_prefix_tokens", left, source="local")
