"""What load balancers, benches and ported probes ask: in vLLM's shapes."""

import asyncio
import json

from baton.config.clients import ApiKeyConfig
from tests.engine.vllm.record import RECORDED
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script
from tests.router.operators.test_operations import samples

KEYS = {
    "key-of-one": ApiKeyConfig(tenant="one"),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator"),
}


async def test_health_and_ping_are_200_and_empty_while_a_worker_is_ready(make_fleet):
    fleet = await make_fleet({}, api_keys=KEYS)
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        refused = await fleet.http.request(method, path)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
    worker = await fleet.add("decode-0")
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = await fleet.http.request(method, path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert worker.submissions == []  # it costs the workers nothing
    await worker.stop()
    await until(lambda: fleet.state("decode-0") != "ready")
    assert (await fleet.http.get("/health")).status_code == 503


async def test_version_is_open_and_load_is_for_operators(make_fleet):
    fleet = await make_fleet({"decode-0": None}, api_keys=KEYS)
    assert (await fleet.http.get("/version")).json().keys() == {"version"}
    assert (await fleet.http.get("/load")).status_code == 401
    one, ops = ({"authorization": f"Bearer {key}"} for key in KEYS)
    assert (await fleet.http.get("/load", headers=one)).status_code == 403
    assert (await fleet.http.get("/load", headers=ops)).json() == {"server_load": 0}


async def test_load_counts_what_runs(make_fleet):
    fleet = await make_fleet({"decode-0": Script(prefill_s=0.5)})
    chats = [asyncio.create_task(fleet.chat()) for _ in range(3)]
    await until(lambda: len(fleet.workers["decode-0"].submissions) == 3)
    assert (await fleet.http.get("/load")).json() == {"server_load": 3}
    await asyncio.gather(*chats)
    await until(lambda: fleet.lane.gateway.in_flight == 0)
    assert (await fleet.http.get("/load")).json() == {"server_load": 0}


async def test_vllms_gauges_are_sums_over_the_workers(make_fleet):
    fleet = await make_fleet(
        {"decode-0": Script(streams=3), "decode-1": Script(streams=4)}, window_requests=1
    )
    slots = list(fleet.lane.gateway.workers)
    await until(lambda: all(slot.link.status.running for slot in slots))
    values = samples((await fleet.http.get("/metrics")).text)
    name = (("engine", "0"), ("model_name", fleet.lane.model.names[0]))
    assert values["vllm:num_requests_running", *name] == 7
    assert values["vllm:num_requests_waiting", *name] == 0
    assert values["vllm:kv_cache_usage_perc", *name] == 8 / 1024
    assert values["baton_fleet_running_requests",] == 7


async def test_server_info_has_vllms_names_and_is_for_operators(make_fleet):
    fleet = await make_fleet({"decode-0": None}, api_keys=KEYS)
    one, ops = ({"authorization": f"Bearer {key}"} for key in KEYS)
    assert (await fleet.http.get("/server_info", headers=one)).status_code == 403
    answer = await fleet.http.get("/server_info?config_format=json", headers=ops)
    recorded = json.loads((RECORDED / "server_info.json").read_text())  # of a real vLLM
    config = answer.json()["vllm_config"]
    for place, key in (("model_config", "max_model_len"), ("cache_config", "block_size")):
        assert isinstance(recorded["vllm_config"][place][key], int)
        assert config[place][key] == {"max_model_len": 8192, "block_size": 16}[key]
    assert answer.json().keys() == {"vllm_config", "vllm_env", "system_env", "models"}
    assert answer.json()["models"] == {MODEL: config}
    text = (await fleet.http.get("/server_info", headers=ops)).json()["vllm_config"]
    assert "'max_model_len': 8192" in text
