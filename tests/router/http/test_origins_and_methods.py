"""Browsers and probes: CORS by config, HEAD for probes."""

import pytest

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from baton.config.fleet_file import FleetConfig

HERE, THERE = "https://chat.example.com", "https://evil.example.com"
KEYS = {"key-of-one": ApiKeyConfig(tenant="one")}


def preflight(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }


async def fleet_of(make_fleet, *origins: str, **more):
    return await make_fleet(
        {"decode-0": None}, clients=ClientLimitsConfig(cors_origins=origins), **more
    )


async def test_without_config_no_page_is_let_in(make_fleet):
    fleet = await make_fleet({"decode-0": None})
    answer = await fleet.chat(headers={"origin": HERE})
    assert answer.status_code == 403  # test_web_pages.py
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = await fleet.http.options("/v1/chat/completions", headers=preflight(HERE))
    assert not [name for name in asked.headers if name.startswith("access-control")]


async def test_a_page_of_a_named_origin_may_call_and_read_and_others_may_not(make_fleet):
    fleet = await fleet_of(make_fleet, HERE, api_keys=KEYS)
    asked = await fleet.http.options("/v1/chat/completions", headers=preflight(HERE))
    assert asked.status_code == 200  # without a key: browsers send none here
    assert asked.headers["access-control-allow-origin"] == HERE
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    key = {"authorization": "Bearer key-of-one", "origin": HERE}
    for answer in (
        await fleet.chat(headers=key),
        await fleet.chat(headers=key, stream=True),
        await fleet.chat(headers={"origin": HERE}),  # 401 is for the page to read
        await fleet.http.get("/nowhere", headers={"origin": HERE}),
    ):
        assert answer.headers["access-control-allow-origin"] == HERE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
    refused = await fleet.http.options("/v1/chat/completions", headers=preflight(THERE))
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    answer = await fleet.chat(headers={**key, "origin": THERE})
    assert "access-control-allow-origin" not in answer.headers


async def test_any_origin(make_fleet):
    fleet = await fleet_of(make_fleet, "*")
    answer = await fleet.chat(headers={"origin": THERE})
    assert answer.headers["access-control-allow-origin"] == "*"


def test_any_origin_beside_keys_must_be_meant():
    keys = {"api_keys": {"key-of-one": "one"}}
    with pytest.raises(ValueError, match="cors_any_origin_with_keys: true"):
        FleetConfig.model_validate({**keys, "clients": {"cors_origins": ["*"]}})
    meant = {"cors_origins": ["*"], "cors_any_origin_with_keys": True}
    assert FleetConfig.model_validate({**keys, "clients": meant}).clients.cors_origins == ("*",)
    for clients in ({"cors_origins": ["*"]}, {"cors_origins": [HERE, "tauri://localhost"]}):
        assert FleetConfig.model_validate({"clients": clients}).clients.cors_origins
    FleetConfig.model_validate({**keys, "clients": {"cors_origins": [HERE]}})


@pytest.mark.parametrize("origin", ["example.com", HERE + "/", "https://*.example.com", "", 5])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ValueError, match="cors_origins"):
        FleetConfig.model_validate({"clients": {"cors_origins": [origin]}})


async def test_probes_may_ask_with_head_and_other_paths_say_what_they_take(make_fleet):
    fleet = await make_fleet({"decode-0": None})
    for path in ("/health", "/ping", "/health/live", "/health/ready"):
        head, get = await fleet.http.head(path), await fleet.http.get(path)
        assert head.status_code == get.status_code == 200
        assert head.content == b""
    for path, allowed in {"/v1/chat/completions": "POST", "/v1/models": "GET"}.items():
        for method in ("HEAD", "PUT"):
            answer = await fleet.http.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed), path
