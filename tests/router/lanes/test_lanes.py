"""Two models of one router: each call reaches the workers of its own model only."""

import json

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from baton.config.clients import SloConfig
from tests.router.conftest import OPS, until
from tests.router.lanes.conftest import CONTEXT, OTHER, TwoLanes
from tests.telemetry import field_names

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CALLS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": CHAT,
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


def placed(lanes: TwoLanes) -> tuple[int, int]:
    """Requests that the workers of each model received."""
    return len(lanes.first.submissions), len(lanes.second.submissions)


@pytest.mark.parametrize("path", CALLS)
async def test_a_call_reaches_the_workers_of_its_model_only(two_lanes, path: str) -> None:
    lanes = await two_lanes()
    got = []
    for name in ("smollm2", OTHER, OTHER):
        answer = await lanes.post(path, model=name, **CALLS[path])
        assert answer.status_code == 200, answer.text
        got.append(placed(lanes))
    each = got[0][0]
    assert got == [(each, 0), (each, each), (each, 2 * each)]


async def test_an_unknown_name_is_refused_with_the_names_of_all_models(two_lanes) -> None:
    lanes = await two_lanes()
    answer = await lanes.post("/v1/chat/completions", model="gpt", **CHAT)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert "'smollm2', 'alias', 'other'" in error["message"]
    assert placed(lanes) == (0, 0)


async def test_each_model_has_its_own_latencies(two_lanes) -> None:
    """All models had those of the first one."""
    lanes = await two_lanes(
        slo=SloConfig(ttft_s=30, itl_s=3), other_slo=SloConfig(ttft_s=9, itl_s=1)
    )
    for name, lane, expected in zip(
        ("smollm2", OTHER), lanes.fleet.router.lanes, ((30, 3), (9, 1)), strict=True
    ):
        await lanes.post("/v1/chat/completions", model=name, **CHAT)
        slo = next(iter(lane.gateway.kept.newest_first())).request.slo
        assert (slo.ttft_s, slo.itl_s) == expected


async def test_each_model_has_its_own_context_and_template(two_lanes) -> None:
    lanes = await two_lanes()
    long = "word " * (2 * CONTEXT)
    body = {"prompt": long, "max_tokens": 2}
    assert (await lanes.post("/v1/completions", model="smollm2", **body)).status_code == 200
    answer = await lanes.post("/v1/completions", model=OTHER, **body)
    assert answer.status_code == 400
    assert f"maximum context length is {CONTEXT} tokens for prompt and answer" in answer.text
    tokens = {}
    for name in ("smollm2", OTHER):
        found = await lanes.post("/tokenize", model=name, messages=CHAT["messages"])
        tokens[name] = found.json()["count"]
    assert tokens[OTHER] == 1  # its template has the content only
    assert tokens["smollm2"] > 10


async def test_models_and_workers_are_listed_with_their_lane(two_lanes) -> None:
    lanes = await two_lanes()
    http = lanes.fleet.http
    records = {one["id"]: one for one in (await http.get("/v1/models")).json()["data"]}
    assert list(records) == ["smollm2", "alias", OTHER]
    assert records[OTHER]["max_model_len"] == CONTEXT
    assert records[OTHER]["template_digest"] == records["smollm2"]["template_digest"]
    one = (await http.get(f"/v1/models/{OTHER}")).json()
    assert one == records[OTHER]
    workers = (await http.get("/fleet")).json()["workers"]
    found = {worker["id"]: worker["model"] for worker in workers}
    assert found == {"decode-0": "smollm2", "other-decode-0": OTHER}
    version = lanes.fleet.lane.model.version
    assert {worker["model_version"] for worker in workers} == {version}
    page = (await http.get("/metrics")).text
    for name in found.values():
        labels = f'model="{name}",number="1",version="{version}"'
        assert f"baton_model_info{{{labels}}} 1.0" in page
    ready = (await http.get("/health/ready")).json()
    assert ready["status"] == "ready"
    assert {pair["decode"] for pair in ready["pairs"]} == {"decode-0", "other-decode-0"}


async def test_the_fleet_is_not_ready_while_one_model_has_no_worker(two_lanes) -> None:
    lanes = await two_lanes(probe_pause_s=0.0, probe_every_s=0.01)
    await lanes.second.stop()
    answer = await lanes.fleet.http.get("/health/ready")
    assert answer.status_code == 503
    assert (await lanes.fleet.http.get("/health")).status_code == 200  # the other one serves
    refused = await lanes.post("/v1/completions", model=OTHER, prompt="hi", max_tokens=1)
    assert refused.status_code == 503
    assert len(lanes.first.submissions) >= 1  # the probe
    served = await lanes.post("/v1/completions", model="smollm2", prompt="hi", max_tokens=1)
    assert served.status_code == 200


async def test_reports_of_all_models_are_found(two_lanes) -> None:
    lanes = await two_lanes()
    ids = []
    for name in ("smollm2", OTHER):
        answer = await lanes.post("/v1/completions", model=name, prompt="hi", max_tokens=1)
        ids.append(answer.json()["id"])
    listed = (await lanes.fleet.http.get("/fleet/requests")).json()["requests"]
    assert [request["id"] for request in listed] == list(reversed(ids))
    for request_id, worker in zip(ids, ("decode-0", "other-decode-0"), strict=True):
        report = (await lanes.fleet.http.get(f"/fleet/requests/{request_id}")).json()
        assert report["route"]["decode"] == worker


async def test_usage_is_counted_by_model(two_lanes) -> None:
    lanes = await two_lanes()
    for name in ("smollm2", OTHER, OTHER):
        await lanes.post("/v1/completions", model=name, prompt="hi", max_tokens=1)
    report = lanes.fleet.router.usage_counter.ledger.report(0)
    counted = {name.model: counters.requests for name, counters in report.rows.items()}
    assert counted == {"smollm2": 1, OTHER: 2}


async def test_a_response_of_another_lane_can_be_cancelled(two_lanes) -> None:
    lanes = await two_lanes()
    lanes.second.script.step_s = 0.05
    body = {"model": OTHER, "input": "hi", "max_output_tokens": 50, "stream": True}
    async with lanes.fleet.http.stream("POST", "/v1/responses", json=body) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                response_id = json.loads(line.removeprefix("data: "))["response"]["id"]
                break
        answer = await lanes.fleet.http.post(f"/v1/responses/{response_id}/cancel")
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "cancelled"


async def test_an_adapter_needs_the_name_of_its_base_model(two_lanes, tmp_path) -> None:
    lanes = await two_lanes(adapter_folder=str(tmp_path))
    body = {"lora_name": "x", "lora_path": str(tmp_path)}
    answer = await lanes.fleet.http.post("/v1/load_lora_adapter", json=body, headers=OPS)
    assert answer.status_code == 400
    assert "base_model: is required: this fleet serves smollm2, other" in answer.text
    answer = await lanes.fleet.http.post(
        "/v1/load_lora_adapter", json={**body, "base_model": "no"}, headers=OPS
    )
    assert "must be one of smollm2, other (got 'no')" in answer.text


async def test_each_model_has_its_own_series_and_exemplars(two_lanes) -> None:
    """All ``vllm:*`` series had the name of the first model."""
    lanes = await two_lanes()
    for number, name in enumerate(("smollm2", OTHER, OTHER), 1):
        sent = await lanes.fleet.http.post(
            "/v1/completions",
            json={"model": name, "prompt": "hi " * 8, "max_tokens": 4},
            headers={"traceparent": f"00-{number:032x}-{number:016x}-01"},
        )
        assert sent.status_code == 200
    kept = lanes.fleet.router.lanes.newest_first
    await until(lambda: all(active.observed for active in kept()))
    accept = {"accept": "application/openmetrics-text"}
    page = (await lanes.fleet.http.get("/metrics", headers=accept)).text
    samples = [s for f in text_string_to_metric_families(page) for s in f.samples]

    def by_model(name: str, label: str = "model_name", **labels: str) -> dict[str, float]:
        return {
            sample.labels[label]: sample.value
            for sample in samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }

    assert by_model("vllm:generation_tokens_total") == {"smollm2": 4, OTHER: 8}
    assert by_model("vllm:request_success_total", finished_reason="length") == {
        "smollm2": 1,
        OTHER: 2,
    }
    counts = by_model("vllm:e2e_request_latency_seconds_count")
    assert counts == {"smollm2": 1, OTHER: 2}
    response = "gen_ai_response_model"
    assert by_model("gen_ai_server_request_duration_seconds_count", response) == counts
    for name in ("num_requests_running", "cache_config_info", "lora_requests_info"):
        assert by_model(f"vllm:{name}").keys() == {"smollm2", OTHER}, name
    for name in field_names.GRAFANA:
        assert by_model(f"vllm:{name}").keys() == {"smollm2", OTHER}, name
    ends = {"smollm2": 0.0, OTHER: 0.0}
    for sample in samples:
        if sample.name == "vllm:request_prompt_tokens_bucket" and sample.labels["le"] != "+Inf":
            model = sample.labels["model_name"]
            ends[model] = max(ends[model], float(sample.labels["le"]))
    assert ends[OTHER] <= CONTEXT < ends["smollm2"]
    assert [s.value for s in samples if s.name == "baton_generation_tokens_total"] == [12]
    assert [s.value for s in samples if s.name == "baton_running_seconds_count"] == [3]
    assert not any("model_name" in s.labels for s in samples if s.name.startswith("baton_"))
    traces: dict[str, set[int]] = {}
    for sample in samples:
        if sample.name == "vllm:e2e_request_latency_seconds_bucket" and sample.exemplar:
            of = traces.setdefault(sample.labels["model_name"], set())
            of.add(int(sample.exemplar.labels["trace_id"], 16))
    assert traces.keys() == {"smollm2", OTHER}
    assert traces["smollm2"] == {1}
    assert traces[OTHER] <= {2, 3}
