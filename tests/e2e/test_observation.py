"""Ask it why: metrics that add up, targets, records of requests, one trace per request."""

import secrets

import httpx
import pytest

from tests.e2e.fleet_processes import NAME, chat, samples, soon, total


def ask(shared, text: str, mode: str = "auto", trace="", **fields) -> httpx.Response:
    parent = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"} if trace else {}
    answer = httpx.post(
        f"{shared.url}/v1/chat/completions",
        json=chat(text, **fields),
        headers={"x-baton-mode": mode, **parent},
        timeout=30,
    )
    assert answer.status_code == 200, answer.text
    return answer


def test_router_metrics_add_up(shared):
    before = samples(shared.url)
    usage = [ask(shared, f"Count to {i}.", max_tokens=5).json()["usage"] for i in range(3)]
    after = samples(shared.url)

    def grown(name: str) -> float:
        return total(after, name) - total(before, name)

    assert grown("baton_prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage)
    assert grown("baton_generation_tokens_total") == sum(u["completion_tokens"] for u in usage)
    assert grown("baton_prefix_tokens_total") == grown("baton_prompt_tokens_total")
    assert grown("baton_requests_total") == 3
    assert grown("baton_phase_seconds_sum") == pytest.approx(
        grown("baton_e2e_seconds_sum"), rel=0.02
    )


def test_probes_are_in_no_metric(shared):
    before = samples(shared.url)
    assert httpx.get(f"{shared.url}/health/ready", timeout=10).status_code == 200
    after = samples(shared.url)
    assert total(after, "baton_requests_total") == total(before, "baton_requests_total")
    assert total(after, "baton_prompt_tokens_total") == total(before, "baton_prompt_tokens_total")


def test_targets_lead_to_every_process(shared):
    groups = httpx.get(f"{shared.url}/fleet/targets", timeout=5).json()
    targets = [target for group in groups for target in group["targets"]]
    assert len(targets) >= 4
    for target in targets:
        assert "baton_" in httpx.get(f"http://{target}/metrics", timeout=5).text


def test_worker_blocks_add_up_on_the_page(shared):
    for worker in shared.workers.values():
        found = samples(f"http://{worker.record.metrics_address}")
        parts = {
            s: found[f'baton_kv_blocks{{state="{s}"}}']
            for s in ("total", "free", "cached", "leased", "quarantined")
        }
        assert sum(parts.values()) == 2 * parts["total"]


def test_a_request_can_be_explained(shared):
    answer = ask(shared, "Why here?", "disaggregated", max_tokens=4)
    record = httpx.get(f"{shared.url}/fleet/requests/{answer.headers['x-request-id']}").json()
    assert record["route"]["mode"] == "disaggregated"
    assert record["candidates"]
    for candidate in record["candidates"]:
        assert candidate["cost_s"] == pytest.approx(sum(candidate["terms"].values()), abs=1e-4)
    assert next(event["event"] for event in record["timeline"]) == "arrived"
    assert "Why here" not in str(record), "prompts are not logged"


def test_the_artifact_record(shared):
    record = httpx.get(f"{shared.url}/v1/models/{NAME}", timeout=5).json()
    for key in ("architecture", "license", "weights_digest", "tokenizer_digest", "dtype"):
        assert record[key], key


async def test_one_trace_per_request_across_all_processes(pair):
    """By real OTLP over gRPC, from three processes."""
    trace_id = secrets.token_hex(16)
    ask(pair.fleet, "Trace me.", "disaggregated", trace_id, max_tokens=3)
    trace = pair.collector.traces[bytes.fromhex(trace_id)]
    await soon(lambda: len(trace) >= 7, 15)
    names = {span.name for _, span in trace}
    assert names == {
        *(f"chat {NAME}", "baton.queue", "baton.attempt", "baton.delivery"),
        *("baton.decode", "baton.prefill", "baton.transfer"),
    }
    services = {span.name: service for service, span in trace}
    assert services["baton.prefill"] == services["baton.decode"] == "baton-worker"
    assert services["baton.attempt"] == "baton-router"
    by_name = {span.name: span for _, span in trace}
    assert by_name["baton.decode"].parent_span_id == by_name[f"chat {NAME}"].span_id
    assert by_name["baton.prefill"].parent_span_id == by_name["baton.decode"].span_id
    assert by_name["baton.transfer"].parent_span_id == by_name["baton.decode"].span_id
    transfer, prefill = by_name["baton.transfer"], by_name["baton.prefill"]
    assert transfer.start_time_unix_nano < transfer.end_time_unix_nano
    assert prefill.start_time_unix_nano < transfer.end_time_unix_nano, "it streams as it computes"
    attributes = {a.key for a in by_name[f"chat {NAME}"].attributes}
    assert {
        "gen_ai.operation.name",
        "gen_ai.request.model",
        "gen_ai.usage.input_tokens",
    } <= attributes
