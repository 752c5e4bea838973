"""What operators see: the fleet, readiness, metrics, models, one request's story, a clean stop."""

import asyncio
import gc
import json
import os
import signal
import sys
import time

import httpx
import pytest
import yaml
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry.process_memory import ROUTER_OBJECTS, collect_rarely
from tests.router.conftest import MODEL, events_of, free_port, until
from tests.router.emulated_worker import Script

FIELDS = {
    *("id", "role", "state", "incarnation", "epoch", "pid", "ranks", "host", "address"),
    *("reason", "model"),
    *("kv_blocks", "kv_tiers", "running", "waiting", "threads", "age_s", "engine", "refused"),
    "version",
    "model_version",
}


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0.002), "prefill-0": Script(step_s=0.002)})


def samples(page: str) -> dict[tuple, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_fleet_has_every_field_of_every_worker(fleet):
    document = (await fleet.http.get("/fleet")).json()
    assert set(document) == {"emulated", "workers", "transfers"}
    assert document["transfers"] == {"count": 0, "bytes": 0, "failures": 0}
    assert [worker["id"] for worker in document["workers"]] == ["decode-0", "prefill-0"]
    for worker in document["workers"]:
        assert set(worker) == FIELDS
        assert worker["state"] == "ready"
        assert worker["pid"] == os.getpid()
        assert worker["epoch"] == 1
        assert worker["kv_tiers"] == {}
        assert 0 <= worker["age_s"] < 5
        assert len(bytes.fromhex(worker["incarnation"])) == 16
        assert worker["kv_blocks"] == {
            "total": 512,
            "free": 500,
            "cached": 8,
            "leased": 4,
            "quarantined": 0,
        }


async def test_transfers_never_fall_over_a_death(make_fleet):
    fleet = await make_fleet({"decode-0": None, "prefill-0": None}, dead_shown_s=0.5)
    for _ in range(3):
        await fleet.chat(headers={"x-baton-mode": "disaggregated"})

    async def count() -> int:
        return (await fleet.http.get("/fleet")).json()["transfers"]["count"]

    await asyncio.sleep(0.3)
    assert await count() == 3
    await fleet.workers["decode-0"].stop()
    await until(lambda: fleet.state("decode-0") == "dead")
    assert await count() == 3
    await fleet.add("decode-0")
    await fleet.chat(headers={"x-baton-mode": "disaggregated"})
    await asyncio.sleep(0.3)
    assert await count() == 4


async def test_the_dead_stay_in_sight_and_come_back_as_they_were(make_fleet):
    fleet = await make_fleet({"decode-0": None, "decode-1": None}, dead_shown_s=0.4)

    async def states() -> dict[str, str]:
        workers = (await fleet.http.get("/fleet")).json()["workers"]
        return {worker["id"]: worker["state"] for worker in workers}

    address = fleet.workers["decode-0"].address
    await fleet.workers["decode-0"].stop()
    await until(lambda: fleet.state("decode-0") == "dead")
    assert await states() == {"decode-0": "dead", "decode-1": "ready"}
    await asyncio.sleep(0.5)
    assert await states() == {"decode-0": "dead", "decode-1": "ready"}
    metrics = (await fleet.http.get("/metrics")).text
    assert 'baton_workers_wanted{role="decode"} 2.0' in metrics
    assert 'baton_workers{role="decode",state="dead"} 1.0' in metrics
    # A new life at the same address needs no word from the directory.
    worker = fleet.workers["decode-0"]
    worker.incarnation, worker.epoch = b"n" * 16, 2
    await worker.start(int(address.rsplit(":", 1)[1]))
    await until(lambda: fleet.state("decode-0") == "ready")
    workers = (await fleet.http.get("/fleet")).json()["workers"]
    assert workers[0]["epoch"] == 2
    assert workers[0]["incarnation"] == (b"n" * 16).hex()


async def test_ready_sends_a_token_through_every_live_pair(make_fleet):
    fleet = await make_fleet({"decode-0": None, "decode-1": None, "prefill-0": None})
    response = await fleet.http.get("/health/ready")
    assert response.status_code == 200
    pairs = {(pair["prefill"], pair["decode"]) for pair in response.json()["pairs"]}
    assert pairs == {("prefill-0", "decode-0"), ("prefill-0", "decode-1")}
    probes = [s for worker in fleet.workers.values() for s in worker.submissions]
    assert all(probe.probe and probe.sampling.max_tokens == 2 for probe in probes)
    assert all(probe.prefill.worker_id == "prefill-0" for probe in probes)
    for _ in range(5):
        await fleet.http.get("/health/ready")
    assert sum(len(worker.submissions) for worker in fleet.workers.values()) == 2
    page = (await fleet.http.get("/metrics")).text
    values = samples(page)
    assert not any(name[0] == "baton_requests_total" for name in values)
    assert values.get(("baton_time_to_first_token_seconds_count",), 0) == 0
    assert not any(name[0] == "baton_prompt_tokens_total" for name in values)


async def test_not_ready_names_the_pair_that_fails(make_fleet):
    fleet = await make_fleet(
        {"decode-0": None, "decode-1": Script(fail=("numerics_error", "NaN", False))}
    )
    response = await fleet.http.get("/health/ready")
    assert response.status_code == 503
    failed = [pair for pair in response.json()["pairs"] if not pair["ok"]]
    assert [(pair["decode"], pair["error"]) for pair in failed] == [("decode-1", "NaN")]
    empty = await make_fleet({})
    assert (await empty.http.get("/health/ready")).status_code == 503
    assert (await empty.http.get("/health/live")).json() == {"status": "live"}


async def test_a_request_can_be_explained(fleet):
    response = await fleet.chat()
    story = (await fleet.http.get(f"/fleet/requests/{response.json()['id']}")).json()
    assert story["state"] == "ended"
    assert story["attempts"] == 1
    assert {c["mode"] for c in story["candidates"]} == {"colocated", "disaggregated"}
    assert len(story["candidates"]) == 3
    costs = [candidate["cost_s"] for candidate in story["candidates"]]
    assert costs == sorted(costs)
    assert set(story["chosen"]["terms"]) == {
        *(
            "queue_s",
            "adapter_s",
            "bring_s",
            "pull_s",
            "compute_s",
            "transfer_s",
            "room_s",
            "decode_s",
            "slowdown_s",
            "crowding_s",
        )
    }
    assert sum(story["chosen"]["terms"].values()) == pytest.approx(
        story["chosen"]["cost_s"], abs=1e-5
    )
    events = [entry["event"] for entry in story["timeline"]]
    assert events[0] == "arrived"
    assert events[-1] == "finished"
    assert [entry["at_s"] for entry in story["timeline"]] == sorted(
        entry["at_s"] for entry in story["timeline"]
    )
    assert story["route"]["decode"] in ("decode-0", "prefill-0")
    assert story["finish_reasons"] == ["length"]


async def test_records_are_bounded(make_fleet):
    fleet = await make_fleet({"decode-0": None}, kept_records=3)
    ids = [(await fleet.chat(max_tokens=1)).json()["id"] for _ in range(5)]
    statuses = [(await fleet.http.get(f"/fleet/requests/{i}")).status_code for i in ids]
    assert statuses == [404, 404, 200, 200, 200]
    await until(lambda: fleet.lane.gateway.in_flight == 0)


async def test_the_first_token_of_a_whole_response_is_counted_when_it_comes(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.1)})
    assert (await fleet.chat(max_tokens=10)).status_code == 200
    await until(lambda: fleet.lane.gateway.in_flight == 0)
    values = samples((await fleet.http.get("/metrics")).text)
    waited_s = values["baton_time_to_first_token_seconds_sum", ("tenant", "default")]
    took_s = values["baton_e2e_seconds_sum", ("tenant", "default")]
    assert waited_s < took_s / 2


async def test_metrics_count_each_request_once_and_phases_add_up(fleet):
    for index in range(6):
        await fleet.chat(stream=index % 2 == 0)
    await fleet.chat(temperature=-1)
    await until(lambda: fleet.lane.gateway.in_flight == 0)
    values = samples((await fleet.http.get("/metrics")).text)
    tenant = ("tenant", "default")
    ok = ("baton_requests_total", ("endpoint", "chat"), ("status", "200"), tenant)
    assert values[ok] == 6
    bad = (
        "baton_requests_total", ("endpoint", "chat"), ("status", "400"), ("tenant", "all")
    )  # fmt: skip
    assert values[bad] == 1
    assert values["baton_generation_tokens_total", tenant] == 24
    assert values["baton_time_to_first_token_seconds_count", tenant] == 6
    model = ("model_name", MODEL)
    assert values["vllm:generation_tokens_total", ("engine", "0"), model] == 24
    phases = sum(v for name, v in values.items() if name[0] == "baton_phase_seconds_sum")
    assert phases == pytest.approx(values["baton_e2e_seconds_sum", tenant], rel=0.02)
    by_source = [v for name, v in values.items() if name[0] == "baton_prefix_tokens_total"]
    assert sum(by_source) == values["baton_prompt_tokens_total", tenant]
    ready = ("baton_workers", ("role", "decode"), ("state", "ready"))
    assert values[ready] == 1


async def test_models_carry_the_artifact_record(fleet, model):
    listed = (await fleet.http.get("/v1/models")).json()
    assert [entry["id"] for entry in listed["data"]] == [MODEL, "alias"]
    one = (await fleet.http.get("/v1/models/alias")).json()
    assert one["id"] == "alias"
    assert one["root"] == MODEL
    assert one["architecture"] == "llama"
    assert one["context_tokens"] == 8192
    assert one["dtype"] == "bf16"
    assert one["quantisation"] == "Q4_1"
    assert one["license"] == "apache-2.0"
    assert one["weights_digest"] == model.artifact.weights_digest.hex()
    assert {"source", "revision", "tokenizer_digest", "template_digest"} <= set(one)
    assert "generation_defaults" in one


async def test_tokenize_and_detokenize(fleet):
    answer = (await fleet.http.post("/tokenize", json={"prompt": "Hello, world!"})).json()
    assert answer == {"count": 4, "max_model_len": 8192, "tokens": [19556, 28, 905, 17]}
    back = await fleet.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "Hello, world!"}
    chat = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    answer = (await fleet.http.post("/tokenize", json=chat)).json()
    assert answer["token_strs"][0] == "<|im_start|>"
    for bad in ({}, {"prompt": "a", "messages": chat["messages"]}, {"prompt": 5}):
        assert (await fleet.http.post("/tokenize", json=bad)).status_code == 400
    for bad in ({"tokens": [49152]}, {"tokens": "a"}, {}):
        assert (await fleet.http.post("/detokenize", json=bad)).status_code == 400


async def test_docs_describe_the_bodies(fleet):
    assert (await fleet.http.get("/docs")).status_code == 200
    document = (await fleet.http.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("ChatBody")
    assert "logit_bias" in document["components"]["schemas"]["ChatBody"]["properties"]
    assert "Message" in document["components"]["schemas"]


async def test_targets_are_prometheus_http_discovery(make_fleet):
    from tests.router.conftest import record_of

    fleet = await make_fleet({"decode-0": None})
    worker = fleet.workers["decode-0"]
    fleet.directory.put(record_of("decode-0", worker.address, metrics_address="127.0.0.1:9"))
    await asyncio.sleep(0.05)
    targets = (await fleet.http.get("/fleet/targets")).json()
    assert targets[0]["labels"]["component"] == "router"
    assert targets[1]["targets"] == ["127.0.0.1:9"]
    assert targets[1]["labels"]["worker"] == "decode-0"


async def test_silence_after_the_first_token_is_broken_by_comments(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.3)}, keep_alive_s=0.1)
    response = await fleet.chat(stream=True, max_tokens=2)
    assert ": keep-alive" in response.text
    assert events_of(response.text)[-1] == "[DONE]"


async def test_a_slow_reader_gets_tokens_together(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.001)})
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 200, "stream": True, "logprobs": 0}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
        "root_path": "",
        "scheme": "http",
        "asgi": {"version": "3.0"},
        "server": ("x", 80),
        "client": ("x", 1),
    }
    asked = asyncio.Event()
    writes: list[bytes] = []

    async def receive():
        if asked.is_set():
            await asyncio.Event().wait()
        asked.set()
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message):
        writes.append(message.get("body", b""))
        await asyncio.sleep(0.05)  # the connection takes a write only now and then

    await fleet.app(scope, receive, send)
    events = events_of(b"".join(writes).decode())
    assert sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in events[:-1]) == 200
    assert len(events) < 60


async def test_fastapi_adds_no_spans_of_its_own_to_those_of_the_router(fleet, monkeypatch):
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    async def get_models(app: FastAPI) -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.get("/v1/models")

    await get_models(FastAPI())
    assert [span.name for span in spans.get_finished_spans()] == ["GET"]
    spans.clear()
    await get_models(fleet.app)
    assert not spans.get_finished_spans()


async def test_the_process_stops_within_five_seconds_of_sigterm(tmp_path):
    config, port = tmp_path / "fleet.yaml", free_port()
    config.write_text(yaml.safe_dump({"port": port, "served_model_name": MODEL}))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "router", "--config", str(config)),
        env={**os.environ, "BATON_REDIS_URL": "redis://127.0.0.1:1/0"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(200):
                try:
                    response = await client.get("/health/live")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.1)
            assert response.status_code == 200
            refused = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
            assert refused.status_code == 503
        told_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert time.monotonic() - told_s < 5
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
def rare_collections():
    """Collect garbage as routers do: a full collection of all that pytest holds takes a second."""
    thresholds = gc.get_threshold()
    collect_rarely(ROUTER_OBJECTS)
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


async def test_large_bodies_hold_up_nobody(fleet, rare_collections):
    """While large bodies are read and refused, the loop goes round."""
    message = {"role": "user", "content": ""}
    words = "the quick brown fox jumps over the lazy dog. "
    calls = [
        ("/tokenize", {"prompt": words * 60_000}),
        ("/detokenize", {"tokens": [1000] * 300_000}),
        ("/v1/completions", {"model": MODEL, "prompt": [words * 300] * 64}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [message] * 60_000}),
    ]
    for path, body in calls:
        content, gaps_s, ended = json.dumps(body).encode(), [], asyncio.Event()

        async def beat(gaps_s=gaps_s, ended=ended):
            last_s = time.monotonic()
            while not ended.is_set():
                await asyncio.sleep(0.005)
                gaps_s.append(time.monotonic() - last_s)
                last_s = time.monotonic()

        beating = asyncio.create_task(beat())
        response = await fleet.http.post(path, content=content)
        ended.set()
        await beating
        assert response.status_code in (200, 400)
        assert max(gaps_s) < 1.0, path


async def test_a_busy_pair_is_ready_and_a_stuck_one_is_not(make_fleet):
    slow = Script(prefill_s=30, streams=8)
    fleet = await make_fleet({"decode-0": slow}, probe_timeout_s=0.5, probe_every_s=0)
    response = await fleet.http.get("/health/ready")
    assert response.status_code == 200
    [pair] = response.json()["pairs"]
    assert (pair["ok"], pair["busy"]) == (True, True)
    assert fleet.workers["decode-0"].submissions[0].priority == -(2**31)
    slow.streams = 0
    await asyncio.sleep(0.3)
    response = await fleet.http.get("/health/ready")
    assert response.status_code == 503
    [pair] = response.json()["pairs"]
    assert (pair["ok"], pair["busy"]) == (False, False)


async def test_every_response_has_an_id_and_a_call_of_many_prompts_is_found_by_its_own(fleet):
    many = await fleet.complete(["a", "b"], max_tokens=1)
    story = (await fleet.http.get(f"/fleet/requests/{many.headers['x-request-id']}")).json()
    assert [part["id"] for part in story["parts"]] == [f"{story['id']}-0", f"{story['id']}-1"]
    for method, path, status in [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/fleet", 200),
        ("POST", "/tokenize", 400),
    ]:
        response = await fleet.http.request(method, path)
        assert response.status_code == status
        assert response.headers["x-request-id"].startswith("req-")
    assert (await fleet.chat()).headers["x-request-id"].startswith("chatcmpl-")


async def test_a_fault_is_500_with_an_id(fleet, monkeypatch):
    monkeypatch.setattr(fleet.lane.gateway.workers, "describe", lambda: 1 / 0)
    response = await fleet.http.get("/fleet")
    assert response.status_code == 500
    assert response.headers["x-request-id"].startswith("req-")


async def test_what_is_kept_of_an_ended_request_is_its_story_not_its_tokens(make_fleet):
    fleet = await make_fleet({"decode-0": None})
    response = await fleet.chat(
        max_tokens=5, logprobs=True, top_logprobs=3, logit_bias={"5": 1}, guided_regex=".*"
    )
    name, counted = response.json()["id"], response.json()["usage"]
    [active] = fleet.lane.gateway.kept._active.values()
    await until(lambda: not active.request.prompt)
    assert [choice.token_ids for choice in active.record.choices] == [[]]
    sampling = active.request.sampling
    assert (len(sampling.grammar), sampling.logit_bias) == (1, ())
    story = (await fleet.http.get(f"/fleet/requests/{name}")).json()
    assert story["prompt_tokens"] == counted["prompt_tokens"] > 0
    assert story["completion_tokens"] == 5


async def test_a_delivered_request_is_counted_though_its_worker_dies_unconfirmed(make_fleet):
    fleet = await make_fleet({"decode-0": Script(lose_end=True)})
    await fleet.chat()
    assert fleet.lane.gateway.in_flight == 1
    await fleet.workers["decode-0"].stop()
    await until(lambda: fleet.lane.gateway.in_flight == 0)
    values = samples((await fleet.http.get("/metrics")).text)
    assert values["baton_generation_tokens_total", ("tenant", "default")] == 4
