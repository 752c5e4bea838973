"""What an API key shows of others, and how urgent its requests may be."""

import asyncio
import hmac

import pytest
import typer

from baton.config.clients import ApiKeyConfig
from baton.config.fleet_file import FleetConfig
from baton.types.errors import UnauthorizedError
from baton.wire import fleet_token
from baton.wire.fleet_token import FleetToken
from fleet.cli.common import get_json
from fleet.local.state import FleetState
from fleet.process_key import ProcessKey
from router.tenants import access
from router.tenants.access import AccessControl, api_keys_of
from router.tenants.policies import TenantPolicies
from tests.router.emulated_worker import Script

KEYS = {
    "key-of-one": ApiKeyConfig(tenant="one"),
    "key-of-two": ApiKeyConfig(tenant="two"),
    "key-of-batch": ApiKeyConfig(tenant="batch", min_priority=10),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator", min_priority=-5),
}
ONE, TWO, BATCH, OPS, FLEET = (
    {"authorization": f"Bearer {key}"} for key in (*KEYS, "secret")
)  # the last is the fleet's token


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0.001)}, api_keys=KEYS)


async def test_what_is_told_of_a_request_is_for_its_tenant(fleet):
    """Defect 13: any key was told of every tenant's requests."""
    alone = (await fleet.chat(headers=ONE)).headers["x-request-id"]
    many = (await fleet.complete(["a", "b"], headers=ONE)).headers["x-request-id"]
    for name in (alone, many, f"{many}-0"):
        url = f"/fleet/requests/{name}"
        assert (await fleet.http.get(url, headers=ONE)).status_code == 200
        assert (await fleet.http.get(url, headers=OPS)).status_code == 200
        assert (await fleet.http.get(url)).status_code == 401
        other = await fleet.http.get(url, headers=TWO)
        never = await fleet.http.get("/fleet/requests/never-was", headers=TWO)
        assert (other.status_code, other.json()) == (404, never.json())


@pytest.mark.parametrize("path", ["/metrics", "/fleet", "/fleet/targets"])
async def test_metrics_and_workers_are_for_operators(fleet, path):
    """Defect 13: they needed no key, and name tenants and volumes."""
    get = fleet.http.get
    assert (await get(path)).status_code == 401
    assert (await get(path, headers={"authorization": "Bearer"})).status_code == 401
    refused = await get(path, headers=ONE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_needed")
    assert (await get(path, headers=OPS)).status_code == 200
    assert (await get(path, headers=FLEET)).status_code == 200


async def test_without_keys_all_is_open(make_fleet):
    fleet = await make_fleet({"decode-0": None})
    for path in ("/metrics", "/fleet", "/fleet/targets", "/health/ready"):
        assert (await fleet.http.get(path)).status_code == 200


async def test_an_empty_fleet_token_is_no_key(make_fleet):
    fleet = await make_fleet({}, api_keys=KEYS, fleet_token=FleetToken(""))
    for value in ("Bearer", ""):
        answer = await fleet.http.get("/fleet", headers={"authorization": value})
        assert answer.status_code == 401


async def test_health_is_open_and_strangers_start_no_urgent_work(make_fleet):
    """Defect 13: anyone began rounds of requests that overtook all others."""
    fleet = await make_fleet({"decode-0": None}, api_keys=KEYS, probe_every_s=1.0)
    worker = fleet.workers["decode-0"]
    assert (await fleet.http.get("/health/live")).status_code == 200
    calls = [fleet.http.get("/health/ready") for _ in range(20)]
    assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
    assert [probe.priority for probe in worker.submissions] == [0]
    await asyncio.sleep(1.05)
    told = (await fleet.http.get("/health/ready", headers=OPS)).json()
    assert told["age_s"] > 1.0  # the last result; a new round has only begun
    await asyncio.sleep(0.1)
    assert [probe.priority for probe in worker.submissions] == [0, -(2**31)]
    assert (await fleet.http.get("/health/ready")).json()["age_s"] < 1.0


async def test_workers_that_come_and_go_are_probed_now_and_then(make_fleet, monkeypatch):
    """Defect 13: each change of the workers and each call were a round of probes."""
    monkeypatch.setattr("router.routing.requests.readiness._PAUSES", 10_000)  # a long round
    fleet = await make_fleet({"decode-0": None}, probe_pause_s=0.4)
    await fleet.http.get("/health/ready")
    await fleet.add("decode-1")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    told = (await fleet.http.get("/health/ready")).json()
    assert loop.time() - began_s > 0.2
    assert {pair["decode"] for pair in told["pairs"]} == {"decode-0", "decode-1"}


async def test_a_keys_requests_are_no_more_urgent_than_it_may_ask(fleet):
    """Defect 13: any key could ask for -2^31, past all tenants and the canary."""
    for key, priority in ((ONE, -1), (ONE, -(2**31)), (BATCH, 9), (OPS, -6)):
        refused = await fleet.chat(headers=key, priority=priority)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "priority"
        assert str(priority) in error["message"]
    for key, fields in ((ONE, {}), (ONE, {"priority": 3}), (BATCH, {}), (OPS, {"priority": -5})):
        assert (await fleet.chat(headers=key, **fields)).status_code == 200
    asked = [sent.priority for sent in fleet.workers["decode-0"].submissions]
    assert asked == [0, 3, 10, -5]


async def test_secrets_are_compared_in_constant_time(fleet, monkeypatch):
    """Defect 13: the fleet token was compared with ``==``."""
    compared = []

    def note(left, right):
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    monkeypatch.setattr(access, "compare_digest", note)
    monkeypatch.setattr(fleet_token, "compare_digest", note)
    await fleet.http.get("/fleet", headers=ONE)
    own = fleet.router.access.own_key.encode()
    assert [left for left, _ in compared] == [b"secret", own]

    class Details:
        invocation_metadata = ((fleet_token.TOKEN_KEY, "secret"), ("other", b"x"))

    async def go_on(_):
        return "called"

    compared.clear()
    right = fleet_token.TokenInterceptor(FleetToken("secret"))
    assert await right.intercept_service(go_on, Details) == "called"
    assert compared == [(b"secret", b"secret")]
    wrong = fleet_token.TokenInterceptor(FleetToken("other"))
    assert await wrong.intercept_service(lambda _: asyncio.sleep(0), Details) != "called"


def test_a_key_is_found_without_a_look_at_the_others():
    """Ten thousand keys took 1.4 ms of each call."""

    class Keys(dict):
        def __iter__(self):
            raise AssertionError("all keys are read")

        items = values = keys = __iter__

    keys = Keys({f"key-{number}": ApiKeyConfig(tenant=f"t{number}") for number in range(10_000)})
    control = AccessControl(keys, FleetToken("secret"), TenantPolicies())
    for number in (0, 9_999):
        headers = {"authorization": f"Bearer key-{number}"}
        assert control.of(headers).tenant == f"t{number}"
    for wrong in ("", "key-", "key-10000", "KEY-1", "é"):
        with pytest.raises(UnauthorizedError):
            control.of({"x-api-key": wrong})


def test_which_fleets_require_a_key(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("key-in-a-file: one\n")
    line = {"key-of-one": ApiKeyConfig(tenant="one")}
    for fields, keys in (
        ({}, None),
        ({"api_keys": line}, {"key-of-one"}),
        ({"clients": {"api_keys_file": str(file)}}, {"key-in-a-file"}),
        ({"clients": {"api_keys_file": "redis"}}, set()),
        ({"clients": {"api_keys_file": "redis"}, "api_keys": line}, {"key-of-one"}),
    ):
        found = api_keys_of(FleetConfig.model_validate(fields))
        assert (None if found is None else set(found)) == keys


@pytest.mark.parametrize("what", ["load", "unload"])
async def test_adapters_are_loaded_and_unloaded_by_operators_only(fleet, what, tmp_path):
    """Any tenant's key could load any folder for everybody, and unload others' adapters."""
    body = {"lora_name": "pirate", "lora_path": str(tmp_path)}
    path = f"/v1/{what}_lora_adapter"
    for key in (ONE, BATCH):
        assert (await fleet.http.post(path, json=body, headers=key)).status_code == 403
    assert (await fleet.http.post(path, json=body)).status_code == 401
    assert (await fleet.http.post(path, json=body, headers=OPS)).status_code not in (401, 403)


async def test_baton_status_needs_no_key(fleet):
    """Defect 13: what ``/fleet`` asks for, ``baton status`` has in the fleet's state."""
    me = ProcessKey(pid=1, started_s=0.0)
    fields = dict.fromkeys(("run_folder", "redis_url", "log_dir", "config_file"), "")
    state = FleetState(
        name="x", fleet="x", supervisor=me, url=fleet.url, fleet_token="secret", **fields
    )
    answer = await asyncio.to_thread(get_json, state, "/fleet")
    assert [worker["id"] for worker in answer["workers"]] == ["decode-0"]
    listed = await asyncio.to_thread(get_json, state, "/fleet/requests", limit=5, order="slowest")
    assert isinstance(listed["requests"], list)
    with pytest.raises(typer.Exit):
        await asyncio.to_thread(get_json, state, "/fleet/requests/never-was")
