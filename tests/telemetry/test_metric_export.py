"""Metrics by OTLP, at a collector, with the names of the semantic conventions."""

import asyncio
import threading
from collections.abc import Iterable, Iterator

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes

from baton.telemetry.metric_export import MetricExport
from baton.telemetry.metrics import Metrics
from tests.telemetry.otlp_collector import listening

LABELS = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "baton",
    "gen_ai_request_model": "m",
    "gen_ai_response_model": "m",
    "server_address": "127.0.0.1",
    "server_port": "8000",
}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportMetricsServiceRequest]]]:
    received: list[ExportMetricsServiceRequest] = []

    def take(body: bytes, _: dict[str, str]) -> None:
        received.append(ExportMetricsServiceRequest.FromString(body))

    with listening("/v1/metrics", take) as url:
        yield url, received


async def exported(
    metrics: Metrics, collector: tuple[str, list[ExportMetricsServiceRequest]]
) -> dict[str, Metric]:
    url, received = collector
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        task = asyncio.create_task(MetricExport(metrics).run())
        async with asyncio.timeout(10):
            while not received:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(received) >= 2, "a last export follows when the component stops"
    [resource] = received[-1].resource_metrics
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert names["service.name"] == "baton-router"
    [scope] = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


async def test_metrics_arrive_with_values_buckets_and_attributes(
    collector: tuple[str, list[ExportMetricsServiceRequest]],
) -> None:
    metrics = Metrics("router", model="m")
    metrics.inc("baton_prompt_tokens", 7, tenant="a")
    metrics.set("baton_open_connections", 3)
    duration = metrics.histogram(
        "gen_ai_server_request_duration_seconds", error_type="queue_full", **LABELS
    )
    for value in (0.005, 0.03, 500.0):
        duration.observe(value)
    metrics.histogram("gen_ai_server_time_to_first_token_seconds", **LABELS).observe(0.2)
    metrics.histogram("gen_ai_server_time_per_output_token_seconds", **LABELS).observe(0.02)
    found = await exported(metrics, collector)
    assert not any(name.startswith("vllm:") for name in found)
    [tokens] = found["baton_prompt_tokens"].sum.data_points
    assert (tokens.as_double, found["baton_prompt_tokens"].sum.is_monotonic) == (7, True)
    assert found["baton_open_connections"].gauge.data_points[0].as_double == 3
    sent = found[gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION]
    assert sent.unit == "s"
    cumulative = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert sent.histogram.aggregation_temporality == cumulative
    [point] = sent.histogram.data_points
    assert list(point.explicit_bounds) == [0.01 * 2**power for power in range(14)]
    assert list(point.bucket_counts) == [1, 0, 1, *([0] * 11), 1]
    assert (point.count, point.sum) == (3, pytest.approx(500.035))
    attributes = {item.key: item.value for item in point.attributes}
    assert attributes[server_attributes.SERVER_PORT].int_value == 8000
    assert attributes[server_attributes.SERVER_ADDRESS].string_value == "127.0.0.1"
    assert attributes[error_attributes.ERROR_TYPE].string_value == "queue_full"
    assert attributes["gen_ai.operation.name"].string_value == "chat"
    first = found[gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN].histogram.data_points[0]
    assert (first.count, list(first.explicit_bounds)[-1]) == (1, 10)
    per_token = found[gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN].histogram
    assert list(per_token.data_points[0].explicit_bounds)[-1] == 2.5
    assert "error.type" not in {item.key for item in first.attributes}


async def test_data_are_made_in_a_thread_from_gauges_of_the_event_loop(
    collector: tuple[str, list[ExportMetricsServiceRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take tens of milliseconds with many tenants, and streams waited."""
    made: set[threading.Thread] = set()
    gauged: set[threading.Thread] = set()
    families = Metrics.families

    def noted(metrics: Metrics) -> Iterable[object]:
        made.add(threading.current_thread())
        return families(metrics)

    monkeypatch.setattr(Metrics, "families", noted)
    metrics = Metrics("router", model="m")
    metrics.before_page.append(lambda: gauged.add(threading.current_thread()))
    await exported(metrics, collector)
    assert made and threading.main_thread() not in made
    assert gauged == {threading.main_thread()}


@pytest.mark.parametrize(
    ("environ", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_METRICS_EXPORTER": "prometheus"}, False),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
                "OTEL_METRICS_EXPORTER": "prometheus, otlp",
            },
            True,
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_standard_variables_decide(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], is_on: bool
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert MetricExport(Metrics("router")).is_on == is_on
