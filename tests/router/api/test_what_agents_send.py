"""Fields that coding agents send by default: loose schemas, hosted tools, custom tools, edits."""

import json
from functools import partial

import pytest

from baton.types.errors import GrammarError
from router.routing.checks.grammars import TIMED_OUT
from router.served_model import ServedModel
from tests.router.conftest import MODEL, events_of, until
from tests.router.emulated_worker import Script
from tests.router.grammars import fits
from tests.telemetry.values import value_of

USER = {"role": "user", "content": "hi"}
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def roomy(artifact) -> ServedModel:
    return ServedModel(artifact, (MODEL,), max_context_tokens=200_000, emulated=True)


def function(name: str, parameters: dict, **more) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def prompt_of(fleet, model) -> str:
    packed = fleet.workers["decode-0"].submissions[-1].prompt_tokens
    ids = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
    return model.tokenizer.decode(ids, skip_special_tokens=False)


def within(fields: dict) -> dict:
    return {"type": "object", "properties": fields, "required": list(fields)}


# Schema, what is reported, arguments that must fit and arguments that must not.
LOOSE = {
    "unknown keyword": (
        within({"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}),
        "tools[].f.uniqueItems",
        '{"a": [1, 1]}',
        '{"a": ["x"]}',
    ),
    "overlapping patterns": (
        {"type": "object", "patternProperties": {"^x": {"type": "string"}, "y$": {}}},
        "tools[].f.parameters",
        '{"xy": 1}',
        "[]",
    ),
    "pattern with look-ahead": (
        within({"a": {"type": "string", "pattern": "^(?!foo)"}, "b": {"type": "integer"}}),
        "tools[].f.parameters",
        '{"a": "foo", "b": 1}',
        '{"a": "foo", "b": "1"}',
    ),
    "unsatisfiable": (
        within({"a": {"type": "string", "minLength": 5, "maxLength": 2}}),
        "tools[].f.parameters",
        '{"a": "abc"}',
        '{"a": 1}',
    ),
    "unknown type": (
        within({"a": {"type": "file"}, "b": {"type": "integer"}}),
        "tools[].f.parameters",
        '{"a": {"x": 1}, "b": 1}',
        '{"a": {"x": 1}, "b": "1"}',
    ),
    "no schema at all": (
        {"type": "object", "properties": [], "required": "a"},
        "tools[].f.parameters",
        "{}",
        "[]",
    ),
    "reference to another document": (
        within({"a": {"$ref": "https://example.com/a.json"}}),
        "tools[].f.parameters",
        '{"a": [1]}',
        "{}",
    ),
    "null beside object": (
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
        None,
        '{"a": 1}',
        '{"a": "1"}',
    ),
    "very large": (
        within({"a": {"enum": ["x" * 270_000]}}),
        "tools[].f.parameters",
        '{"b": 1}',
        "[]",
    ),
}


async def test_a_loose_schema_is_enforced_as_far_as_possible(make_fleet, model, roomy):
    fleet = await make_fleet({"decode-0": Script()}, served=roomy)
    for schema, reported, right, wrong in LOOSE.values():
        fleet.workers["decode-0"].submissions.clear()
        tools = [function("f", schema), function("g", NAMED)]
        for _ in range(2):  # the second time from what is kept
            answer = await fleet.chat(tools=tools, tool_choice="required", max_tokens=5)
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("x-baton-ignored") == reported
        first, second = (s.sampling.grammar for s in fleet.workers["decode-0"].submissions)
        assert first == second
        assert fits(model, first, call("f", right))
        assert not fits(model, first, call("f", wrong))
        assert fits(model, first, call("g", '{"a": 1}'))
        assert not fits(model, first, call("g", '{"a": "1"}'))
        if reported is not None:
            strict = [function("f", schema, strict=True)]
            refused = await fleet.chat(tools=strict)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


async def test_after_some_faulty_tools_the_others_are_not_tried(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script()})
    faulty = LOOSE["unknown type"][0]
    tools = [function(f"f{i}", faulty) for i in range(9)] + [function("g", NAMED)]
    answer = await fleet.chat(tools=tools, tool_choice="required", max_tokens=5)
    assert answer.status_code == 200, answer.text
    assert "tools[].g.parameters" in answer.headers["x-baton-ignored"]
    grammar = fleet.workers["decode-0"].submissions[0].sampling.grammar
    assert fits(model, grammar, call("g", '{"a": "1"}'))
    assert not fits(model, grammar, call("f0", '{"a": 1, "b": "1"}'))


async def test_many_tools_that_are_too_large_together_are_relaxed(make_fleet, model, roomy):
    fleet = await make_fleet({"decode-0": Script()}, served=roomy)
    tools = [
        function(
            f"f{n}",
            within({f"a{i}": {"type": "string", "pattern": f"^x{n}.{i}"} for i in range(200)}),
        )
        for n in range(30)
    ]
    answer = await fleet.chat(tools=tools, tool_choice="required", max_tokens=5)
    assert answer.status_code == 200, answer.text
    assert "tools[].f0.parameters" in answer.headers["x-baton-ignored"]
    grammar = fleet.workers["decode-0"].submissions[0].sampling.grammar
    without_patterns = json.dumps({f"a{i}": "z" for i in range(200)})
    assert fits(model, grammar, call("f29", without_patterns))
    assert not fits(model, grammar, call("f30", without_patterns))


async def test_arguments_are_checked_where_no_grammar_follows(make_fleet, model):
    schema, _, right, _ = LOOSE["unknown keyword"]
    ids = model.tokenizer.encode(call("f", right))
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    assert (await fleet.chat(tools=[function("f", schema)], max_tokens=80)).status_code == 200
    count = partial(value_of, fleet.router.metrics)
    await until(lambda: count("baton_schema_violations", keyword="uniqueItems") == 1)


async def test_any_is_required(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script()})
    for choice in ("any", "required"):
        body = {"tools": [function("f", NAMED)], "tool_choice": choice, "max_tokens": 5}
        assert (await fleet.chat(**body)).status_code == 200
        tool = {"type": "function", **function("f", NAMED)["function"]}
        body = {"tools": [tool], "max_output_tokens": 5}
        answer = await fleet.http.post(
            "/v1/responses", json={"model": MODEL, "input": "hi", "tool_choice": choice, **body}
        )
        assert answer.status_code == 200, answer.text
    grammars = {s.sampling.grammar for s in fleet.workers["decode-0"].submissions}
    assert len(grammars) == 1
    assert not fits(model, grammars.pop(), "text")


async def test_small_things_that_other_servers_take(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    assert (await fleet.http.head("/")).status_code == 200  # Claude Code's first call
    for body, ignored in (
        ({"top_p": 0}, None),
        ({"stop": ""}, None),
        ({"stop": ["", "x"]}, None),
        ({"web_search_options": {}}, "web_search_options"),
    ):
        answer = await fleet.chat(**body, max_tokens=5)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-baton-ignored") == ignored
    greedy = fleet.workers["decode-0"].submissions[0].sampling
    assert 0 < greedy.top_p < 1e-5


PATCH = "*** Begin Patch\n+ print(\"hi\", '\\n')\n*** End Patch 😀"
CUSTOM = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edit files"}}
CALLED_CUSTOM = call("apply_patch", json.dumps({"input": PATCH}))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_in_a_chat(make_fleet, model, stream):
    ids = model.tokenizer.encode(CALLED_CUSTOM + call("f", '{"a": 1}'))
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    tools = [CUSTOM, function("f", NAMED)]
    answer = await fleet.chat(tools=tools, max_tokens=400, stream=stream)
    assert answer.status_code == 200, answer.text
    if stream:
        calls: dict[int, dict] = {}
        for event in events_of(answer.text)[:-1]:
            for entry in event["choices"][0]["delta"].get("tool_calls", []):
                known = calls.setdefault(entry["index"], {"texts": []} | entry)
                inner = entry.get("custom") or entry.get("function")
                known["texts"].append(inner.get("input", inner.get("arguments")))
        assert [c["type"] for c in calls.values()] == ["custom", "function"]
        assert "".join(calls[0]["texts"]) == PATCH
        assert "".join(calls[1]["texts"]) == '{"a": 1}'
        return
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    custom, plain = choice["message"]["tool_calls"]
    assert custom["custom"] == {"name": "apply_patch", "input": PATCH}
    assert plain["function"] == {"name": "f", "arguments": '{"a": 1}'}
    results = [
        {"role": "tool", "tool_call_id": c["id"], "content": "done"} for c in (custom, plain)
    ]
    again = await fleet.chat(messages=[USER, choice["message"], *results], tools=tools)
    assert again.status_code == 200, again.text
    told = call("apply_patch", json.dumps({"input": PATCH}, ensure_ascii=False))
    assert told in prompt_of(fleet, model)


async def test_a_custom_tool_with_a_regex_and_one_that_must_be_called(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script()})
    grammar = {"syntax": "regex", "definition": "a+|b\n"}
    tool = {"name": "t", "format": {"type": "grammar", "grammar": grammar}}
    choice = {"type": "custom", "custom": {"name": "t"}}
    answer = await fleet.chat(tools=[{"type": "custom", "custom": tool}], tool_choice=choice)
    assert answer.status_code == 200, answer.text
    found = fleet.workers["decode-0"].submissions[0].sampling.grammar
    assert fits(model, found, call("t", '{"input": "aaa"}'))
    assert fits(model, found, call("t", '{"input": "b\\n"}'))
    assert not fits(model, found, call("t", '{"input": "ab"}'))
    for wrong, param in (
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "function"}, "tools[0].function"),
        (
            {"type": "custom", "custom": {"name": "t", "format": {"type": "grammar"}}},
            "tools[0].custom.format.grammar",
        ),
    ):
        refused = await fleet.chat(tools=[wrong])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_the_old_api(make_fleet, model, stream):
    ids = model.tokenizer.encode(call("f", '{"a": 1}'))
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    functions = [function("f", NAMED)["function"]]
    body = {"functions": functions, "function_call": {"name": "f"}, "max_tokens": 100}
    answer = await fleet.chat(**body, stream=stream)
    assert answer.status_code == 200, answer.text
    if stream:
        events = events_of(answer.text)[:-1]
        deltas = [event["choices"][0]["delta"] for event in events]
        pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert pieces[0]["name"] == "f"
        assert "".join(piece["arguments"] for piece in pieces) == '{"a": 1}'
        assert events[-1]["choices"][0]["finish_reason"] == "function_call"
        return
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    message = choice["message"]
    assert message["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert "tool_calls" not in message
    told = [USER, message, {"role": "function", "name": "f", "content": "5"}]
    again = await fleet.chat(messages=told, functions=functions, max_tokens=5)
    assert again.status_code == 200, again.text
    for wrong, param in (
        ({"functions": functions, "tools": [function("g", NAMED)]}, "functions"),
        ({"messages": [USER, told[2]]}, "messages[1].name"),
    ):
        refused = await fleet.chat(**wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def respond(fleet, **body):
    answer = await fleet.http.post(
        "/v1/responses", json={"model": MODEL, "input": "hi", "max_output_tokens": 400} | body
    )
    assert answer.status_code == 200, answer.text
    return answer


NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents",
    "tools": [{"type": "function", "name": "close", "parameters": NAMED, "strict": False}],
}
HOSTED = {"type": "web_search", "external_web_access": False}
RESPONSES_CUSTOM = {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}


async def test_a_namespace_and_a_hosted_tool_in_responses(make_fleet, model):
    ids = model.tokenizer.encode(call("agents.close", '{"a": 1}'))
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    tools = [HOSTED, NAMESPACE]
    answer = await respond(fleet, tools=tools, store=False)
    assert answer.headers["x-baton-ignored"] == "tools[].web_search"
    response = answer.json()
    assert [tool["type"] for tool in response["tools"]] == ["namespace"]
    [item] = response["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "close", "agents")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "closed"}
    told = [{"role": "user", "content": "hi"}, item, result]
    await respond(fleet, input=told, tools=tools, store=False)
    prompt = prompt_of(fleet, model)
    assert call("agents.close", '{"a": 1}') in prompt
    assert "Other agents" in prompt
    broken = NAMESPACE | {"tools": [{"type": "function", "name": "a b"}]}
    for wrong, param in (
        ([HOSTED, broken], "tools[1].tools[0].name"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
    ):
        refused = await fleet.http.post(
            "/v1/responses", json={"model": MODEL, "input": "hi", "tools": wrong}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_in_responses(make_fleet, model, stream):
    ids = model.tokenizer.encode(CALLED_CUSTOM)
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    answer = await respond(fleet, tools=[RESPONSES_CUSTOM], store=False, stream=stream)
    if stream:
        events = events_of(answer.text)
        kind = "response.custom_tool_call_input"
        deltas = [event["delta"] for event in events if event["type"] == f"{kind}.delta"]
        assert "".join(deltas) == PATCH
        assert len(deltas) > 1
        [done] = [event for event in events if event["type"] == f"{kind}.done"]
        assert done["input"] == PATCH
        response = events[-1]["response"]
    else:
        response = answer.json()
    [item] = response["output"]
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call",
        "apply_patch",
        PATCH,
    )
    assert item["id"].startswith("ctc_"), "OpenAI refuses it in a history otherwise"
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    told = [{"role": "user", "content": "hi"}, item, result]
    await respond(fleet, input=told, tools=[RESPONSES_CUSTOM], store=False)


async def test_items_and_images_that_cannot_be_used(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    called = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    result = {"type": "function_call_output", "call_id": "c", "output": [image]}
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    told = [{"role": "user", "content": "hi"}, searched, called, result]
    answer = await respond(fleet, input=told, store=False)
    assert answer.headers["x-baton-ignored"] == "input[].web_search_call"
    refused = await fleet.http.post(
        "/v1/responses", json={"model": MODEL, "input": [{"role": "user", "content": [image]}]}
    )
    assert refused.status_code == 400


TOOL = {"name": "read", "input_schema": NAMED}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def conversation(turns: int) -> list[dict]:
    messages: list[dict] = [{"role": "user", "content": "begin"}]
    for turn in range(turns):
        messages += [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": f"thought {turn} " * 9, "signature": ""},
                    {"type": "tool_use", "id": f"t{turn}", "name": "read", "input": {"a": turn}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": f"t{turn}",
                        "content": f"result {turn} " * 50,
                    }
                ],
            },
        ]
    return messages


async def message(fleet, path: str = "", **body):
    fields = {"model": MODEL, "messages": conversation(5), "tools": [TOOL, SEARCH], **body}
    answer = await fleet.http.post(f"/v1/messages{path}", json=fields)
    assert answer.status_code == 200, answer.text
    return answer


async def test_context_management(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script()})
    plain = await message(fleet, max_tokens=20)
    assert plain.headers["x-baton-ignored"] == "tools[].web_search"
    assert "context_management" not in plain.json()
    whole = prompt_of(fleet, model)
    keep_all = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    answer = await message(fleet, max_tokens=20, context_management=keep_all)
    assert answer.json()["context_management"] == {"applied_edits": []}
    assert prompt_of(fleet, model) == whole

    clear = {
        "edits": [
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 4},
                "keep": {"type": "tool_uses", "value": 2},
                "clear_tool_inputs": True,
            },
            {"type": "compact_20260112"},
        ]
    }
    answer = await message(fleet, max_tokens=20, context_management=clear, stream=True)
    assert "context_management.edits[].compact_20260112" in answer.headers["x-baton-ignored"]
    [applied] = events_of(answer.text)[-2]["context_management"]["applied_edits"]
    assert (applied["type"], applied["cleared_tool_uses"]) == ("clear_tool_uses_20250919", 3)
    prompt = prompt_of(fleet, model)
    assert "result 2" not in prompt
    assert "result 3" in prompt
    assert '"a": 2' not in prompt
    assert '"a": 3' in prompt
    counted = (await message(fleet, "/count_tokens", context_management=clear)).json()
    assert counted["input_tokens"] == len(model.tokenizer.encode(prompt))
    original = counted["context_management"]["original_input_tokens"]
    assert original - counted["input_tokens"] == applied["cleared_input_tokens"]


async def test_edits_that_are_not_due(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script()})
    for edit in (
        {"trigger": {"type": "input_tokens", "value": 100_000}},
        {"trigger": {"type": "tool_uses", "value": 5}},
        {
            "trigger": {"type": "tool_uses", "value": 0},
            "clear_at_least": {"type": "input_tokens", "value": 90_000},
        },
        {"trigger": {"type": "tool_uses", "value": 0}, "exclude_tools": ["read"]},
        {"keep": {"type": "tool_uses", "value": 5}, "trigger": {"type": "tool_uses", "value": 0}},
    ):
        edits = {"edits": [{"type": "clear_tool_uses_20250919", **edit}]}
        answer = await message(fleet, max_tokens=5, context_management=edits)
        assert answer.json()["context_management"] == {"applied_edits": []}, edit
        assert "result 0" in prompt_of(fleet, model)


async def test_an_image_in_a_result_is_replaced(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script()})
    told = conversation(1)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
    told[-1]["content"][0]["content"] = [image, {"type": "text", "text": "a screen"}]
    await message(fleet, messages=told, max_tokens=5)
    assert "[image left out: this model reads only text]\na screen" in prompt_of(fleet, model)
    refused = await fleet.http.post(
        "/v1/messages",
        json={
            "model": MODEL,
            "max_tokens": 5,
            "messages": [{"role": "user", "content": [image]}],
        },
    )
    assert refused.status_code == 400


async def test_bodies_of_odd_shapes_are_named(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    old = {"role": "assistant", "function_call": {"name": ["a"], "arguments": "{}"}}
    for body in (
        {"functions": 5},
        {"functions": True},
        {"functions": [None]},
        {"messages": [USER, old]},
        {"messages": [USER, {"role": "function", "name": {"a": 1}, "content": "x"}]},
        {"messages": [None]},
    ):
        answer = await fleet.chat(**body)
        assert answer.status_code == 400, body
    for content in (
        [],
        [{"type": "thinking", "thinking": "x", "signature": ""}],
        [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}],
    ):
        told = [{"role": "assistant", "content": content}]
        answer = await fleet.http.post(
            "/v1/messages", json={"model": MODEL, "max_tokens": 5, "messages": told}
        )
        assert answer.status_code == 400, content
        assert answer.json()["error"]["details"]["param"] == "messages"


@pytest.mark.parametrize("kinds", [[["string"]], ["string", []], "file"])
async def test_types_of_odd_shapes_are_left(make_fleet, kinds):
    fleet = await make_fleet({"decode-0": Script()})
    schema = {"type": ["object", []], "properties": {"a": {"type": kinds, "pattern": "(?!x)"}}}
    answer = await fleet.chat(tools=[function("f", schema)], max_tokens=5)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-ignored"] == "tools[].f.parameters"


@pytest.mark.parametrize(
    ("edit", "param"),
    [
        ({"keep": "all"}, "keep"),
        ({"keep": {"type": "all"}}, "keep"),
        ({"keep": {"type": "tool_uses"}}, "keep.value"),
        ({"trigger": {"type": "tool_uses"}}, "trigger.value"),
    ],
)
async def test_an_edit_without_its_number_is_named(make_fleet, edit, param):
    fleet = await make_fleet({"decode-0": Script()})
    edits = {"edits": [{"type": "clear_tool_uses_20250919", **edit}]}
    body = {"messages": conversation(5), "context_management": edits}
    answer = await fleet.http.post("/v1/messages/count_tokens", json={"model": MODEL, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["details"]["param"] == f"context_management.edits[0].{param}"


async def test_tools_of_the_provider_need_no_name(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    answer = await message(
        fleet, tools=[{"type": "mcp_toolset", "mcp_server_name": "x"}], max_tokens=5
    )
    assert answer.headers["x-baton-ignored"] == "tools[].mcp_toolset"
    told = conversation(1)
    reference = {"type": "tool_reference", "tool_name": "read"}
    told[-1]["content"][0]["content"] = [reference, {"type": "text", "text": "found"}]
    await message(fleet, messages=told, max_tokens=5)
    hosted = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    refused = await fleet.http.post(
        "/v1/responses",
        json={"model": MODEL, "input": "hi", "tools": [RESPONSES_CUSTOM], "tool_choice": hosted},
    )
    assert refused.json()["error"]["param"] == "tool_choice.tools"


async def test_a_grammar_that_timed_out_is_tried_again(make_fleet, model, monkeypatch):
    fleet = await make_fleet({"decode-0": Script()})
    checker = fleet.lane.grammars
    check = checker.check
    slow = [True]

    async def hurried(*given):
        if slow.pop() if slow else False:
            raise GrammarError(f"tools: {TIMED_OUT} 2 s to compile")
        return await check(*given)

    monkeypatch.setattr(type(checker), "check", lambda _, *given: hurried(*given))
    tool = function("f", within({"a": {"type": "string", "pattern": "^x$"}}))
    for _ in range(2):
        answer = await fleet.chat(tools=[tool], tool_choice="required", max_tokens=5)
        assert answer.status_code == 200, answer.text
    hurried_one, calm = (s.sampling.grammar for s in fleet.workers["decode-0"].submissions)
    assert fits(model, hurried_one, call("f", '{"a": "y"}'))
    assert not fits(model, calm, call("f", '{"a": "y"}'))
    assert fits(model, calm, call("f", '{"a": "x"}'))
