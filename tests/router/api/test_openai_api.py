"""The answers of chat and completions, as the official client and as bytes."""

import asyncio
from dataclasses import replace

import openai
import pytest

from baton.wire.tokens import unpack_tokens
from router.served_model import ServedModel
from tests.router.conftest import MODEL, events_of, until
from tests.router.emulated_worker import Script, answer_token

MESSAGES = [{"role": "user", "content": "hi"}]


def text_of(model, seed: int, count: int, choice: int = 0) -> str:
    return model.tokenizer.decode([answer_token(seed, choice, i) for i in range(count)])


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0.001), "prefill-0": Script(step_s=0.001)})


async def test_async_client_gets_a_whole_answer(fleet, model):
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=3, max_tokens=6
        )
    assert answer.choices[0].message.content == text_of(model, 3, 6)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens == len(model.encode_chat(MESSAGES))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")


async def test_async_client_streams(fleet, model):
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            seed=3,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == text_of(model, 3, 6)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


async def test_sync_client_works_whole_and_streaming(fleet, model):
    def use() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none") as client:
            whole = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, seed=5, max_tokens=5
            )
            stream = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, seed=5, max_tokens=5, stream=True
            )
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, streamed

    whole, streamed = await asyncio.to_thread(use)
    assert whole == streamed == text_of(model, 5, 5)


async def test_clients_helpers_for_models_and_errors_work(fleet):
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="x", max_retries=0) as client:
        names = [entry.id async for entry in client.models.list()]
        assert names == [MODEL, "alias"]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)


async def test_n_choices_come_whole_and_streamed(fleet, model):
    whole = (await fleet.chat(n=3)).json()
    texts = {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert texts == {c: text_of(model, 1, 4, c) for c in range(3)}
    assert whole["usage"]["completion_tokens"] == 12
    events = events_of((await fleet.chat(n=3, stream=True)).text)
    streamed = dict.fromkeys(range(3), "")
    for event in events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts
    assert events[-1] == "[DONE]"


async def test_chat_logprobs_stand_beside_the_text(fleet, model):
    whole = (await fleet.chat(logprobs=True, top_logprobs=2)).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    token = answer_token(1, 0, 0)
    assert content[0]["token"] == model.tokenizer.token_text(token)
    assert bytes(content[0]["bytes"]) == model.tokenizer.token_bytes(token)
    assert content[0]["logprob"] == -0.5
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -1.5]
    events = events_of((await fleet.chat(logprobs=True, top_logprobs=2, stream=True)).text)
    streamed = [
        entry
        for event in events[:-1]
        if event["choices"][0]["logprobs"]
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content
    assert (await fleet.chat()).json()["choices"][0]["logprobs"] is None


async def test_completions_have_the_legacy_logprobs(fleet, model):
    answer = (await fleet.complete(logprobs=2, max_tokens=3)).json()
    assert answer["object"] == "text_completion"
    logprobs = answer["choices"][0]["logprobs"]
    ids = [answer_token(1, 0, i) for i in range(3)]
    assert logprobs["tokens"] == [model.tokenizer.token_text(i) for i in ids]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert len(logprobs["top_logprobs"][0]) == 2
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][1] == len(model.tokenizer.decode(ids[:1]))


async def test_completions_take_many_prompts_and_echo_them(fleet, model):
    answer = (await fleet.complete(["one", "The capital"], n=2, echo=True, max_tokens=2)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] == "one" + text_of(model, 1, 2)
    assert texts[3] == "The capital" + text_of(model, 1, 2, 1)
    assert answer["usage"]["completion_tokens"] == 8
    events = events_of((await fleet.complete(["one", "two"], echo=True, stream=True)).text)
    streamed = {0: "", 1: ""}
    for event in events[:-1]:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == {0: "one" + text_of(model, 1, 16), 1: "two" + text_of(model, 1, 16)}


async def test_streams_end_with_one_finish_chunk_and_done(fleet):
    response = await fleet.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    finishes = [e["choices"][0]["finish_reason"] for e in events[:-1] if e["choices"]]
    assert [reason for reason in finishes if reason] == ["length"]
    assert events[-1] == "[DONE]"
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-2]["usage"]["total_tokens"] > 4
    assert "usage" not in events_of((await fleet.chat(stream=True)).text)[0]


async def test_headers_name_request_and_route(make_fleet):
    fleet = await make_fleet(
        {"decode-0": Script(cached_tokens=16), "prefill-0": Script(cached_tokens=16)}
    )
    response = await fleet.chat(headers={"x-baton-mode": "disaggregated"})
    route = response.headers["x-baton-route"]
    assert route == "prefill=prefill-0; decode=decode-0; mode=disaggregated; cached=16"
    assert response.headers["x-request-id"] == response.json()["id"]
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    response = await fleet.chat(stream=True, headers={"x-baton-mode": "colocated"})
    assert "mode=colocated" in response.headers["x-baton-route"]


async def test_a_stop_token_ends_the_answer_and_is_counted_not_shown(make_fleet, model):
    ids = model.tokenizer.encode("Paris is it")
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    answer = (await fleet.chat(max_tokens=50)).json()
    assert answer["choices"][0]["message"]["content"] == "Paris is it"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None  # as in vLLM
    assert answer["usage"]["completion_tokens"] == len(ids) + 1
    streamed = await fleet.complete(max_tokens=50, stream=True, stop_token_ids=[2])
    last = events_of(streamed.text)[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_over_tokens_ends_one_choice_and_tells_the_worker(
    make_fleet, model, stream
):
    ids = model.tokenizer.encode("one two three four five six seven eight nine ten")
    fleet = await make_fleet({"decode-0": Script(answer=ids, step_s=0.03)})
    response = await fleet.chat(stop=["ee fo", "zzz"], max_tokens=50, stream=stream)
    if stream:
        chunks = events_of(response.text)[:-1]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        choice = chunks[-1]["choices"][0]
    else:
        choice = response.json()["choices"][0]
        text = choice["message"]["content"]
    assert (text, choice["finish_reason"]) == ("one two thr", "stop")
    assert choice["stop_reason"] == "ee fo"
    await until(lambda: fleet.workers["decode-0"].cancels)
    await asyncio.sleep(0.1)
    assert len(fleet.workers["decode-0"].cancels) == 1


async def test_a_stop_string_ends_only_the_choice_that_has_it(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script(step_s=0.02)})
    stop = model.tokenizer.token_text(answer_token(1, 0, 2))
    answer = (await fleet.chat(n=2, max_tokens=8, stop=[stop])).json()
    first, second = answer["choices"]
    assert first["finish_reason"] == "stop"
    assert first["message"]["content"] == text_of(model, 1, 2)
    assert second["finish_reason"] == "length"
    assert second["message"]["content"] == text_of(model, 1, 8, 1)
    await until(lambda: fleet.workers["decode-0"].cancels)
    cancel = fleet.workers["decode-0"].cancels[0]
    assert list(cancel.choices) == [0]


async def test_a_character_split_over_tokens_is_never_shown_broken(make_fleet, model):
    text = "北京 👩‍👩‍👧 naïve"
    fleet = await make_fleet({"decode-0": Script(answer=model.tokenizer.encode(text))})
    chunks = events_of((await fleet.chat(stream=True, max_tokens=100)).text)[:-1]
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


async def test_every_resolved_parameter_reaches_the_worker(fleet, model):
    response = await fleet.complete(
        "The capital",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-1,
        stop_token_ids=[5, 6],
        n=2,
        logprobs=3,
        logit_bias={"7": -5},
        bad_words=["storm"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        ignore_eos=True,
        min_tokens=2,
        max_tokens=9,
        priority=-3,
        user="somebody",
    )
    assert response.status_code == 200
    sent = next(s for w in fleet.workers.values() for s in w.submissions)
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, pytest.approx(0.9))
    assert (sampling.top_k, sampling.min_p) == (40, pytest.approx(0.1))
    assert sampling.seed == 2**64 - 1
    assert list(sampling.stop_token_ids) == [5, 6]
    assert (sampling.n, sampling.logprobs) == (2, 3)
    assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(7, -5.0)]
    words = {model.tokenizer.decode(unpack_tokens(word)) for word in sampling.bad_words}
    assert words == {"storm", " storm"}
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.5
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.max_tokens) == (True, 2, 9)
    assert sent.priority == -3
    assert sent.prompt_tokens == b"".join(i.to_bytes(4, "little") for i in (504, 3575))
    assert sent.deadline_remaining_ns > 590e9
    explained = (await fleet.http.get(f"/fleet/requests/{sent.request_id}")).json()
    assert explained["user"] == "somebody"


async def test_a_default_length_fits_the_smallest_pool_that_generates(make_fleet):
    """Its refusal would fail every client that names none; a length that is named stays."""
    scripts = {
        "decode-0": Script(answer=[1000, 1001], stop_token=2, kv_blocks=96),
        "decode-1": Script(answer=[1000, 1001], stop_token=2, kv_blocks=96),
    }
    fleet = await make_fleet(scripts)
    for call in (fleet.chat(max_tokens=None), fleet.chat(max_tokens=4000)):
        assert (await call).status_code == 200
    sent = [one for name in ("decode-0", "decode-1") for one in fleet.workers[name].submissions]
    lengths = {one.sampling.max_tokens for one in sent}
    assert lengths == {4000, 96 * 16 - len(sent[0].prompt_tokens) // 4}


async def test_defaults_are_openais(make_fleet):
    fleet = await make_fleet({"decode-0": Script(answer=[1000, 1001], stop_token=2)})
    await fleet.complete("hi", seed=None)
    await fleet.chat(max_tokens=None, seed=None)
    first, second = fleet.workers["decode-0"].submissions
    assert first.sampling.max_tokens == 16
    assert second.sampling.max_tokens == 8192 - len(second.prompt_tokens) // 4
    assert first.sampling.temperature == first.sampling.top_p == 1.0
    assert first.sampling.logprobs == -1
    assert first.sampling.seed != second.sampling.seed


WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.parameters | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"
)


async def test_a_model_may_have_a_default_length_and_a_template_for_tools(make_fleet, model):
    templates = {"chat_template": "plain", "tool_template": WITH_TOOLS}
    artifact = replace(model.artifact, generation_defaults={"max_tokens": 7}, **templates)
    served = ServedModel(artifact, model.names)
    fleet = await make_fleet({"decode-0": Script(answer=[1000, 1001], stop_token=2)}, served)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    await fleet.complete("hi")
    await fleet.chat(max_tokens=None)
    assert (await fleet.chat(max_tokens=9, tools=[tool])).status_code == 200
    sent = fleet.workers["decode-0"].submissions
    assert [one.sampling.max_tokens for one in sent] == [7, 7, 9]
    prompts = [served.tokenizer.decode(unpack_tokens(one.prompt_tokens)) for one in sent[1:]]
    assert prompts == ["plain", '{"type": "object"}hi']


async def test_tenant_and_salt_separate_caches(fleet):
    seeds = []
    for headers, body in [
        ({}, {}),
        ({}, {}),
        ({"x-baton-tenant": "b"}, {}),
        ({}, {"cache_salt": "s"}),
        ({"x-baton-tenant": "b"}, {"cache_salt": "s"}),
    ]:
        await fleet.complete("hi", headers=headers, max_tokens=1, **body)
    submissions = [s for w in fleet.workers.values() for s in w.submissions]
    seeds = [s.hash_seed for s in sorted(submissions, key=lambda s: s.ticket)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4
    assert {s.tenant for s in submissions} == {"default", "b"}


async def test_long_prompts_go_on_a_call_of_their_own(make_fleet):
    fleet = await make_fleet({"decode-0": None}, unary_prompt_bytes=64)
    short, long = await fleet.complete("hi"), await fleet.complete("hi " * 40)
    assert short.status_code == long.status_code == 200
    worker = fleet.workers["decode-0"]
    assert worker.unary == [long.json()["id"]]
    shaped = await fleet.complete([5], guided_choice=["a" * 200, "b"])
    assert worker.unary == [long.json()["id"], shaped.json()["id"]], "a long grammar is as long"
    assert set(worker.tokens_metadata) == {"secret"}
