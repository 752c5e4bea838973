"""Anthropic's own client for Python."""

import anthropic
from scenarios import KEY, MODEL, QUESTION, SENTENCE, URL, run, scenario

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=30)
USER = {"role": "user", "content": QUESTION}
WEATHER = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@scenario("chat")
def chat():
    answer = client.messages.create(model=MODEL, max_tokens=64, messages=[USER])
    assert answer.content[0].text == SENTENCE
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0


@scenario("stream")
def stream():
    with client.messages.stream(model=MODEL, max_tokens=64, messages=[USER]) as events:
        assert "".join(events.text_stream) == SENTENCE


@scenario("second turn")
def second_turn():
    first = client.messages.create(model=MODEL, max_tokens=64, messages=[USER])
    turns = [USER, {"role": "assistant", "content": first.content}, USER]
    again = client.messages.create(model=MODEL, max_tokens=64, messages=turns)
    assert again.content[0].text == SENTENCE


@scenario("tools")
def tools():
    first = client.messages.create(model=MODEL, max_tokens=64, messages=[USER], tools=[WEATHER])
    call = next(block for block in first.content if block.type == "tool_use")
    assert first.stop_reason == "tool_use"
    assert "city" in call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [USER, {"role": "assistant", "content": first.content}]
    turns.append({"role": "user", "content": [result]})
    told = client.messages.create(model=MODEL, max_tokens=64, messages=turns, tools=[WEATHER])
    assert told.content[0].text == SENTENCE


@scenario("errors")
def errors():
    for more, kind in (
        ({"model": "no"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
    ):
        body = {"model": MODEL, "max_tokens": 4, "messages": [USER], **more}
        try:
            client.messages.create(**body)
        except kind as error:
            assert error.body["error"]["message"]
        else:
            raise AssertionError(f"no {kind.__name__}")


@scenario("count tokens")
def count_tokens():
    assert client.messages.count_tokens(model=MODEL, messages=[USER]).input_tokens > 5


run()
