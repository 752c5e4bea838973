"""Tools with the official client: called, answered, streamed, in both modes. SmolLM2 knows none."""

import json

from tests.e2e.fleet_processes import NAME

WEATHER = {
    "name": "get_weather",
    "description": "Current weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}
ADD = {
    "name": "add",
    "description": "Adds two numbers",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, ADD)]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
ONE = {"tool_choice": "required", "parallel_tool_calls": False}


def ask(client, messages=QUESTION, **fields):
    fields = {"temperature": 0, "max_tokens": 60, "tools": TOOLS, **fields}
    return client.chat.completions.create(model=NAME, messages=messages, **fields)


def test_a_round_trip(client):
    [choice] = ask(client, **ONE).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages = [
        *QUESTION,
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and sunny"},
    ]
    [answer] = ask(client, messages).choices
    assert answer.finish_reason == "stop"
    assert "18" in answer.message.content
    assert not answer.message.tool_calls


def test_the_question_decides_which_tool(anywhere):
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    [call] = ask(anywhere, messages, **ONE).choices[0].message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 3, "b": 4}


def test_a_named_tool_is_called_whatever_was_asked(anywhere):
    named = {"type": "function", "function": {"name": "add"}}
    answer = ask(anywhere, tool_choice=named, temperature=1.2, seed=3)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}


def test_streamed_arguments_and_whole_answers_are_the_same(client):
    whole = ask(client, **ONE).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **ONE) if chunk.choices]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert deltas[0].id
    assert deltas[0].function.name == "get_weather"
    assert all(delta.id is None and delta.index == 0 for delta in deltas[1:])
    assert len(deltas) > 3, "arguments come as they are written"
    arguments = "".join(delta.function.arguments for delta in deltas)
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_several_calls_and_a_cut_one(anywhere):
    messages = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    [choice] = ask(anywhere, messages, tool_choice="required", max_tokens=50).choices
    first, second = choice.message.tool_calls[:2]
    assert first.id != second.id
    assert json.loads(first.function.arguments)["city"]
    assert choice.finish_reason == "length", "the last call is not complete"


def test_text_where_text_is_right_and_none_means_none(anywhere):
    hello = [{"role": "user", "content": "Say hello."}]
    [choice] = ask(anywhere, hello, tool_choice="auto").choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert "ello" in choice.message.content
    without = ask(anywhere, hello, tools=[], max_tokens=12)
    assert ask(anywhere, hello, tool_choice="none", max_tokens=12).choices == without.choices
