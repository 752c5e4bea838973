"""OpenAI's own client for Python."""

import json

import openai
from pydantic import BaseModel
from scenarios import BASE, KEY, MODEL, QUESTION, SENTENCE, run, scenario

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=30)
USER = {"role": "user", "content": QUESTION}


class Place(BaseModel):
    name: str
    people: int


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@scenario("chat")
def chat():
    answer = client.chat.completions.create(model=MODEL, messages=[USER])
    assert answer.choices[0].message.content == SENTENCE
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens > 0


@scenario("stream")
def stream():
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=[USER], stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == SENTENCE
    assert chunks[-1].usage.completion_tokens > 0


@scenario("second turn")
def second_turn():
    first = client.chat.completions.create(model=MODEL, messages=[USER]).choices[0].message
    again = client.chat.completions.create(model=MODEL, messages=[USER, first, USER])
    assert again.choices[0].message.content == SENTENCE


@scenario("tools")
def tools():
    asked = [USER]
    message = client.chat.completions.create(model=MODEL, messages=asked, tools=[WEATHER])
    call = message.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert "city" in json.loads(call.function.arguments)
    asked += [
        message.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    told = client.chat.completions.create(model=MODEL, messages=asked, tools=[WEATHER])
    assert told.choices[0].message.content == SENTENCE
    with client.chat.completions.stream(model=MODEL, messages=[USER], tools=[WEATHER]) as events:
        final = events.get_final_completion()
    assert "city" in json.loads(final.choices[0].message.tool_calls[0].function.arguments)


@scenario("schema")
def schema():
    answer = client.chat.completions.parse(model=MODEL, messages=[USER], response_format=Place)
    assert isinstance(answer.choices[0].message.parsed, Place)


@scenario("tools and schema")
def tools_and_schema():
    strict = openai.pydantic_function_tool(Place, name="place")
    answer = client.chat.completions.parse(
        model=MODEL, messages=[USER], tools=[strict], response_format=Place
    )
    message = answer.choices[0].message
    assert message.tool_calls or message.parsed


@scenario("errors")
def errors():
    for call, kind in (
        (lambda: client.chat.completions.create(model="no", messages=[USER]), openai.NotFoundError),
        (lambda: client.chat.completions.create(model=MODEL, messages=[]), openai.BadRequestError),
        (
            lambda: client.with_options(api_key="wrong").models.list(),
            openai.AuthenticationError,
        ),
    ):
        try:
            call()
        except kind as error:
            assert error.body["message"]
            assert error.request_id
        else:
            raise AssertionError(f"no {kind.__name__}")


@scenario("embeddings")
def embeddings():
    answer = client.embeddings.create(model=MODEL, input=["a cat", "a kitten"])
    assert [entry.index for entry in answer.data] == [0, 1]


@scenario("models")
def models():
    assert MODEL in [model.id for model in client.models.list()]


@scenario("batch")
def batch():
    import time

    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": MODEL, "messages": [USER]}
    sent = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    begun = client.batches.create(
        input_file_id=sent.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    for _ in range(100):
        if (begun := client.batches.retrieve(begun.id)).status == "completed":
            break
        time.sleep(0.1)
    assert SENTENCE in client.files.content(begun.output_file_id).text


@scenario("responses")
def responses():
    answer = client.responses.create(model=MODEL, input=QUESTION)
    assert answer.output_text == SENTENCE
    again = client.responses.create(model=MODEL, input="And?", previous_response_id=answer.id)
    assert again.output_text == SENTENCE
    with client.responses.stream(model=MODEL, input=QUESTION) as events:
        assert events.get_final_response().output_text == SENTENCE


run()
