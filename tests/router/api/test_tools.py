"""What a chat may say about tools, and what is refused by name."""

import pytest

from router.served_model import ServedModel
from tests.router.emulated_worker import Script

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
LIST = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}

WRITES_ARGUMENTS = """
{%- for message in messages %}{% for call in message.tool_calls or [] %}<tool_call>
{{- call.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}{{ tools }}"""

REFUSED = [
    ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [LIST]}, "tools[0].function.parameters"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"messages": [USER, RESULT]}, "messages[1].tool_call_id"),
    ({"messages": [USER, CALLED, RESULT | {"tool_call_id": "c2"}]}, "messages[2].tool_call_id"),
    ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [USER | {"tool_call_id": "c1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[]"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize("template", [None, WRITES_ARGUMENTS])
async def test_arguments_that_no_template_can_write_are_refused(make_fleet, artifact, template):
    served = ServedModel(artifact, ("smollm2",), chat_template=template)
    fleet = await make_fleet({"decode-0": Script()}, served=served)
    inside = ("\\ud800", "9" * 5000)
    broken = [f'{{"a": "{inside[0]}"}}', f'{{"a": {inside[1]}}}', '{"a": NaN}']
    broken += [f'{{"a": {"[" * depth}{"]" * depth}}}' for depth in range(220, 1000, 30)]
    for arguments in broken:
        call = CALL | {"function": {"name": "f", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "tool_calls": [call]}]
        answer = await fleet.chat(messages=messages)
        param = "messages[1].tool_calls[0].function.arguments"
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


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
