"""Sessions and rotating texts of calls, through the router."""

from collections.abc import Mapping
from typing import Any

import pytest

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from baton.config.logs import LogsConfig
from router.served_model import ServedModel
from router.sessions.identity import HEADERS, NO_SESSION, Session, session_of, session_of_headers
from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script

BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"
SECRET = "sk-ant-0123456789abcdef0123456789abcdef"
KEYS = {
    "key-of-team": ApiKeyConfig(tenant="team", log_text=True),
    "key-of-quiet": ApiKeyConfig(tenant="quiet"),
    "key-of-operator": ApiKeyConfig(tenant="operator", role="operator"),
}
RULES = "Follow these rules. " * 150


@pytest.fixture(scope="module")
def roomy(artifact) -> ServedModel:
    return ServedModel(artifact, (MODEL,), max_context_tokens=200_000, emulated=True)


def prompt_of(fleet, model) -> str:
    packed = fleet.workers["decode-0"].submissions[-1].prompt_tokens
    ids = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
    return model.tokenizer.decode(ids, skip_special_tokens=False)


def body_of(path: str, system: str) -> dict[str, Any]:
    user = {"role": "user", "content": "hi"}
    if path == "/v1/chat/completions":
        return {"messages": [{"role": "system", "content": system}, user], "max_tokens": 3}
    if path == "/v1/responses":
        return {"instructions": system, "input": "hi", "max_output_tokens": 3}
    blocks = [{"type": "text", "text": line} for line in system.split("\n")]
    return {"system": blocks, "messages": [user], "max_tokens": 3}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_the_billing_line_of_claude_code_is_no_part_of_the_prompt(
    make_fleet, model, path
) -> None:
    fleet = await make_fleet({"decode-0": Script()})
    for given in (BILLING.format("eb6c6"), BILLING.format("defa0"), BILLING.format("1")[:-1]):
        body = {"model": MODEL, **body_of(path, f"{given}\nYou are Claude Code.")}
        answer = await fleet.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-baton-ignored"] == "system.x-anthropic-billing-header"
        prompt = prompt_of(fleet, model)
        assert "x-anthropic" not in prompt
        assert "<|im_start|>system\nYou are Claude Code.<|im_end|>" in prompt


async def test_what_only_looks_like_the_billing_line_stays(make_fleet, model) -> None:
    fleet = await make_fleet({"decode-0": Script()})
    for system in (f"Never send {BILLING}", "x-anthropic-billing is a header", "cch=12345; hi"):
        body = {"model": MODEL, **body_of("/v1/chat/completions", system)}
        answer = await fleet.http.post("/v1/chat/completions", json=body)
        assert "x-baton-ignored" not in answer.headers
        assert system in prompt_of(fleet, model)


async def test_the_fleet_file_keeps_rotating_texts(make_fleet, model) -> None:
    clients = ClientLimitsConfig(remove_rotating_texts=False)
    fleet = await make_fleet({"decode-0": Script()}, clients=clients)
    answer = await fleet.http.post(
        "/v1/messages", json={"model": MODEL, **body_of("/v1/messages", BILLING.format("a1"))}
    )
    assert "x-baton-ignored" not in answer.headers
    assert "cch=a1;" in prompt_of(fleet, model)


async def test_a_spoiled_prompt_is_explained_with_its_text_where_that_may_be_seen(
    make_fleet, roomy
) -> None:
    fleet = await make_fleet(
        {"decode-0": Script()},
        served=roomy,
        api_keys=KEYS,
        logs=LogsConfig(format="json", requests=True),
    )
    for tenant, sees in (("team", True), ("quiet", False)):
        reports = [await told(fleet, tenant, f"It is {now}. {SECRET}") for now in (1159, 1200)]
        assert reports[0]["prompt_change"] is None
        change = reports[1]["prompt_change"]
        assert reports[1]["session"] == {"id": f"s-{tenant}", "source": "x-session-id"}
        assert change["at_token"] < 40
        assert change["lost_tokens"] > 400
        assert (
            f"changed at token {change['at_token']} of {change['of_tokens']:,}"
            in (change["sentence"])
        )
        assert ("earlier" in change, "now" in change) == (sees, sees)
        if sees:
            assert "It is 1159. [secret]" in change["earlier"]
            assert "It is 1200. [secret]" in change["now"]
    page = (await fleet.http.get("/metrics", headers=bearer("operator"))).text
    assert 'baton_changed_prompts_total{tenant="team"} 1' in page
    assert f'prompt_tokens_total{{tenant="team"}} {change["lost_tokens"]}' in page


async def told(fleet, tenant: str, now: str) -> dict[str, Any]:
    body = body_of("/v1/chat/completions", f"You are an agent. {now} {RULES}")
    headers = {**bearer(tenant), "x-session-id": f"s-{tenant}"}
    answer = await fleet.chat(headers=headers, **body)
    assert answer.status_code == 200, answer.text
    path = f"/fleet/requests/{answer.json()['id']}"
    report: dict[str, Any] = (await fleet.http.get(path, headers=bearer("operator"))).json()
    return report


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{tenant}"}


UUID = "0d9a6b9e-2d31-4f0b-9c55-3d0f7a1c7e11"
CLAUDE = f"user_0a1b_account__session_{UUID}"
CLAUDE_JSON = f'{{"device_id":"d","account_uuid":"","session_id":"{UUID}"}}'


@pytest.mark.parametrize(
    ("headers", "key", "user", "session"),
    [
        *(({name: UUID}, "k", CLAUDE, Session(UUID, name)) for name in HEADERS),
        ({}, "key-1", CLAUDE, Session("key-1", "prompt_cache_key")),
        ({}, None, CLAUDE, Session(UUID, "metadata.user_id")),
        ({}, None, CLAUDE_JSON, Session(UUID, "metadata.user_id")),
        ({"x-session-id": "not a word"}, "", "somebody", NO_SESSION),
        ({"x-session-id": "x" * 257}, None, None, NO_SESSION),
    ],
)
def test_sessions_have_the_names_of_several_clients(
    headers: Mapping[str, str], key: str | None, user: str | None, session: Session
) -> None:
    assert session_of(session_of_headers(headers), key, user) == session


async def test_the_expected_length_of_a_response_is_priced_and_shown(make_fleet) -> None:
    """As Dynamo's clients give it; never more than the response may have."""
    fleet = await make_fleet({"decode-0": Script(), "decode-1": Script()})
    priced = []
    for hints, most in ({}, 400), ({"osl": 390, "priority": 3}, 400), ({"osl": 390}, 4):
        answer = await fleet.chat(nvext={"agent_hints": hints, "mood": "x"}, max_tokens=most)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-baton-ignored"] == "nvext.mood"
        report = (await fleet.http.get(f"/fleet/requests/{answer.json()['id']}")).json()
        assert report["expected_tokens"] == hints.get("osl")
        priced.append(report["chosen"]["terms"]["decode_s"])
    assert priced[2] < priced[0] < priced[1]
    refused = await fleet.chat(nvext={"agent_hints": {"osl": 0}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "nvext.agent_hints.osl"
