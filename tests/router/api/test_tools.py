"""What a chat may say about tools, and what is refused by name."""

from functools import partial

import pytest

from router.served_model import ServedModel
from tests.router.conftest import events_of, until
from tests.router.emulated_worker import Script
from tests.router.grammars import fits
from tests.telemetry.values import value_of

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
LIST = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
UNIQUE = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"properties": {"a": {"uniqueItems": True}}},
        "strict": True,
    },
}
LONG = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"properties": {"a": {"enum": ["x" * 270_000]}}},
        "strict": True,
    },
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}

WRITES_ARGUMENTS = """
{%- for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{{ tools }}"""

REFUSED = [
    ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [LIST]}, "tools[0].function.parameters"),
    ({"tools": [TOOL], "tool_choice": "each"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    (
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [{"type": "function", "function": {"name": "g"}}]},
            },
        },
        "tool_choice.allowed_tools.tools[0]",
    ),
    ({"tools": [UNIQUE]}, "tools"),
    ({"tools": [LONG]}, "tools"),
    ({"messages": [USER, RESULT]}, "messages[1].tool_call_id"),
    ({"messages": [USER, CALLED, RESULT | {"tool_call_id": "c2"}]}, "messages[2].tool_call_id"),
    ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [USER | {"tool_call_id": "c1"}]}, "messages[0].tool_call_id"),
]


@pytest.mark.parametrize("template", [None, WRITES_ARGUMENTS])
async def test_arguments_of_any_form_are_taken_when_replayed(make_fleet, artifact, template):
    """A model wrote them, perhaps up to ``max_tokens``; OpenAI takes any text."""
    served = ServedModel(artifact, ("smollm2",), chat_template=template)
    assert (served.tool_syntax.forms is not None) is (template is not None)
    fleet = await make_fleet({"decode-0": Script()}, served=served)
    inside = ("\\ud800", "9" * 5000)
    broken = [f'{{"a": "{inside[0]}"}}', f'{{"a": {inside[1]}}}', '{"a": NaN}']
    broken += [f'{{"a": {"[" * depth}{"]" * depth}}}' for depth in range(220, 1000, 300)]
    broken += ["", "[]", '{"city": "Par', "nonsense"]
    for arguments in broken:
        call = CALL | {"function": {"name": "f", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "tool_calls": [call]}]
        answer = await fleet.chat(messages=messages)
        assert answer.status_code == 200, answer.text


async def test_refused_by_name(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    for body, param in REFUSED:
        answer = await fleet.chat(**body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not fleet.workers["decode-0"].submissions


async def test_what_reaches_the_workers(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    plain = await fleet.chat(tools=[], tool_choice="auto")
    none = await fleet.chat(tools=[TOOL], tool_choice="none")
    auto = await fleet.chat(tools=[TOOL])
    told = await fleet.chat(messages=[USER, CALLED, RESULT], tools=[TOOL])
    assert {r.status_code for r in (plain, none, auto, told)} == {200}
    seen = fleet.workers["decode-0"].submissions
    assert [bool(s.sampling.grammar) for s in seen] == [False, False, True, True]
    assert seen[0].prompt_tokens == seen[1].prompt_tokens != seen[2].prompt_tokens


async def test_tokenize_counts_the_prompt_that_the_chat_has(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    chats = (
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER, CALLED, RESULT | {"name": "f"}], "tools": [TOOL]},
        {"messages": [USER], "tools": []},
    )
    counts = []
    for chat in chats:
        counted = (await fleet.http.post("/tokenize", json=chat)).json()["count"]
        assert counted == (await fleet.chat(**chat)).json()["usage"]["prompt_tokens"]
        counts.append(counted)
    assert len(set(counts)) == 3
    for bad, param in (
        ({"prompt": "hi", "tools": [TOOL]}, "tools"),
        ({"messages": [USER], "tools": [LIST]}, "tools[0].function.parameters"),
    ):
        answer = await fleet.http.post("/tokenize", json=bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_an_answer_that_is_no_call_is_text(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    free = (await fleet.chat()).json()["choices"][0]
    offered = (await fleet.chat(tools=[TOOL])).json()["choices"][0]
    assert offered["message"]["content"] == free["message"]["content"]
    assert "tool_calls" not in offered["message"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
CALLED_TEXT = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


async def test_tools_and_a_schema_together(make_fleet, model):
    """A call, or a text that follows the schema, as with OpenAI."""
    fleet = await make_fleet({"decode-0": Script()})
    for more in ({}, {"parallel_tool_calls": False}, {"tool_choice": "required"}):
        answer = await fleet.chat(tools=[TOOL], response_format=FORMAT, **more)
        assert answer.status_code == 200, answer.text
    both, single, required = (s.sampling.grammar for s in fleet.workers["decode-0"].submissions)
    assert fits(model, both, '{"a": 1}')
    assert not fits(model, both, '{"a": 1, "b": 2}')
    assert not fits(model, both, "Just text")
    assert fits(model, both, CALLED_TEXT * 2)
    assert fits(model, single, CALLED_TEXT)
    assert not fits(model, single, CALLED_TEXT * 2)
    assert fits(model, required, CALLED_TEXT)
    assert not fits(model, required, '{"a": 1}')


async def test_allowed_tools_are_told_of_all_and_may_call_some(make_fleet, model):
    other = {"type": "function", "function": {"name": "g"}}
    fleet = await make_fleet({"decode-0": Script()})
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert (await fleet.chat(tools=[TOOL, other], tool_choice=choice)).status_code == 200
    assert (await fleet.chat(tools=[TOOL, other])).status_code == 200
    some, all_ = fleet.workers["decode-0"].submissions
    assert some.prompt_tokens == all_.prompt_tokens
    assert fits(model, some.sampling.grammar, CALLED_TEXT)
    assert not fits(model, some.sampling.grammar, CALLED_TEXT.replace('"f"', '"g"'))
    assert not fits(model, some.sampling.grammar, "Just text")


async def test_a_tool_without_arguments_has_no_room_for_white_space(make_fleet, model):
    """Every hand-off of openai-agents is one; a model wrote new lines up to ``max_tokens``."""
    fleet = await make_fleet({"decode-0": Script()})
    empty = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    named = {"type": "function", "function": {"name": "f"}}
    assert (await fleet.chat(tools=[empty], tool_choice=named)).status_code == 200
    grammar = fleet.workers["decode-0"].submissions[0].sampling.grammar
    assert fits(model, grammar, CALLED_TEXT)
    assert not fits(model, grammar, CALLED_TEXT.replace("{}", "{\n\n\n}"))


@pytest.mark.parametrize("stream", [False, True])
async def test_each_chunk_has_one_entry_for_each_call(make_fleet, model, stream):
    """The first delta had two of index 0, and clients that look at one lost ``{"``."""
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    ids = model.tokenizer.encode(text * 2)
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    answer = await fleet.chat(tools=[TOOL], max_tokens=200, stream=stream)
    calls: dict[int, str] = {}
    if stream:
        for event in events_of(answer.text)[:-1]:
            entries = event["choices"][0]["delta"].get("tool_calls", [])
            indexes = [entry["index"] for entry in entries]
            assert len(set(indexes)) == len(indexes)
            for entry in entries:
                before = calls.get(entry["index"], "")
                calls[entry["index"]] = before + entry["function"]["arguments"]
    else:
        message = answer.json()["choices"][0]["message"]
        calls = {i: call["function"]["arguments"] for i, call in enumerate(message["tool_calls"])}
        # What was answered can be sent back as it is.
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": "5"} for c in message["tool_calls"]
        ]
        again = await fleet.chat(messages=[USER, message, *results], tools=[TOOL], max_tokens=5)
        assert again.status_code == 200, again.text
    assert calls == {0: '{"a": 1}', 1: '{"a": 1}'}


async def test_strict_false_leaves_aside_what_no_grammar_can_follow(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    refused = await fleet.chat(response_format=asked)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_grammar", "response_format")
    assert "uniqueItems at #/uniqueItems" in error["message"]
    asked["json_schema"]["strict"] = False
    assert (await fleet.chat(response_format=asked)).status_code == 200
    loose = UNIQUE["function"] | {"strict": False}
    assert (await fleet.chat(tools=[UNIQUE | {"function": loose}])).status_code == 200


async def test_what_no_grammar_follows_is_counted_where_it_was_not_kept(make_fleet, model):
    ids = model.tokenizer.encode("[1, 1]")
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    asked = {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}
    answer = await fleet.chat(response_format=asked, max_tokens=20)
    assert answer.json()["choices"][0]["message"]["content"] == "[1, 1]"
    count = partial(value_of, fleet.router.metrics)
    await until(lambda: count("baton_schema_violations", keyword="uniqueItems") == 1)
    await fleet.chat(response_format={"type": "json_object"}, max_tokens=20)
    assert count("baton_schema_violations", keyword="uniqueItems") == 1


A_RED = {"properties": {"a": {"enum": ["red", "blue"]}}, "required": ["a", "b"]}
LEAST = {"type": "integer", "minimum": -(2**63)}
BOTH = {
    "properties": {"a": {"const": 1}, "b": {"const": 2}},
    "required": ["a", "b"],
    "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
}
RULES = [
    (
        {"properties": {"id": LEAST, "s": {"enum": ["x"]}}, "required": ["id", "s"]},
        None,
        '{"id": -5, "s": "x"}',
        ['{"id": -5, "s": "y"}', '{"id": -9223372036854775809, "s": "x"}'],
    ),
    ({"type": ["object", "null"], "enum": [None]}, "tools[].f.parameters", "{}", ["null"]),
    ({"type": ["object", "null"], "properties": {"a": {"const": 1}}}, None, '{"a": 1}', ["null"]),
    ({"anyOf": [{"type": "null"}, {"type": "object"}]}, None, "{}", ["null"]),
    (A_RED, None, '{"a": "red", "b": [1]}', ['{"a": "pink", "b": 1}', '{"a": "red"}']),
    (BOTH, "tools[].f.oneOf", '{"a": 1, "b": 2}', ['{"a": 2, "b": 2}', '{"a": 1}']),
    (
        {"properties": {"a": {"const": 2**53 + 1}, "b": {"const": 1}}, "required": ["b"]},
        "tools[].f.const",
        '{"b": 1}',
        ['{"b": 2}'],
    ),
    (
        {"properties": {"a": {"$ref": "#/$defs/L[int]"}}, "$defs": {"L[int]": {"const": 5}}},
        None,
        '{"a": 5}',
        ['{"a": 6}'],
    ),
]


async def test_the_rules_of_a_tool_are_in_force_or_named(make_fleet, model):
    fleet = await make_fleet({"decode-0": None})
    for rules, ignored, good, bad in RULES:
        tool = {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object"} | rules},
        }
        answer = await fleet.chat(tools=[tool], tool_choice="required", max_tokens=9)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-baton-ignored") == ignored
        grammar = fleet.workers["decode-0"].submissions[-1].sampling.grammar

        def written(arguments: str) -> str:
            return f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'

        assert fits(model, grammar, written(good))
        assert not any(fits(model, grammar, written(arguments)) for arguments in bad)


async def test_arguments_are_compared_too(make_fleet, model):
    text = '<tool_call>{"name": "f", "arguments": {"a": [1, 1]}}</tool_call>'
    ids = model.tokenizer.encode(text)
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    loose = UNIQUE | {"function": UNIQUE["function"] | {"strict": False}}
    answer = await fleet.chat(tools=[loose], max_tokens=100)
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    count = partial(value_of, fleet.router.metrics)
    await until(lambda: count("baton_schema_violations", keyword="uniqueItems") == 1)
    await fleet.chat(tools=[TOOL], max_tokens=100)
    assert count("baton_schema_violations", keyword="uniqueItems") == 1
