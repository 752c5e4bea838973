"""Liberal in what is replayed, strict in what changes the answer."""

import json

import pytest

from baton.config.clients import ClientLimitsConfig
from router.served_model import ServedModel
from tests.router.conftest import MODEL, events_of
from tests.router.emulated_worker import Script

USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0)})


def prompt_of(fleet, model, index: int = -1) -> str:
    """The text that reached the worker."""
    sent = fleet.workers["decode-0"].submissions[index].prompt_tokens
    ids = [int.from_bytes(sent[i : i + 4], "little") for i in range(0, len(sent), 4)]
    return model.tokenizer.decode(ids, skip_special_tokens=False)


def metric(page: str, start: str) -> float:
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(start))


REPLAYED = [
    {"role": "assistant", "content": "b", "annotations": [], "refusal": None, "audio": None},
    {"role": "assistant", "content": "b", "provider_specific_fields": {"refusal": None}},
    {"role": "assistant", "content": "b", "reasoning_content": None, "function_call": None},
    {"role": "assistant", "content": "b", "reasoning_content": "hm", "id": "msg_1", "index": 0},
    {"role": "assistant", "content": "b", "name": "helper", "parsed": {"x": 1}},
    {"role": "assistant", "content": None, "refusal": "b"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "b"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}],
    },
    {"role": "assistant", "content": ["b"]},
]


async def test_what_clients_send_back_makes_the_same_prompt(fleet, model):
    plain = {"role": "assistant", "content": "b"}
    assert (await fleet.chat(messages=[USER, plain, USER])).status_code == 200
    for message in REPLAYED:
        answer = await fleet.chat(messages=[USER, message, USER])
        assert answer.status_code == 200, answer.text
        assert "x-baton-ignored" not in answer.headers, message
    submissions = fleet.workers["decode-0"].submissions
    assert {s.prompt_tokens for s in submissions} == {submissions[0].prompt_tokens}


async def test_an_own_answer_can_be_sent_back_as_it_is(fleet):
    message = (await fleet.chat()).json()["choices"][0]["message"]
    assert (await fleet.chat(messages=[USER, message, USER])).status_code == 200
    nothing = {"role": "assistant", "content": None}  # of an answer that was thinking only
    assert (await fleet.chat(messages=[USER, nothing, USER])).status_code == 200


async def test_a_developer_is_the_system_and_parts_may_be_marked(fleet, model):
    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    await fleet.chat(messages=[{"role": "system", "content": "Be brief."}, USER])
    await fleet.chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": marked, "name": "ann"},
        ]
    )
    assert prompt_of(fleet, model, 0) == prompt_of(fleet, model, 1)


async def test_hints_change_nothing(fleet, model):
    hints = {
        "reasoning_effort": "low",
        "verbosity": "high",
        "store": True,
        "metadata": {"a": 1},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "service_tier": "flex",
        "prediction": {"type": "content", "content": "x"},
        "safety_identifier": "s",
        "request_id": "r",
    }
    plain, hinted = await fleet.chat(), await fleet.chat(**hints)
    assert hinted.status_code == 200
    assert plain.json()["choices"] == hinted.json()["choices"]
    assert "x-baton-ignored" not in hinted.headers


async def test_values_are_read_as_vllm_reads_them(fleet):
    coerced = {"temperature": "0.5", "max_tokens": 5.0, "n": "1", "seed": "1", "stream": 0}
    answer = await fleet.http.post(
        "/v1/chat/completions", json={"messages": [USER], "stop": ["x"] * 16, **coerced}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == MODEL  # the one that is served
    sampling = fleet.workers["decode-0"].submissions[0].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.5, 5, 1)
    assert (await fleet.chat(temperature=50)).status_code == 200
    assert (await fleet.chat(model=None)).json()["model"] == MODEL


UNKNOWN = {
    "mood": 1,
    "messages": [{**USER, "colour": "red"}, {**USER, "colour": "blue"}],
    "stream_options": {"speed": 1},
}
NAMED = "messages[].colour, mood, stream_options.speed"  # in the order of the body


async def test_unknown_fields_are_named_in_a_header_and_counted(fleet):
    stream = await fleet.chat(**UNKNOWN, stream=True)
    assert (stream.status_code, stream.headers["x-baton-ignored"]) == (200, NAMED)
    assert events_of(stream.text)[-1] == "[DONE]"
    whole = await fleet.chat(mood=1)
    assert whole.headers["x-baton-ignored"] == "mood"
    refused = await fleet.chat(mood=1, temperature=-1)
    assert (refused.status_code, refused.headers["x-baton-ignored"]) == (400, "mood")
    tokens = await fleet.http.post("/tokenize", json={"prompt": "a", "mood": 1})
    assert tokens.headers["x-baton-ignored"] == "mood"
    page = (await fleet.http.get("/metrics")).text
    assert metric(page, 'baton_ignored_fields_total{where="body"') == 4
    assert metric(page, 'baton_ignored_fields_total{where="messages[]"') == 1


async def test_a_header_is_short_and_harmless_whatever_the_names_are(fleet):
    strange = {f"k\r\nx-evil: {i} é": 1 for i in range(40)} | {"y" * 500: 1}
    answer = await fleet.chat(**strange)
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    assert len(answer.headers["x-baton-ignored"]) < 1200
    assert answer.headers["x-baton-ignored"].endswith(", ...")


async def test_a_strict_fleet_refuses_unknown_fields_by_name(make_fleet):
    fleet = await make_fleet({"decode-0": Script()}, clients=ClientLimitsConfig(strict=True))
    for change, param in (
        ({"mood": 1}, "mood"),
        ({"messages": [USER, {**USER, "colour": 1}]}, "messages[1].colour"),
        ({"stream": True, "stream_options": {"speed": 1}}, "stream_options.speed"),
    ):
        answer = await fleet.chat(**change)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await fleet.chat(store=True, messages=[USER, REPLAYED[1]])).status_code == 200


async def test_no_message_shows_our_insides(fleet):
    for wrong in (
        {"tool_choice": {"type": "allowed"}},
        {"tool_choice": "any"},
        {"tools": [5]},
        {"messages": [5]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"response_format": 5},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        {"stop": 5},
        {"logit_bias": [1]},
        {"stream_options": 5},
    ):
        answer = await fleet.chat(**wrong)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        for inside in (
            "literal[",
            "Tagged",
            "ToolNamed",
            "Body",
            "instance of",
            "pydantic",
            "tag ",
        ):
            assert inside not in message, message


async def test_the_clients_own_id_comes_back_and_finds_the_request(fleet):
    answer = await fleet.chat(headers={"x-request-id": "trace-7:a"})
    assert answer.headers["x-request-id"] == "trace-7:a"
    own = answer.json()["id"]
    assert own.startswith("chatcmpl-")
    explained = (await fleet.http.get("/fleet/requests/trace-7:a")).json()
    assert (explained["id"], explained["client_request_id"]) == (own, "trace-7:a")
    refused = await fleet.chat(headers={"x-request-id": "trace-8"}, n=0)
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "trace-8")
    stream = await fleet.chat(headers={"x-request-id": "trace-9"}, stream=True)
    assert stream.headers["x-request-id"] == "trace-9"
    for bad in ("a b", 'x"y', "é".encode(), "z" * 129, ""):
        answer = await fleet.chat(headers={"x-request-id": bad})
        assert answer.headers["x-request-id"] == answer.json()["id"]


async def test_a_text_may_show_special_tokens_and_what_ended_it(make_fleet, model):
    ids = model.tokenizer.encode("one<|im_start|> two three")
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})

    async def text(**body):
        answer = await fleet.chat(max_tokens=50, **body)
        return answer.json()["choices"][0]["message"]["content"]

    assert await text() == "one two three"
    assert await text(skip_special_tokens=False) == "one<|im_start|> two three"
    assert await text(stop=["two"]) == "one "
    assert await text(stop=["two"], include_stop_str_in_output=True) == "one two"
    shown = await text(include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown == "one<|im_start|> two three<|im_end|>"


async def test_a_prompt_may_be_cut_to_its_last_tokens(fleet, model):
    ids = model.tokenizer.encode("one two three four five")
    await fleet.complete("one two three four five", truncate_prompt_tokens=2)
    assert prompt_of(fleet, model) == model.tokenizer.decode(ids[-2:])
    long = "hi " * 9000
    assert (await fleet.complete(long)).status_code == 400
    answer = await fleet.complete(long, truncate_prompt_tokens=-1, max_tokens=4)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == 8192
    assert (await fleet.chat(long, truncate_prompt_tokens=100)).json()["usage"][
        "prompt_tokens"
    ] == 100


async def test_an_answer_may_go_on_with_the_last_message(fleet, model):
    begun = {"role": "assistant", "content": "The capital of France is "}
    answer = await fleet.chat(messages=[USER, begun], continue_final_message=True)
    assert answer.status_code == 200, answer.text
    assert prompt_of(fleet, model).endswith("<|im_start|>assistant\nThe capital of France is ")
    await fleet.chat(messages=[USER, begun], add_generation_prompt=False)
    assert prompt_of(fleet, model).endswith("France is <|im_end|>\n")
    refused = await fleet.chat(
        messages=[USER, {"role": "assistant", "content": " "}], continue_final_message=True
    )
    assert refused.json()["error"]["param"] == "continue_final_message"


TOLD = (
    "{% for m in messages %}{{ m.role }} {{ m.name }}: {{ m.content }};{% endfor %}"
    "{{ enable_thinking }} {{ reasoning_effort }} {{ colour }}"
)


async def test_a_template_is_told_what_it_knows(make_fleet, artifact, model):
    served = ServedModel(artifact, (MODEL,), chat_template=TOLD)
    fleet = await make_fleet({"decode-0": Script()}, served=served)
    await fleet.chat(
        messages=[{**USER, "name": "ann"}],
        reasoning_effort="low",
        chat_template_kwargs={"colour": "red"},
    )
    assert prompt_of(fleet, model) == "user ann: hi; low red"
    await fleet.chat(messages=[USER], reasoning_effort="none")
    assert prompt_of(fleet, model) == "user : hi;False none "
    await fleet.chat(messages=[USER], enable_thinking=True, reasoning_effort="high")
    assert prompt_of(fleet, model) == "user : hi;True high "


async def test_a_template_cannot_be_made_to_run_for_long_by_what_it_is_told(make_fleet, artifact):
    template = "{% for i in range(n) %}x{% endfor %}"
    served = ServedModel(artifact, (MODEL,), chat_template=template)
    fleet = await make_fleet({"decode-0": Script()}, served=served)
    answer = await fleet.chat(chat_template_kwargs={"n": 10**9})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert json.loads(answer.content)["error"]["code"] == "invalid_request"


async def test_ids_stand_beside_the_text_where_asked_for(make_fleet, model):
    ids = model.tokenizer.encode("one two three")
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    prompt = model.tokenizer.encode("hi")
    whole = (await fleet.complete(["hi", "hi"], max_tokens=9, return_token_ids=True)).json()
    assert [(c["token_ids"], c["prompt_token_ids"]) for c in whole["choices"]] == [
        (ids, prompt)
    ] * 2
    streamed = await fleet.complete(max_tokens=9, return_token_ids=True, stream=True)
    choices = [event["choices"][0] for event in events_of(streamed.text)[:-1]]
    assert [id_ for choice in choices for id_ in choice["token_ids"]] == ids
    assert [choice.get("prompt_token_ids") for choice in choices][:2] == [prompt, None]
    chat = (await fleet.chat(max_tokens=9, return_token_ids=True)).json()
    assert chat["choices"][0]["token_ids"] == ids
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    events = events_of((await fleet.chat(max_tokens=9, return_token_ids=True, stream=True)).text)[
        :-1
    ]
    assert events[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [i for e in events[1:] for i in e["choices"][0]["token_ids"]] == ids
    assert "token_ids" not in (await fleet.chat()).json()["choices"][0]


async def test_a_stream_may_tell_its_usage_all_along(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script(step_s=0.02)})
    options = {"include_usage": True, "continuous_usage_stats": True}
    for answer in (
        await fleet.chat(stream=True, stream_options=options, max_tokens=4),
        await fleet.complete(stream=True, stream_options=options, max_tokens=4),
    ):
        usages = [event["usage"] for event in events_of(answer.text)[:-1]]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert (counts[-1], len(set(counts)) > 2) == (4, True)
        assert all(usage["prompt_tokens"] > 0 for usage in usages)
