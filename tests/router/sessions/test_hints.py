"""Hints of clients about a call: how long its KV stays, and its turn in the tenant's queue."""

import anthropic
import openai
import pytest

from baton.config.clients import ClientLimitsConfig
from fleet.cli.explain import _hints
from router.sessions.hints import FINAL_HEADER, HEADER_HINTS, HINTS, NO_HINTS, Hints, hints_of
from router.sessions.identity import FLOWS, HEADERS
from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script


@pytest.mark.parametrize(
    ("retention", "tier", "final", "hints"),
    [
        (None, None, False, NO_HINTS),
        ("in_memory", "auto", False, NO_HINTS),
        ("in-memory", "default", False, NO_HINTS),
        ("24h", None, False, Hints(86400)),
        ("90m", "scale", False, Hints(5400)),
        ("99999h", None, False, Hints(86400)),
        ("0s", None, False, Hints(0)),
        (None, "flex", False, Hints(None, 1)),
        ("1h", "priority", False, Hints(3600, -1)),
        ("1h", None, True, Hints(0)),
    ],
)
def test_hints_have_the_words_of_several_clients(retention, tier, final, hints) -> None:
    assert hints_of(retention, tier, final=final) == hints


def sent(fleet):
    submission = fleet.workers["decode-0"].submissions[-1]
    if not submission.HasField("retention"):
        return None
    return submission.retention.keep_s, submission.retention.share


async def report_of(fleet, answer):
    return (await fleet.http.get(f"/fleet/requests/{answer.json()['id']}")).json()


async def test_openais_retention_reaches_the_worker_and_the_report(make_fleet) -> None:
    fleet = await make_fleet({"decode-0": Script()})
    for given, keep_s in (None, None), ("24h", 86400), ("in_memory", None):
        answer = await fleet.chat(prompt_cache_retention=given)
        assert answer.status_code == 200 and "x-baton-ignored" not in answer.headers
        assert sent(fleet) == (None if keep_s is None else (keep_s, 0.25))
        hints = (await report_of(fleet, answer))["hints"]
        assert hints == (None if keep_s is None else {"keep_s": keep_s})
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 3, "service_tier": "flex"}
    body |= {"prompt_cache_retention": "24h"}
    answer = await fleet.http.post("/v1/responses", json=body)
    assert answer.json()["service_tier"] == "flex" and sent(fleet) == (86400, 0.25)
    refused = await fleet.chat(prompt_cache_retention="for ever")
    assert refused.json()["error"]["param"] == "prompt_cache_retention"


@pytest.mark.parametrize(
    "lane", [{"external": "vllm"}, {"clients": ClientLimitsConfig(pinned_share=0)}]
)
async def test_a_lane_that_cannot_keep_kv_says_so(make_fleet, lane) -> None:
    fleet = await make_fleet({"decode-0": Script()}, **lane)
    answer = await fleet.chat(prompt_cache_retention="24h")
    assert answer.headers["x-baton-ignored"] == "prompt_cache_retention.24h"
    hints = (await report_of(fleet, answer))["hints"]
    assert hints == {"keep_s": 86400, "kept": False}
    assert _hints(hints) == "hints of the client: its KV cannot be kept 86400 s"
    plain = await fleet.chat(service_tier="flex")
    assert "x-baton-ignored" not in plain.headers


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
URLS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def agent(**hints):
    return {"nvext": {"agent_hints": hints}}


# Hint, API, what is sent, and what becomes of it: a part of the report, the name in
# x-baton-ignored, or the field of an error.
WHOLE_TABLE = [
    ("osl", "chat", agent(osl=9), {"expected_tokens": 9}),
    ("osl", "chat", agent(osl=0), ValueError("nvext.agent_hints.osl")),
    ("priority", "chat", agent(priority=7), {"hints": {"turn": -7}}),
    ("priority", "chat", agent(priority=-2), {"hints": {"turn": 2}}),
    ("priority", "chat", agent(priority=7) | {"service_tier": "flex"}, {"hints": {"turn": 1}}),
    ("priority", "chat", agent(priority="x"), ValueError("nvext.agent_hints.priority")),
    ("strict_priority", "chat", agent(strict_priority=0), {"hints": None}),
    ("strict_priority", "chat", agent(strict_priority=3), "nvext.agent_hints.strict_priority"),
    ("latency_sensitivity", "chat", agent(latency_sensitivity=0.0), {"hints": None}),
    (
        "latency_sensitivity",
        "chat",
        agent(latency_sensitivity=2.5),
        "nvext.agent_hints.latency_sensitivity",
    ),
    ("speculative_prefill", "chat", agent(speculative_prefill=False), {"hints": None}),
    (
        "speculative_prefill",
        "chat",
        agent(speculative_prefill=True),
        "nvext.agent_hints.speculative_prefill",
    ),
    ("", "chat", agent(mood=1), "nvext.agent_hints.mood"),
    ("prompt_cache_key", "chat", {"prompt_cache_key": "k"}, {"session": "k"}),
    ("prompt_cache_key", "responses", {"prompt_cache_key": "k"}, {"session": "k"}),
    (
        "prompt_cache_options",
        "responses",
        {"prompt_cache_options": {"x": 1}},
        "prompt_cache_options",
    ),
    ("prompt_cache_options", "chat", {"prompt_cache_options": {"x": 1}}, "prompt_cache_options"),
    (
        "prompt_cache_retention",
        "chat",
        {"prompt_cache_retention": "1h"},
        {"hints": {"keep_s": 3600}},
    ),
    (
        "prompt_cache_retention",
        "responses",
        {"prompt_cache_retention": "x"},
        ValueError("prompt_cache_retention"),
    ),
    (
        "cache_control",
        "messages",
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"hints": {"keep_s": 3600}},
    ),
    (
        "cache_control",
        "messages",
        {"cache_control": {"type": "ephemeral", "ttl": "2h"}},
        ValueError("cache_control.ttl"),
    ),
    ("service_tier", "chat", {"service_tier": "flex"}, {"hints": {"turn": 1}}),
    ("service_tier", "chat", {"service_tier": "auto"}, {"hints": None}),
    ("service_tier", "chat", {"service_tier": "scale"}, "service_tier.scale"),
    ("service_tier", "responses", {"service_tier": "priority"}, {"hints": {"turn": -1}}),
    ("service_tier", "responses", {"service_tier": "scale"}, "service_tier.scale"),
    ("service_tier", "messages", {"service_tier": "standard_only"}, {"hints": None}),
    ("service_tier", "messages", {"service_tier": "scale"}, "service_tier.scale"),
    ("speed", "messages", {"speed": "standard"}, {"hints": None}),
    ("speed", "messages", {"speed": "fast"}, "speed"),
]
WHOLE_HEADERS = [
    *[(name, "s-1", {"session": "s-1"}) for name in HEADERS],
    *[(name, "two words", name) for name in HEADERS],
    *[(name, "f-1", {"hints": None}) for name in FLOWS],
    *[(name, "two words", name) for name in FLOWS],
    (FINAL_HEADER, "true", {"hints": {"keep_s": 0}}),
    (FINAL_HEADER, "perhaps", FINAL_HEADER),
    ("x-dynamo-parent-session-id", "s-1", "x-dynamo-parent-session-id"),
]


def test_the_table_of_hints_is_tested_as_a_whole() -> None:
    assert {name for name, *_ in WHOLE_TABLE} - {""} == HINTS.keys()
    assert {name for name, *_ in WHOLE_HEADERS} == HEADER_HINTS.keys()


async def test_each_hint_is_honoured_refused_or_named(make_fleet) -> None:
    fleet = await make_fleet({"decode-0": Script()})
    calls = [(api, given, {}, outcome) for _, api, given, outcome in WHOLE_TABLE]
    calls += [("chat", {}, {name: value}, outcome) for name, value, outcome in WHOLE_HEADERS]
    for api, given, headers, outcome in calls:
        usual = {"input": "hi", "max_output_tokens": 16} if api == "responses" else CHAT
        body = {"model": MODEL, **usual, **given}
        answer = await fleet.http.post(URLS[api], json=body, headers=headers)
        case = (api, given, headers, answer.text)
        if isinstance(outcome, ValueError):
            assert answer.status_code == 400 and str(outcome) in answer.text, case
            continue
        assert answer.status_code == 200, case
        named = outcome if isinstance(outcome, str) else None
        assert answer.headers.get("x-baton-ignored") == named, case
        if isinstance(outcome, dict):
            request_id = answer.headers["x-request-id"]
            report = (await fleet.http.get(f"/fleet/requests/{request_id}")).json()
            for field, value in outcome.items():
                shown = report[field]
                shown = shown["id"] if field == "session" else shown
                assert shown == value, case


async def test_marks_of_anthropics_api_keep_a_prefix_as_long_as_the_longest(make_fleet) -> None:
    fleet = await make_fleet({"decode-0": Script()})
    hour = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    usual = {"type": "ephemeral"}

    def text(mark=None):
        return [{"type": "text", "text": "hi"} | ({"cache_control": mark} if mark else {})]

    result = {"type": "tool_result", "tool_use_id": "c", "content": text(hour)}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tool = {"name": "f", "input_schema": {"type": "object"}}
    user = [{"role": "user", "content": "hi"}]
    for body, keep_s in (
        ({"messages": user}, None),
        ({"messages": user, "cache_control": usual}, 300),
        ({"messages": user, "system": text(usual)}, 300),
        ({"messages": [{"role": "user", "content": text(hour)}], "system": text(usual)}, 3600),
        ({"messages": user, "tools": [tool | {"cache_control": hour}]}, 3600),
        ({"messages": turns, "tools": [tool]}, 3600),
    ):
        answer = await fleet.http.post(
            "/v1/messages", json={"model": MODEL, "max_tokens": 3, **body}
        )
        assert answer.status_code == 200, answer.text
        assert "x-baton-ignored" not in answer.headers
        assert sent(fleet) == (None if keep_s is None else (keep_s, 0.25)), body
    wrong = {"type": "ephemeral", "ttl": "2h"}
    answer = await fleet.http.post(
        "/v1/messages",
        json={"model": MODEL, "max_tokens": 3, "messages": user, "cache_control": wrong},
    )
    assert answer.status_code == 400 and "cache_control.ttl" in answer.text


async def test_the_types_of_the_vendors_packages_are_taken(make_fleet) -> None:
    """Their values are what their clients can send."""
    fleet = await make_fleet({"decode-0": Script()})
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="x") as client:
        for tier in "auto", "default", "flex", "scale", "priority":
            await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=3,
                service_tier=tier,
                prompt_cache_retention="24h",
            )
    assert sent(fleet) == (86400, 0.25)
    mark = {"type": "ephemeral", "ttl": "1h"}
    async with anthropic.AsyncAnthropic(base_url=fleet.url, api_key="x") as claude:
        await claude.messages.create(
            model=MODEL,
            max_tokens=3,
            service_tier="standard_only",
            system=[{"type": "text", "text": "Be brief.", "cache_control": mark}],
            messages=[{"role": "user", "content": "hi"}],
        )
    assert sent(fleet) == (3600, 0.25)


async def test_the_last_call_of_a_session_ends_its_pins(make_fleet) -> None:
    fleet = await make_fleet({"decode-0": Script()})
    for value, keep_s in ("true", 0), ("True", 0), ("false", 86400), ("", 86400):
        answer = await fleet.chat(
            prompt_cache_retention="24h", headers={"x-dynamo-session-final": value}
        )
        assert answer.status_code == 200
        assert sent(fleet) == (keep_s, 0.25)


@pytest.mark.parametrize("share", [0.0, 0.1])
async def test_the_fleet_file_has_the_budget_of_a_tenant(make_fleet, share) -> None:
    clients = ClientLimitsConfig(pinned_share=share)
    fleet = await make_fleet({"decode-0": Script()}, clients=clients)
    await fleet.chat(prompt_cache_retention="24h")
    assert sent(fleet) == ((86400, pytest.approx(share)) if share else None)
