"""A router without API keys and web pages: cross-site requests, DNS rebinding, changes."""

from socket import gethostname

import httpx
import pytest

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from baton.config.fleet_file import FleetConfig
from tests.router.conftest import OPS

PAGE = "https://chat.example.com"
CROSS = {"sec-fetch-site": "cross-site"}
REBOUND = ("rebound.example", "localhost.evil.com", "127.0.0.1.evil.com", "127.0.0.1@evil.com")
OWN = ("127.0.0.1", "127.8.9.1:5", "localhost", "LOCALHOST.", "a.localhost:1", "[::1]:80", "node-1")
PATHS = ("/v1/models", "/fleet/requests", "/metrics", "/v1/files", "/", "/nowhere")


async def statuses(fleet, headers: dict, paths=PATHS) -> set[int]:
    return {(await fleet.http.get(path, headers=headers)).status_code for path in paths}


async def test_a_router_answers_to_names_that_no_page_can_have(make_fleet):
    fleet = await make_fleet({"decode-0": None}, clients=ClientLimitsConfig(hosts=("Llm.corp",)))
    for host in (*OWN, "llm.corp:8000"):
        assert (await fleet.chat(headers={"host": host})).status_code == 200, host
    for host in (*REBOUND, "10.0.0.5", "a b", "[::1", "llm.corp.evil.com", 255 * "a"):
        assert await statuses(fleet, {"host": host}) == {403}, host
        answer = await fleet.chat(headers={"host": host, "origin": f"http://{host}"})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "foreign_page"
        assert answer.headers["x-request-id"]
        assert "clients: {hosts:" in answer.text
        probes = ("/health", "/health/live", "/health/ready", "/ping")
        assert await statuses(fleet, {"host": host}, probes) == {200}
    refused = await fleet.http.post("/v1/messages", json={}, headers={"host": REBOUND[0]})
    assert refused.json()["type"] == "error"  # Anthropic's format


async def test_beyond_loopback_addresses_and_the_own_name_are_the_routers(make_fleet):
    fleet = await make_fleet({}, host="0.0.0.0")
    for host in (*OWN, "10.0.0.5:8000", "[fd00::1]", gethostname()):
        assert await statuses(fleet, {"host": host}, ("/v1/models",)) == {200}, host
    for host in REBOUND:
        assert await statuses(fleet, {"host": host}, ("/v1/models",)) == {403}, host


async def test_foreign_pages_may_not_call(make_fleet):
    fleet = await make_fleet({"decode-0": None})
    here = fleet.url
    port = here.rpartition(":")[2]
    for headers in (
        {"origin": PAGE},
        {"origin": "null"},
        {"origin": "http://[bad"},
        {"origin": f"http://localhost:{port}"},  # another origin than 127.0.0.1
        {"origin": "http://127.0.0.1:3000"},
        {"origin": PAGE, "sec-fetch-site": "same-origin"},
        {"origin": here, **CROSS},
        {"origin": here, "sec-fetch-site": "same-site"},
        CROSS,
    ):
        assert (await fleet.chat(headers=headers)).status_code == 403, headers
        assert await statuses(fleet, headers) == {403}
    for headers in (
        {},  # curl and SDKs
        {"origin": here},
        {"origin": here.upper()},
        {"origin": here, "sec-fetch-site": "same-origin"},
        {"origin": f"https://proxy.local:{port}", "host": "proxy.local"}
        | {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ):
        assert (await fleet.chat(headers=headers)).status_code == 200, headers
    link = CROSS | {"sec-fetch-mode": "navigate"}
    assert (await fleet.http.get("/", headers=link)).status_code == 200
    assert (await fleet.http.post("/tokenize", headers=link, json={})).status_code == 403


async def test_pages_of_named_origins_may_call(make_fleet):
    fleet = await make_fleet({"decode-0": None}, clients=ClientLimitsConfig(cors_origins=(PAGE,)))
    asked = {"origin": PAGE, **CROSS, "access-control-request-method": "POST"}
    assert (await fleet.http.options("/v1/chat/completions", headers=asked)).status_code == 200
    assert (await fleet.chat(headers={"origin": PAGE, **CROSS})).status_code == 200
    assert (await fleet.chat(headers={"origin": "https://evil.example"})).status_code == 403
    rebound = await fleet.chat(headers={"origin": PAGE, "host": REBOUND[0]})
    assert rebound.status_code == 403


async def test_with_keys_and_for_the_fleet_token_no_name_is_checked(make_fleet):
    """A page has neither, and other paths hold nothing of tenants."""
    foreign = {"host": REBOUND[0], "origin": PAGE, **CROSS}
    fleet = await make_fleet({}, api_keys={"key-of-one": ApiKeyConfig(tenant="one")})
    assert await statuses(fleet, foreign | {"authorization": "Bearer key-of-one"}, PATHS[:1]) == {
        200
    }
    assert await statuses(fleet, foreign, PATHS[:1]) == {401}
    fleet = await make_fleet({})
    assert await statuses(fleet, foreign | OPS, ("/v1/models", "/metrics")) == {200}


@pytest.mark.parametrize("key", ["", "wrong", "secret"])
async def test_changes_of_the_fleet_need_the_fleet_token(make_fleet, key):
    fleet = await make_fleet({})
    http: httpx.AsyncClient = fleet.http
    headers = {"authorization": f"Bearer {key}"} if key else {}
    found = set()
    for method, path, body in (
        *(
            ("POST", "/fleet/models", {"verb": verb, "name": "x"})
            for verb in ("alias", "gate", "load")
        ),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"}),
        ("PUT", "/fleet/tenants/x", {"rpm": 1}),
        ("DELETE", "/fleet/tenants/x", None),
    ):
        answer = await http.request(method, path, json=body, headers=headers)
        found.add("let in" if answer.status_code not in (401, 403) else answer.status_code)
    assert found == ({"let in"} if key == "secret" else {401})


@pytest.mark.parametrize("host", ["a:1", "http://a", "", "*", "a/b"])
def test_what_is_no_host_is_refused(host):
    with pytest.raises(ValueError, match="hosts"):
        FleetConfig.model_validate({"clients": {"hosts": [host]}})


@pytest.mark.parametrize("proxy", ["proxy.example", "10.0.0.1/8", "", "10.0.0"])
def test_what_is_no_proxy_is_refused(proxy):
    with pytest.raises(ValueError, match="proxies"):
        FleetConfig.model_validate({"clients": {"proxies": [proxy]}})
