"""Metrics are declared, bounded and served; traces pass through whether or not anyone listens."""

import asyncio
from pathlib import Path
from socket import gethostname

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.addresses import split_address
from baton.telemetry import metrics as metrics_module
from baton.telemetry.metric_names import METRICS_BY_COMPONENT
from baton.telemetry.metrics import MAX_LABEL_SETS, Metrics, serve_metrics
from baton.telemetry.tracing import Tracing, extract, inject
from baton.wire.tls import FleetTls
from tests.telemetry.otlp_collector import over_http
from tests.telemetry.values import value_of
from tests.wire import certs

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def page(metrics: Metrics) -> dict[str, float]:
    """Sample name and labels -> value."""
    return {
        f"{sample.name}{sorted(sample.labels.items()) or ''}": sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_names_start_with_baton_and_hold_their_units() -> None:
    for specs in METRICS_BY_COMPONENT.values():
        for name, spec in specs.items():
            assert name.startswith(("baton_", "gen_ai_"))
            assert not name.endswith("_total"), "the exposition adds it"
            if spec.kind == "histogram":
                assert name.endswith(
                    ("_seconds", "_requests", "_tokens", "_choices", "_preemptions")
                ), name


def test_what_is_counted_is_on_the_page_also_under_its_vllm_name() -> None:
    metrics = Metrics("router", model="m")
    metrics.inc("baton_prompt_tokens", 7, tenant="a")
    metrics.observe("baton_e2e_seconds", 0.3, tenant="a")
    metrics.set("baton_queue_limit_requests", 256)
    shown = page(metrics)
    assert shown["baton_prompt_tokens_total[('tenant', 'a')]"] == 7
    of_vllm = "[('engine', '0'), ('model_name', 'm')]"
    assert shown[f"vllm:prompt_tokens_total{of_vllm}"] == 7
    assert shown[f"vllm:e2e_request_latency_seconds_sum{of_vllm}"] == 0.3
    assert shown["baton_queue_limit_requests"] == 256
    assert value_of(metrics, "baton_e2e_seconds", tenant="a") == 0.3
    assert not any("_created" in name for name in shown)


def test_what_is_one_series_here_and_a_metric_of_its_own_at_vllm() -> None:
    metrics = Metrics("router", model="m")
    metrics.observe("baton_phase_seconds", 0.25, phase="queue")
    metrics.observe("baton_phase_seconds", 0.5, phase="prefill")
    metrics.inc("baton_prefix_tokens", 30, source="local")
    metrics.inc("baton_prefix_tokens", 70, source="computed")
    shown, model = page(metrics), "[('engine', '0'), ('model_name', 'm')]"
    assert shown[f"vllm:request_queue_time_seconds_sum{model}"] == 0.25
    assert shown[f"vllm:request_prefill_time_seconds_count{model}"] == 1
    assert shown[f"vllm:request_decode_time_seconds_count{model}"] == 0
    assert shown[f"vllm:prefix_cache_hits_total{model}"] == 30


def test_an_undeclared_name_or_label_is_a_fault() -> None:
    metrics = Metrics("worker")
    with pytest.raises(KeyError):
        metrics.inc("baton_nonsense")
    with pytest.raises(ValueError, match="takes labels"):
        metrics.inc("baton_transfer_bytes")
    with pytest.raises(ValueError, match="histogram"):
        metrics.inc("baton_transfer_seconds")
    with pytest.raises(ValueError, match="not a gauge"):
        metrics.set("baton_preemptions", 1)


def test_an_info_has_one_series_whose_labels_are_set_when_the_page_is_asked_for() -> None:
    metrics, names = Metrics("worker", model="m"), ["a", "b"]
    fixed = {"max_lora": "2", "waiting_lora_adapters": ""}

    def show() -> None:
        running = ",".join(names)
        metrics.set_info("baton_adapter_requests_info", 7, running_lora_adapters=running, **fixed)

    metrics.before_page.append(show)
    assert 'running_lora_adapters="a,b"' in metrics.render().decode()
    names.pop()
    page = metrics.render().decode()
    said = 'running_lora_adapters="a",waiting_lora_adapters=""} 7.0'
    assert f'baton_adapter_requests_info{{max_lora="2",{said}' in page
    assert f'vllm:lora_requests_info{{engine="0",max_lora="2",model_name="m",{said}' in page
    assert "a,b" not in page


def test_labels_from_requests_cannot_grow_the_process() -> None:
    metrics = Metrics("router")
    for number in range(MAX_LABEL_SETS + 50):
        metrics.inc("baton_prompt_tokens", tenant=f"tenant-{number}")
    tenants = [name for name in page(metrics) if name.startswith("baton_prompt_tokens_total")]
    assert len(tenants) == MAX_LABEL_SETS + 1
    assert value_of(metrics, "baton_prompt_tokens", tenant="other") == 50
    assert value_of(metrics, "baton_label_overflows", metric="baton_prompt_tokens") == 50


async def test_the_page_is_served_and_nothing_else() -> None:
    metrics = Metrics("worker")
    async with (
        serve_metrics(metrics) as address,
        httpx.AsyncClient(base_url=f"http://{address}") as client,
    ):
        answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        own = metrics.render().partition(b"# HELP process_")[0]
        assert answer.content.startswith(own)
        assert b"process_resident_memory_bytes" in answer.content
        assert (await client.get("/secrets")).status_code == 404
        assert (await client.post("/metrics")).status_code == 405


@pytest.mark.parametrize("by_tls", [False, True])
async def test_a_silent_connection_to_the_page_ends(
    by_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "_REQUEST_LIMIT_S", 0.2)
    tls = FleetTls(certs.files(certs.made(tmp_path))).page_context() if by_tls else None
    async with serve_metrics(Metrics("worker"), tls=tls) as address, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*split_address(address))
        assert await reader.read() == b""
        writer.close()


def test_without_an_endpoint_a_trace_still_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = Tracing("router")
    with tracing.tracer.start_as_current_span("a", context=extract(PARENT)) as span:
        assert inject(span) == inject() == PARENT
    assert inject() == ""
    assert inject(tracing.tracer.start_span("b", context=extract("nonsense"))) == ""
    tracing.shutdown()


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", gethostname()), ("::", gethostname()), ("10.0.0.7", "10.0.0.7")],
)
def test_the_address_of_a_server_is_none_that_stands_for_all(host: str, shown: str) -> None:
    assert Tracing("router", host, 8000).server == {"server.address": shown, "server.port": 8000}


def test_with_an_endpoint_spans_arrive_under_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    with over_http() as (collector, url):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        tracing = Tracing("router")
        with tracing.tracer.start_as_current_span("prefill", context=extract(PARENT)) as span:
            assert inject(span) != PARENT
            assert inject(span).split("-")[1] == PARENT.split("-")[1]
        tracing.shutdown()
    [[(service, sent)]] = collector.traces.values()
    assert service == "baton-router"
    assert (sent.name, sent.parent_span_id.hex()) == ("prefill", PARENT.split("-")[2])


def test_counting_up_reads_no_other_series(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics("worker")

    def collect() -> None:
        raise AssertionError("an engine reports totals with each step: the page is too long")

    monkeypatch.setattr(metrics._registry, "collect", collect)
    metrics.count_up("baton_kv_evictions", 5)
    metrics.count_up("baton_kv_evictions", 7)
    metrics.count_up("baton_kv_evictions", 3)  # a counter never goes back
    metrics.count_up("baton_kv_tier_failures", 2, tier="memory", reason="lost")
    metrics.count_up("baton_kv_tier_failures", 0, tier="memory", reason="late")
    shown = page(metrics)
    assert shown["baton_kv_evictions_total"] == 7
    failures = {name: value for name, value in shown.items() if "tier_failures_total" in name}
    assert list(failures.values()) == [2], "what never happened has no series"
