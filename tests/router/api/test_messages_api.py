"""Anthropic's Messages API, as the official client and as bytes."""

import asyncio
import json

import anthropic
import pytest

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from router.served_model import ServedModel
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script, answer_token

HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
WEATHER = {
    "name": "weather",
    "description": "Of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def text_of(model, seed_free_count: int, seed: int) -> str:
    return model.tokenizer.decode([answer_token(seed, 0, i) for i in range(seed_free_count)])


def client_of(fleet, **more) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=fleet.url, **{"api_key": "none", "max_retries": 0} | more
    )


async def answering(make_fleet, model, text: str, **script):
    """A fleet whose answer is ``text``."""
    ids = model.tokenizer.encode(text)
    return await make_fleet({"decode-0": Script(answer=ids, stop_token=2, step_s=0.001, **script)})


async def events_of(fleet, **body) -> list[tuple[str, dict]]:
    """The named events of a stream."""
    response = await fleet.http.post(
        "/v1/messages",
        json={"model": MODEL, "max_tokens": 60, "messages": HI, "stream": True} | body,
    )
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


async def test_the_client_gets_a_whole_message(make_fleet, model):
    fleet = await answering(make_fleet, model, "Paris it is", cached_tokens=16)
    async with client_of(fleet) as client:
        message = await client.messages.create(
            model=MODEL, max_tokens=60, system="Be brief", messages=HI
        )
        counted = await client.messages.count_tokens(model=MODEL, system="Be brief", messages=HI)
    assert [block.text for block in message.content] == ["Paris it is"]
    assert (message.role, message.type, message.model) == ("assistant", "message", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(model.tokenizer.encode("Paris it is")) + 1
    assert message.usage.cache_read_input_tokens == 16
    assert message.usage.input_tokens + 16 == counted.input_tokens
    told = [{"role": "system", "content": "Be brief"}, *HI]
    assert counted.input_tokens == len(model.encode_chat(told))
    assert message._request_id == message.id
    story = (await fleet.http.get(f"/fleet/requests/{message.id}")).json()
    assert story["prompt_tokens"] == counted.input_tokens


async def test_the_client_streams_text(make_fleet, model):
    fleet = await answering(make_fleet, model, "one two three")
    async with client_of(fleet) as client:
        async with client.messages.stream(model=MODEL, max_tokens=60, messages=HI) as stream:
            pieces = [piece async for piece in stream.text_stream]
            message = await stream.get_final_message()
    assert "".join(pieces) == "one two three" == message.content[0].text
    assert len(pieces) > 1
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 3


async def test_the_events_of_a_stream_stand_in_their_order(make_fleet, model):
    fleet = await answering(make_fleet, model, f"So: {CALL}")
    events = await events_of(fleet, tools=[WEATHER])
    names = [name for name, _ in events]
    shortened = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert shortened == ["message_start", *block, *block, "message_delta", "message_stop"]
    started = events[0][1]["message"]
    assert (started["content"], started["stop_reason"]) == ([], None)
    assert started["usage"]["input_tokens"] > 0
    starts = [data for name, data in events if name == "content_block_start"]
    assert [(s["index"], s["content_block"]["type"]) for s in starts] == [
        (0, "text"),
        (1, "tool_use"),
    ]
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(d.get("text", "") for d in deltas) == "So: "
    assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == {"city": "Paris"}
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": 100000000000000000000000}', '{"city": 100000000000000000000000}'),
        ('{"city": [-9223372036854775809, 1e999, 0.10]}', None),
        ('{"city": 0.123456789012345678}', None),
        ('{"city": [NaN, -Infinity]}', '{"city":[null,-1e999]}'),  # neither is JSON
        ('{"city": [1, 1e999', '{"city":[1,1e999]}'),
        ('{"city": 36893488147419103232', '{"city":36893488147419103232}'),
    ],
)
async def test_numbers_of_a_call_have_the_digits_of_the_model(make_fleet, model, arguments, shown):
    """They ended a finished answer with 500, or were null."""
    end = "}</tool_call>" if arguments.endswith("}") else ""
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}{end}'
    fleet = await answering(make_fleet, model, text)
    count = len(model.tokenizer.encode(text))
    body = {"model": MODEL, "messages": HI, "max_tokens": 60 if end else count}
    answer = await fleet.http.post("/v1/messages", json=body | {"tools": [WEATHER]})
    assert answer.status_code == 200, answer.text
    assert f'"input":{shown or arguments}' in answer.text


async def test_tools_go_round(make_fleet, model):
    """A call, its result, and the answer to it: what the workers are told is a chat's prompt."""
    fleet = await answering(make_fleet, model, CALL)
    worker = fleet.workers["decode-0"]
    async with client_of(fleet) as client:
        first = await client.messages.create(
            model=MODEL, max_tokens=60, messages=HI, tools=[WEATHER], tool_choice={"type": "any"}
        )
        (call,) = first.content
        assert first.stop_reason == "tool_use"
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
        assert worker.submissions[-1].sampling.grammar
        worker.script.answer = model.tokenizer.encode("18 degrees")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 C"}
        turns = [
            *HI,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        second = await client.messages.create(
            model=MODEL, max_tokens=60, messages=turns, tools=[WEATHER]
        )
    assert second.content[0].text == "18 degrees"
    function = {"name": "weather", "arguments": json.dumps(call.input)}
    called = {"id": call.id, "type": "function", "function": function}
    chat = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.id, "content": "18 C"},
        {"role": "user", "content": "So?"},
    ]
    schema = WEATHER["input_schema"]
    tool = {"name": "weather", "description": "Of a city", "parameters": schema}
    await fleet.chat(messages=chat, tools=[{"type": "function", "function": tool}])
    as_message, as_chat = worker.submissions[-2:]
    assert as_message.prompt_tokens == as_chat.prompt_tokens


async def test_the_clients_tool_runner_goes_on_without_threads(make_fleet, model):
    """It asks for a conversation that the server keeps, and knows the refusal."""
    fleet = await answering(make_fleet, model, CALL)
    worker, given = fleet.workers["decode-0"], []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Of a city."""
        given.append(city)
        worker.script.answer = model.tokenizer.encode("18 degrees")
        return "18 C"

    async with client_of(fleet) as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=60, messages=HI, tools=[weather]
        )
        last = await runner.until_done()
    assert (given, last.content[0].text) == (["Paris"], "18 degrees")


async def test_tool_choices_reach_the_grammar(make_fleet, model):
    fleet = await answering(make_fleet, model, "x")
    worker = fleet.workers["decode-0"]
    choices = [
        {"type": "auto"},
        {"type": "any"},
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
        {"type": "none"},
    ]
    async with client_of(fleet) as client:
        for choice in choices:
            await client.messages.create(
                model=MODEL, max_tokens=9, messages=HI, tools=[WEATHER], tool_choice=choice
            )
    grammars = [sent.sampling.grammar for sent in worker.submissions]
    assert len(set(grammars[:3])) == 3
    assert grammars[2] == grammars[3]
    assert grammars[4] == ""


async def test_structured_output_is_the_grammar_of_the_schema(make_fleet, model):
    fleet = await answering(make_fleet, model, '{"city": "Paris"}')
    schema = WEATHER["input_schema"] | {"additionalProperties": False}
    async with client_of(fleet) as client:
        message = await client.messages.create(
            model=MODEL,
            max_tokens=60,
            messages=HI,
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    assert json.loads(message.content[0].text) == {"city": "Paris"}
    assert "city" in fleet.workers["decode-0"].submissions[0].sampling.grammar


async def test_why_an_answer_ended(make_fleet, model):
    fleet = await answering(make_fleet, model, "one two three four five six")
    async with client_of(fleet) as client:
        cut = await client.messages.create(model=MODEL, max_tokens=2, messages=HI)
        stopped = await client.messages.create(
            model=MODEL, max_tokens=60, messages=HI, stop_sequences=["three"]
        )
        huge = await client.messages.create(model=MODEL, max_tokens=20_000, messages=HI)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
    assert stopped.content[0].text == "one two "
    assert huge.stop_reason == "end_turn", "a limit beyond the context is no error"


async def test_an_answer_that_fills_the_context_says_so(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script(step_s=0)})
    long = [{"role": "user", "content": "a " * 8100}]
    answer = await fleet.http.post(
        "/v1/messages", json={"model": MODEL, "max_tokens": 32_000, "messages": long}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["stop_reason"] == "model_context_window_exceeded"


async def test_errors_are_the_clients_own(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script()}, api_keys={"key": ApiKeyConfig()})
    async with client_of(fleet, api_key="key") as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="other", max_tokens=9, messages=HI)
        assert missing.value.type == "not_found_error"
        assert missing.value.request_id == missing.value.body["request_id"]
        with pytest.raises(anthropic.BadRequestError, match="temperature") as hot:
            await client.messages.create(
                model=MODEL, max_tokens=9, messages=HI, extra_body={"temperature": -1}
            )
        assert hot.value.type == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(model=MODEL, max_tokens=0, messages=HI)
        await client.messages.create(model=MODEL, max_tokens=2, messages=HI)  # by x-api-key
    async with client_of(fleet, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as stranger:
            await client.messages.create(model=MODEL, max_tokens=9, messages=HI)
        assert stranger.value.type == "authentication_error"


async def test_every_refusal_has_anthropics_shape(make_fleet):
    fleet = await make_fleet({"decode-0": Script(fail=("unavailable", "no room", True))})
    body = {"model": MODEL, "max_tokens": 9, "messages": HI}
    post = fleet.http.post
    answers = {
        400: await post("/v1/messages", content=b"{"),
        404: await post("/v1/messages/batches", json=body),
        405: await fleet.http.get("/v1/messages"),
        413: await post("/v1/messages", content=b" " * (5 * 1024 * 1024)),
        529: await post("/v1/messages", json=body),
    }
    for status, answer in answers.items():
        told = answer.json()
        assert answer.status_code == status, told
        assert told["type"] == "error"
        assert answer.headers["request-id"] == told["request_id"] != ""
        assert told["error"]["message"]
    assert answers[529].json()["error"]["type"] == "overloaded_error"
    assert answers[529].headers["retry-after"] == "1"
    page = (await fleet.http.get("/metrics")).text
    assert 'baton_requests_total{endpoint="messages",status="529"' in page
    assert 'baton_requests_total{endpoint="messages",status="400"' in page


async def test_a_full_queue_is_a_rate_limit(make_fleet):
    fleet = await make_fleet(
        {"decode-0": Script(step_s=0.05)}, window_requests=1, max_queued_requests=1
    )
    running = [asyncio.create_task(fleet.chat(max_tokens=20)) for _ in range(2)]
    await until(lambda: fleet.lane.gateway.admission.waiting == 1)
    async with client_of(fleet) as client:
        with pytest.raises(anthropic.RateLimitError) as full:
            await client.messages.create(model=MODEL, max_tokens=9, messages=HI)
    assert full.value.type == "rate_limit_error"
    assert int(full.value.response.headers["retry-after"]) >= 1
    await asyncio.gather(*running)


async def test_a_failure_in_the_middle_is_an_event(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.02)})
    async with client_of(fleet) as client:
        with pytest.raises(anthropic.APIStatusError) as broken:
            async with client.messages.stream(model=MODEL, max_tokens=200, messages=HI) as stream:
                async for _ in stream.text_stream:
                    fleet.lane.gateway.stopping = True
                    fleet.lane.gateway.end_all()
    assert broken.value.body["error"]["type"] == "overloaded_error"


async def test_a_client_that_leaves_leaves_nothing(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.02)})
    worker = fleet.workers["decode-0"]
    async with client_of(fleet) as client:
        async with client.messages.stream(model=MODEL, max_tokens=500, messages=HI) as stream:
            async for _ in stream.text_stream:
                break
    await until(lambda: worker.cancels)
    await until(lambda: not fleet.lane.gateway.in_flight)
    page = (await fleet.http.get("/metrics")).text
    assert 'baton_requests_total{endpoint="messages",status="499"' in page


async def test_silence_is_broken_by_pings(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.3)}, keep_alive_s=0.1)
    names = [name for name, _ in await events_of(fleet, max_tokens=2)]
    assert "ping" in names
    assert names[0] == "message_start"


THINKS = (  # a model that thinks is known by the tags in its template
    "{# <think></think> #}"
    "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    "{{ enable_thinking }} {{ reasoning_effort }}"
)


def prompt_of(fleet, model, at: int = -1) -> str:
    """The text that a worker was given."""
    packed = fleet.workers["decode-0"].submissions[at].prompt_tokens
    ids = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
    return model.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture
async def thinking(make_fleet, artifact, model):
    """A fleet whose model thinks before it answers."""
    served = ServedModel(artifact, (MODEL,), chat_template=THINKS)
    ids = model.tokenizer.encode("<think>Let me see</think>Paris")
    return await make_fleet(
        {"decode-0": Script(answer=ids, stop_token=2, step_s=0.001)}, served=served
    )


async def test_thinking_is_a_block_of_its_own(thinking, model):
    async with client_of(thinking) as client:
        more = {"model": MODEL, "max_tokens": 60, "messages": HI}
        message = await client.messages.create(**more, thinking={"type": "adaptive"})
        async with client.messages.stream(**more) as stream:
            streamed = await stream.get_final_message()
        hidden = await client.messages.create(
            **more, thinking={"type": "adaptive", "display": "omitted"}
        )
    assert [(b.type, getattr(b, b.type)) for b in message.content] == [
        ("thinking", "Let me see"),
        ("text", "Paris"),
    ]
    assert [(b.type, getattr(b, b.type)) for b in streamed.content] == [
        ("thinking", "Let me see"),
        ("text", "Paris"),
    ]
    assert message.usage.output_tokens_details.thinking_tokens > 2
    assert [b.type for b in hidden.content] == ["text"]
    assert hidden.usage.output_tokens == message.usage.output_tokens


async def test_what_was_thought_and_how_to_think_reach_the_template(thinking, model):
    thought = {"type": "thinking", "thinking": "Let me see", "signature": ""}
    turns = [
        *HI,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Paris"}]},
        {"role": "user", "content": "more"},
    ]
    async with client_of(thinking) as client:
        more = {"model": MODEL, "max_tokens": 60, "messages": turns}
        await client.messages.create(**more, thinking={"type": "disabled"})
        await client.messages.create(
            **more, thinking={"type": "adaptive"}, output_config={"effort": "high"}
        )
    conversation = "[user:|hi][assistant:Let me see|Paris][user:|more]"
    assert prompt_of(thinking, model, 0).startswith(f"{conversation}False ")
    assert prompt_of(thinking, model, 1).startswith(f"{conversation}True high")


async def test_an_answer_goes_on_with_the_assistants_last_turn(make_fleet, model):
    fleet = await answering(make_fleet, model, " Paris")
    turns = [*HI, {"role": "assistant", "content": "It is"}]
    async with client_of(fleet) as client:
        message = await client.messages.create(model=MODEL, max_tokens=60, messages=turns)
    assert message.content[0].text == " Paris"
    assert prompt_of(fleet, model).endswith("It is")


async def test_fields_that_nobody_knows_are_named_or_refused(make_fleet, model):
    body = {"model": MODEL, "max_tokens": 2, "mood": 1}
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "tone": 2}]
    body["messages"] = [{"role": "user", "content": parts}]
    fleet = await make_fleet({"decode-0": Script()})
    answer = await fleet.http.post("/v1/messages", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-baton-ignored"] == "mood, messages[].content[].tone"
    strict = await make_fleet({"decode-0": Script()}, clients=ClientLimitsConfig(strict=True))
    refused = await strict.http.post("/v1/messages", json=body)
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert "mood" in refused.json()["error"]["message"]


REFUSED = [
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].source",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
                    ],
                }
            ]
        },
        "messages[0].content[1]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    (
        {
            "messages": [
                *HI,
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "5"}],
                },
            ]
        },
        "messages[1].content[0]",
    ),
    ({"messages": []}, "messages"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"top_p": 2}, "top_p"),
    ({"max_tokens": None}, "max_tokens"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
        "output_config.format",
    ),
]


async def test_what_is_refused_is_named_as_the_caller_wrote_it(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    for more, param in REFUSED:
        body = {"model": MODEL, "max_tokens": 9, "messages": HI} | more
        answer = await fleet.http.post("/v1/messages", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert error["details"]["param"].startswith(param), error
        assert param in error["message"]
        assert not fleet.workers["decode-0"].submissions
