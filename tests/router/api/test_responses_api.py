"""OpenAI's Responses API, as the official client and as bytes; what it keeps is in a real Redis."""

import json
import threading

import openai
import pytest
from pydantic import BaseModel

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig, StoredResponsesConfig
from baton.registry.redis_store import Registry
from baton.registry.stored_responses import StoredResponses, StoreLimits
from baton.telemetry.metrics import Metrics
from fleet.local.redis_server import EmbeddedRedis
from router.frontend.api.responses import store
from router.served_model import ServedModel
from router.tenants.policies import TenantPolicies
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city",
    "parameters": SCHEMA,
    "strict": True,
}
KEYS = {"key-one": ApiKeyConfig(tenant="one"), "key-two": ApiKeyConfig(tenant="two")}


@pytest.fixture(scope="module")
def redis_server():
    server = EmbeddedRedis()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def registry(redis_server):
    made = Registry(redis_server.url, "test")
    yield made
    await made.close()


@pytest.fixture
def stored(registry):
    limits = StoreLimits(keep_s=60, tenant_bytes=10**6, total_bytes=10**7)
    return StoredResponses(registry, limits)


def client_of(fleet, **more) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{fleet.url}/v1", **{"api_key": "none", "max_retries": 0} | more
    )


@pytest.fixture
async def answering(make_fleet, model, registry, stored):
    """``await answering(text)``: a fleet whose answers are that, until a script is changed."""

    async def make(text: str, script: dict | None = None, **more):
        ids = model.tokenizer.encode(text)
        fields = {"answer": ids, "stop_token": 2, "step_s": 0.001} | (script or {})
        settings = {"registry": registry, "responses": stored} | more
        return await make_fleet({"decode-0": Script(**fields)}, **settings)

    return make


async def events_of(fleet, **body) -> list[dict]:
    response = await fleet.http.post(
        "/v1/responses", json={"model": MODEL, "input": "hi", "stream": True} | body
    )
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def told_to(fleet, at: int = -1) -> bytes:
    """The prompt of a request, as its worker got it."""
    return fleet.workers["decode-0"].submissions[at].prompt_tokens


def text_of(fleet, model, at: int = -1) -> str:
    """The same as text."""
    packed = told_to(fleet, at)
    ids = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
    return model.tokenizer.decode(ids, skip_special_tokens=False)


async def as_chat(fleet, **body) -> bytes:
    """The prompt that a chat has."""
    await fleet.chat(**body)
    return told_to(fleet)


async def test_the_client_gets_a_whole_response(answering, model):
    fleet = await answering("Paris it is", {"cached_tokens": 16})
    async with client_of(fleet) as client:
        response = await client.responses.create(
            model=MODEL, instructions="Be brief", input="hi", metadata={"a": "b"}, temperature=0.5
        )
        counted = await client.responses.input_tokens.count(
            model=MODEL, instructions="Be brief", input="hi"
        )
    assert response.output_text == "Paris it is"
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (response.metadata, response.temperature) == ({"a": "b"}, 0.5)
    assert response.instructions == "Be brief"
    assert response.usage.input_tokens == counted.input_tokens
    assert response.usage.input_tokens_details.cached_tokens == 16
    assert response.usage.output_tokens == len(model.tokenizer.encode("Paris it is")) + 1
    story = (await fleet.http.get(f"/fleet/requests/{response.id}")).json()
    assert story["prompt_tokens"] == counted.input_tokens
    system = {"role": "system", "content": "Be brief"}
    sent = told_to(fleet)
    assert sent == await as_chat(fleet, messages=[system, {"role": "user", "content": "hi"}])


async def test_the_client_streams_text(answering):
    fleet = await answering("one two three")
    async with client_of(fleet) as client:
        async with client.responses.stream(model=MODEL, input="hi") as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            response = await stream.get_final_response()
    assert "".join(deltas) == "one two three" == response.output_text
    assert len(deltas) > 1
    assert response.usage.output_tokens > 3


async def test_the_events_of_a_text_stand_in_their_order(answering):
    fleet = await answering("one two three")
    events = await events_of(fleet)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert final["output"] == [events[-2]["item"]]
    assert len({e["item_id"] for e in events if "item_id" in e} | {final["output"][0]["id"]}) == 1
    assert len({e["response"]["id"] for e in events if "response" in e}) == 1


async def test_the_events_of_a_call_stand_in_their_order(answering):
    fleet = await answering(f"So: {CALL}")
    events = await events_of(fleet, tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    call = kinds.index("function_call_arguments.delta") - 1
    shortened = [k for i, k in enumerate(kinds[call:]) if i == 0 or kinds[call + i - 1] != k]
    assert shortened == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added, done = events[call], events[-2]
    assert (added["output_index"], added["item"]["arguments"]) == (1, "")
    assert done["item"]["name"] == "weather"
    pieces = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert json.loads("".join(pieces)) == json.loads(done["item"]["arguments"]) == {"city": "Paris"}
    assert [item["type"] for item in events[-1]["response"]["output"]] == [
        "message",
        "function_call",
    ]


async def test_tools_go_round_with_and_without_a_stored_response(answering, model):
    """A call, its result, and the answer to it: what the workers are told is a chat's prompt."""
    fleet = await answering(CALL)
    worker = fleet.workers["decode-0"]
    async with client_of(fleet) as client:
        first = await client.responses.create(
            model=MODEL, input="hi", tools=[WEATHER], tool_choice="required"
        )
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "weather",
            {"city": "Paris"},
        )
        assert worker.submissions[-1].sampling.grammar
        worker.script.answer = model.tokenizer.encode("18 degrees")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 C"}
        more = {"model": MODEL, "tools": [WEATHER]}
        stored = await client.responses.create(
            previous_response_id=first.id, input=[result], **more
        )
        replayed = await client.responses.create(
            input=[{"role": "user", "content": "hi"}, call, result], store=False, **more
        )
        referenced = await client.responses.create(
            input=[
                {"role": "user", "content": "hi"},
                {"type": "item_reference", "id": call.id},
                result,
            ],
            **more,
        )
    assert stored.output_text == replayed.output_text == referenced.output_text == "18 degrees"
    assert stored.previous_response_id == first.id
    called = {"name": "weather", "arguments": call.arguments}
    chat = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "18 C"},
    ]
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    expected = await as_chat(
        fleet, messages=chat, tools=[{"type": "function", "function": function}]
    )
    assert [told_to(fleet, at) for at in (-4, -3, -2)] == [expected] * 3


async def test_the_client_parses_structured_output(answering):
    class City(BaseModel):
        city: str

    fleet = await answering('{"city": "Paris"}')
    async with client_of(fleet) as client:
        response = await client.responses.parse(model=MODEL, input="hi", text_format=City)
    assert response.output_parsed == City(city="Paris")
    assert "city" in fleet.workers["decode-0"].submissions[0].sampling.grammar
    assert response.text.format.type == "json_schema"


async def test_a_response_cut_by_its_limit_is_incomplete(answering):
    fleet = await answering("one two three four")
    async with client_of(fleet) as client:
        response = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
        huge = await client.responses.create(model=MODEL, input="hi", max_output_tokens=10**6)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert (response.output[0].status, response.usage.output_tokens) == ("incomplete", 2)
    assert huge.status == "completed", "a limit beyond the context is no error"
    events = await events_of(fleet, max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"


THINKS = (  # a model that thinks is known by the tags in its template
    "{# <think></think> #}"
    "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    "{{ enable_thinking }} {{ reasoning_effort }}"
)


async def test_thinking_is_an_item_of_its_own_and_is_told_to_the_next_turn(
    answering, artifact, model
):
    served = ServedModel(artifact, (MODEL,), chat_template=THINKS)
    fleet = await answering("<think>Let me see</think>Paris", served=served)
    async with client_of(fleet) as client:
        first = await client.responses.create(
            model=MODEL, input="hi", reasoning={"effort": "low", "summary": "auto"}
        )
        async with client.responses.stream(model=MODEL, input="hi") as stream:
            kinds = [event.type.removeprefix("response.") async for event in stream]
            streamed = await stream.get_final_response()
        await client.responses.create(model=MODEL, input="more", previous_response_id=first.id)
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert first.output[0].content[0].text == "Let me see"
    assert first.output_text == streamed.output_text == "Paris"
    assert streamed.output[0].content == first.output[0].content
    assert first.reasoning.effort == "low"
    assert [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    assert text_of(fleet, model, 0).strip() == "[user:|hi] low"
    assert text_of(fleet, model).strip() == "[user:|hi][assistant:Let me see|Paris][user:|more]"


async def test_only_allowed_tools_are_in_the_grammar_and_all_in_the_prompt(answering, model):
    fleet = await answering("x")
    tools = [WEATHER, WEATHER | {"name": "time_of_day"}]
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    }
    async with client_of(fleet) as client:
        response = await client.responses.create(
            model=MODEL, input="hi", tools=tools, tool_choice=allowed
        )
    assert response.tool_choice.tools == allowed["tools"]
    grammar = fleet.workers["decode-0"].submissions[0].sampling.grammar
    assert "weather" in grammar
    assert "time_of_day" not in grammar
    assert "time_of_day" in text_of(fleet, model)


async def test_tools_and_a_schema_go_together(answering):
    fleet = await answering('{"city": "Paris"}')
    text = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}
    async with client_of(fleet) as client:
        response = await client.responses.create(
            model=MODEL, input="hi", tools=[WEATHER], text=text
        )
    assert response.output_text == '{"city": "Paris"}'
    assert response.text.format.schema_ == SCHEMA


async def test_fields_that_nobody_knows_are_named(answering):
    fleet = await answering("x")
    given = [{"role": "user", "content": "hi", "phase": "commentary", "tone": 2}]
    body = {"model": MODEL, "input": given, "mood": 1, "service_tier": "flex"}
    answer = await fleet.http.post("/v1/responses", json=body)
    assert answer.headers["x-baton-ignored"] == "input[].tone, mood"


async def test_logprobs_stand_with_the_text(answering):
    fleet = await answering("one two")
    async with client_of(fleet) as client:
        response = await client.responses.create(
            model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
        )
    shown = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in shown) == "one two"
    assert len(shown[0].top_logprobs) == 2
    events = await events_of(fleet, include=["message.output_text.logprobs"], top_logprobs=2)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert sum(len(delta["logprobs"]) for delta in deltas) == len(shown)


async def test_a_conversation_goes_on_after_a_router_was_started_again(
    answering, make_fleet, model, stored
):
    fleet = await answering("Paris it is")
    async with client_of(fleet) as client:
        first = await client.responses.create(model=MODEL, instructions="Be brief", input="one")
        second = await client.responses.create(
            model=MODEL, input="two", previous_response_id=first.id
        )
    again = await answering("Rome")
    async with client_of(again) as client:
        third = await client.responses.create(
            model=MODEL, input="three", previous_response_id=second.id
        )
        kept = await client.responses.retrieve(second.id)
    assert third.output_text == "Rome"
    assert kept == second
    says = {"role": "assistant", "content": "Paris it is"}
    chat = [
        {"role": "user", "content": "one"},
        says,
        {"role": "user", "content": "two"},
        says,
        {"role": "user", "content": "three"},
    ]
    sent = told_to(again)
    assert sent == await as_chat(again, messages=chat), "and without the first instructions"


async def test_what_is_kept_can_be_read_and_taken_away(answering):
    fleet = await answering("x")
    given = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
        {"role": "user", "content": "v"},
    ]
    async with client_of(fleet) as client:
        response = await client.responses.create(model=MODEL, input=given)
        listed = await client.responses.input_items.list(response.id, order="asc")
        kinds = [item.type for item in listed.data]
        assert kinds == ["message", "message", "function_call", "function_call_output", "message"]
        assert listed.data[0].content[0].text == "d"
        newest = await client.responses.input_items.list(response.id, limit=2)
        assert [item.id for item in newest.data] == [i.id for i in listed.data[:-3:-1]]
        assert newest.has_more
        everything = [
            item.id
            async for item in client.responses.input_items.list(response.id, limit=2, order="asc")
        ]
        assert everything == [item.id for item in listed.data]
        await client.responses.delete(response.id)
        for call in (
            client.responses.retrieve(response.id),
            client.responses.delete(response.id),
            client.responses.input_items.list(response.id),
            client.responses.cancel(response.id),
        ):
            with pytest.raises(openai.NotFoundError) as gone:
                await call
            assert gone.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError) as lost:
            await client.responses.create(model=MODEL, input="hi", previous_response_id=response.id)
        assert (lost.value.code, lost.value.param) == (
            "previous_response_not_found",
            "previous_response_id",
        )
    padded = "limit=000000001" + "0" * 5000
    for query in ("limit=0", "limit=101", "limit=x", padded, "order=up", "after=nothing"):
        again = await fleet.http.post("/v1/responses", json={"model": MODEL, "input": "hi"})
        url = f"/v1/responses/{again.json()['id']}/input_items?{query}"
        refused = await fleet.http.get(url)
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            query.partition("=")[0],
        )


async def test_another_tenant_finds_nothing(answering):
    fleet = await answering("a secret", api_keys=KEYS)
    async with client_of(fleet, api_key="key-one") as one:
        response = await one.responses.create(model=MODEL, input="hi")
        async with client_of(fleet, api_key="key-two") as two:
            for call in (
                two.responses.retrieve(response.id),
                two.responses.delete(response.id),
                two.responses.cancel(response.id),
                two.responses.input_items.list(response.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            with pytest.raises(openai.BadRequestError):
                await two.responses.create(
                    model=MODEL, input="hi", previous_response_id=response.id
                )
            with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.id"):
                reference = {"type": "item_reference", "id": response.output[0].id}
                await two.responses.create(model=MODEL, input=[reference])
        assert await one.responses.retrieve(response.id) == response
    assert (await fleet.http.get(f"/v1/responses/{response.id}")).status_code == 401


async def test_what_is_not_to_be_kept_is_not(answering):
    fleet = await answering("x")
    async with client_of(fleet) as client:
        response = await client.responses.create(model=MODEL, input="hi", store=False)
        assert response.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
    assert "not_stored" not in response.model_extra


async def test_without_redis_a_response_is_answered_and_says_that_it_is_not_kept(answering):
    server = EmbeddedRedis()
    server.start()
    registry = Registry(server.url, "test")
    limits = StoreLimits(keep_s=60, tenant_bytes=10**6, total_bytes=10**6)
    fleet = await answering("x", registry=registry, responses=StoredResponses(registry, limits))
    async with client_of(fleet) as client:
        first = await client.responses.create(model=MODEL, input="hi")
        assert first.store is True
        server.stop()
        second = await client.responses.create(model=MODEL, input="hi")
        assert (second.output_text, second.store) == ("x", False)
        assert second.not_stored == "Redis does not answer"
        final = (await events_of(fleet))[-1]
        assert (final["type"], final["response"]["store"]) == ("response.completed", False)
        with pytest.raises(openai.InternalServerError) as away:
            await client.responses.create(model=MODEL, input="hi", previous_response_id=first.id)
        assert (away.value.status_code, away.value.code) == (503, "unavailable")
        with pytest.raises(openai.InternalServerError, match="Redis does not answer"):
            await client.responses.retrieve(first.id)
    page = (await fleet.http.get("/metrics")).text
    assert 'baton_stored_responses_total{result="stored"} 1.0' in page
    assert 'baton_stored_responses_total{result="failed"} 2.0' in page
    await registry.close()


async def test_what_is_too_large_is_answered_and_not_kept(answering):
    limits = ClientLimitsConfig(stored_responses=StoredResponsesConfig(max_response_bytes=2000))
    fleet = await answering("x", clients=limits)
    response = await fleet.http.post("/v1/responses", json={"model": MODEL, "input": "hi " * 1000})
    assert response.status_code == 200
    assert response.json()["store"] is False
    assert "2000" in response.json()["not_stored"]


async def test_a_conversation_that_is_too_long_is_cut_only_if_asked(answering, model):
    fleet = await answering("x", max_body_bytes=10**6)
    turns = [{"role": "developer", "content": "Be brief"}]
    for number in range(9):
        turns += [
            {"role": "user", "content": f"{number} " * 600},
            {"role": "assistant", "content": "yes"},
        ]
    turns.append({"role": "user", "content": "So?"})
    async with client_of(fleet) as client:
        with pytest.raises(openai.BadRequestError) as long:
            await client.responses.create(model=MODEL, input=turns)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
        response = await client.responses.create(model=MODEL, input=turns, truncation="auto")
    assert response.usage.input_tokens > 8192 - 1300, "no more is cut than must be"
    text = text_of(fleet, model)
    assert "Be brief" in text
    assert "So?" in text
    assert "0 0 0" not in text


async def test_a_running_response_is_seen_and_cancelled(make_fleet, registry, stored):
    fleet = await make_fleet({"decode-0": Script(step_s=0.05)}, registry=registry, responses=stored)
    async with client_of(fleet) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta" and len(events) < 6:
                name = events[0].response.id
                assert (await client.responses.retrieve(name)).status == "in_progress"
                assert (await client.responses.cancel(name)).status == "cancelled"
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "cancelled"
    await until(lambda: fleet.workers["decode-0"].cancels)
    await until(lambda: not fleet.lane.gateway.in_flight)
    ended = await fleet.http.post(
        "/v1/responses", json={"model": MODEL, "input": "hi", "max_output_tokens": 2}
    )
    late = await fleet.http.post(f"/v1/responses/{ended.json()['id']}/cancel")
    assert (late.status_code, late.json()["error"]["param"]) == (400, "response_id")


async def test_a_failure_in_the_middle_is_an_event(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.02)})
    async with client_of(fleet) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                fleet.lane.gateway.end_all()
    assert event.type == "response.failed"
    assert event.response.error.code == "server_error"
    assert event.response.output[0].status == "incomplete"


async def test_a_client_that_leaves_leaves_nothing(make_fleet, registry, stored):
    fleet = await make_fleet({"decode-0": Script(step_s=0.02)}, registry=registry, responses=stored)
    async with client_of(fleet) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
    await until(lambda: fleet.workers["decode-0"].cancels)
    await until(lambda: not fleet.lane.gateway.in_flight)
    page = (await fleet.http.get("/metrics")).text
    assert 'baton_requests_total{endpoint="responses",status="499"' in page


async def test_errors_are_the_clients_own(answering):
    fleet = await answering("x", api_keys=KEYS)
    async with client_of(fleet, api_key="key-one") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="other", input="hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.responses.create(model=MODEL, input="hi", temperature=-1)
    async with client_of(fleet, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.responses.create(model=MODEL, input="hi")


REFUSED = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"content": "hi"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "5"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_nothing"}]}, "input[0].id"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"previous_response_id": "resp_never"}, "previous_response_id"),
    ({"previous_response_id": "../../x"}, "previous_response_id"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}},
        "text.format",
    ),
    ({"top_p": 7}, "top_p"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"truncation": "some"}, "truncation"),
]


async def test_what_is_refused_is_named_as_the_caller_wrote_it(answering):
    fleet = await answering("x")
    for more, param in REFUSED:
        answer = await fleet.http.post("/v1/responses", json={"model": MODEL, "input": "hi"} | more)
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert error["param"].startswith(param), error
        assert param in error["message"]
        assert not fleet.workers["decode-0"].submissions


async def test_integers_of_a_schema_may_have_any_size(answering):
    """OpenAI's clients send what JavaScript prints for 2^64."""
    fleet = await answering("x")
    number = {"type": "integer", "maximum": 18446744073709552000, "default": 10**30}
    schema = {"type": "object", "properties": {"a": number}}
    tool = WEATHER | {"parameters": schema, "strict": False}
    formats = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": False}}
    for more in ({"tools": [tool]}, {"text": formats}):
        for stream in (False, True):
            body = {"model": MODEL, "input": "hi", "stream": stream, **more}
            answer = await fleet.http.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            assert '"maximum":18446744073709552000,' in answer.text
            assert f'"default":{10**30}}}' in answer.text
    whole = await fleet.http.post("/v1/responses", json=body | {"stream": False})
    kept = await fleet.http.get(f"/v1/responses/{whole.json()['id']}")
    assert kept.json() == whole.json()


async def test_earlier_responses_may_have_no_more_bytes_than_a_body(answering):
    fleet = await answering("x", max_body_bytes=9000)
    async with client_of(fleet) as client:
        last = None
        with pytest.raises(openai.BadRequestError, match="more than 9000 bytes") as long:
            for _ in range(9):
                response = await client.responses.create(
                    model=MODEL, input="hi " * 500, previous_response_id=last
                )
                last = response.id
        assert long.value.param == "previous_response_id"
        counted = await client.responses.input_tokens.count(
            model=MODEL, input=[{"type": "item_reference", "id": response.output[0].id}]
        )
        assert counted.input_tokens > 0


async def test_what_another_version_kept_is_as_good_as_gone(answering, stored):
    fleet = await answering("x")
    for number, value in enumerate((b"garbage", b"[]", b"{}", b'{"input": 5, "response": {}}')):
        name = f"resp_{number:032x}"
        await stored.put("default", name, value)
        body = {"model": MODEL, "input": "hi", "previous_response_id": name}
        answer = await fleet.http.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "previous_response_not_found"
        for url in (f"/v1/responses/{name}", f"/v1/responses/{name}/input_items"):
            assert (await fleet.http.get(url)).status_code == 404


async def test_garbage_is_refused(answering):
    fleet = await answering("x")
    for raw in (b"", b"{", b"[]", b'"x"', b'{"model": "smollm2", "input": "\\ud800"}', b"\xff"):
        for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/messages"):
            assert (await fleet.http.post(path, content=raw)).status_code == 400


async def test_large_earlier_responses_are_read_beside_the_event_loop(stored, monkeypatch):
    """A kept megabyte of small items held the loop of each later call for a tenth of a second."""
    where = []
    whole = store._Turn.of

    def of(value):
        where.append(threading.current_thread() is threading.main_thread())
        return whole(value)

    monkeypatch.setattr(store._Turn, "of", of)
    items = [{"type": "message", "role": "user", "content": "a", "id": "m"}] * 5000
    kept = {"response": {"output": [], "previous_response_id": None}, "input": items}
    value = json.dumps(kept).encode()
    await stored.put("one", "resp_large", value)
    metrics = Metrics("router", model="m")
    reader = store.ResponseStore(stored, 10**6, metrics, TenantPolicies())
    earlier = store.EarlierResponses(reader, "one", 10**6)
    assert len(await earlier.conversation("resp_large")) == 5000
    assert where == [False]
