"""vLLM's calls for token ids: read by Baton's client of vLLM, and with vLLM's own fields."""

import asyncio

import pytest

from baton.config.clients import ApiKeyConfig
from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.vllm.protocol import GENERATE, ChoiceStream, generate_body
from baton.types.params import SampledToken, SamplingParams
from tests.router.conftest import MODEL, events_of, until
from tests.router.emulated_worker import Script

EOS = 2
ANSWER = [504, 3575, 282]
# Fields of vLLM 0.32.0, `vllm/entrypoints/scale_out/token_in_token_out/protocol.py` of the wheel:
# the response, the chunk, their choices (`GenerateTokens…`) and `GenerateLogProbsContent`.
STREAMED = {
    *("choices", "metrics", "mm_placeholders", "output_mode", "prompt_token_ids", "request_id"),
    "usage",
}
WHOLE = STREAMED | {
    *("created", "ec_transfer_params", "kv_transfer_params", "model", "prompt_logprobs"),
    "prompt_token_id_logprobs",
}
CHOICE = {
    *("finish_reason", "index", "logprobs", "routed_experts", "sampling_mask", "stop_reason"),
    *("token_ids", "weight_versions"),
}
SCORED = {"logprob", "rank", "token_id", "top_logprobs"}
# What vLLM's `GenerateRequest` with a grammar looks like as JSON.
OF_VLLM = {
    **dict.fromkeys(("token_offsets", "features", "content_parts", "model", "reasoning_ended")),
    **dict.fromkeys(("reasoning_parser_kwargs", "return_token_ids", "stream_options")),
    **dict.fromkeys(("cache_salt", "kv_transfer_params", "ec_transfer_params")),
    "request_id": "9341ed28",
    "output_mode": "tokens",
    "stream": False,
    "priority": 0,
    "token_ids": [1, 2],
    "sampling_params": {
        "stop": [],
        "stop_token_ids": [],
        "bad_words": [],
        "skip_reading_prefix_cache": False,
        "structured_outputs": {
            **dict.fromkeys(("json", "regex", "choice", "json_object", "whitespace_pattern")),
            **dict.fromkeys(("structural_tag", "_backend")),
            **dict.fromkeys(("disable_any_whitespace", "_backend_was_auto"), False),
            "disable_additional_properties": False,
            "grammar": 'start: "a"',
        },
    },
}


@pytest.fixture
async def fleet(make_fleet):
    script = Script(step_s=0.001, answer=ANSWER, stop_token=EOS, cached_tokens=1)
    return await make_fleet({"decode-0": script})


async def generate(fleet, status: int = 200, headers: dict | None = None, **body):
    body = {"token_ids": [5, 6, 7], "sampling_params": {}, **body}
    answer = await fleet.http.post(GENERATE, json=body, headers=headers or {})
    assert answer.status_code == status, answer.text
    return answer


@pytest.mark.parametrize("alternatives", [None, 0, 2])
async def test_our_client_of_vllm_reads_the_stream(fleet, alternatives):
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=alternatives)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=bytes(32), priority=3)
    body = generate_body("r", [5, 6, 7], spec, 0, (EOS,))
    answer = await fleet.http.post(GENERATE, content=body)
    assert answer.status_code == 200, answer.text
    assert "x-baton-ignored" not in answer.headers
    stream = ChoiceStream("r", 0, spec, (EOS,))
    runs = stream.feed(answer.content)
    scores = {
        None: lambda _: (None, ()),
        0: lambda _: (-0.5, ()),
        2: lambda token: (-0.5, ((token, -0.5), (token + 1, -1.5))),
    }[alternatives]
    expected = [SampledToken(token, *scores(token)) for token in ANSWER]
    assert [token for run in runs for token in run.tokens] == expected
    assert (stream.finished, stream.generated, stream.cached_tokens) == (True, 3, 1)
    assert (runs[-1].finish_reason, runs[-1].stop_token) == ("stop", EOS)
    submission = fleet.workers["decode-0"].submissions[0]
    assert submission.priority == 3
    assert submission.sampling.max_tokens == 9


async def test_the_fields_are_those_of_vllm(fleet):
    asked = {"sampling_params": {"logprobs": 2, "n": 2}, "return_token_ids": True}
    whole = (await generate(fleet, **asked)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events_of((await generate(fleet, **asked, **options)).text)
    assert done == "[DONE]"
    assert set(whole) <= WHOLE
    assert all(set(chunk) <= STREAMED for chunk in chunks)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        [5, 6, 7],
        *([None] * (len(chunks) - 1)),
    ]
    streamed: dict[int, list] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert set(choice) <= CHOICE
            streamed[choice["index"]] += choice["logprobs"]["content"]
    assert whole["prompt_token_ids"] == [5, 6, 7]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    for choice in whole["choices"]:
        assert set(choice) <= CHOICE
        assert (choice["token_ids"], choice["finish_reason"]) == ([*ANSWER, EOS], "stop")
        content = choice["logprobs"]["content"]
        assert content == streamed[choice["index"]]
        assert all(set(entry) == SCORED for entry in content)
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        candidates = [[top["token_id"] for top in entry["top_logprobs"]] for entry in content]
        assert candidates == [*([token, token + 1] for token in ANSWER), []]  # itself first
        # The end has none; vLLM's value for that.
        assert [entry["logprob"] for entry in content] == [-0.5, -0.5, -0.5, -9999.0]
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 8


async def test_a_request_as_vllm_writes_it_has_no_unknown_field(fleet):
    answer = await generate(fleet, **OF_VLLM)
    assert "x-baton-ignored" not in answer.headers
    assert answer.json()["request_id"] == "generate-tokens-9341ed28"
    sampling = fleet.workers["decode-0"].submissions[0].sampling
    assert sampling.grammar.startswith('start: "a"')
    assert sampling.max_tokens > 8000  # the rest of the context, as vLLM's default here


async def test_the_id_of_the_header_precedes_that_of_the_body(fleet):
    answer = await generate(fleet, request_id="body", headers={"x-request-id": "header"})
    assert answer.json()["request_id"] == "generate-tokens-header"
    bad = (await generate(fleet, request_id="a b\n")).json()["request_id"]
    assert bad.startswith("generate-tokens-")
    assert "\n" not in bad


REFUSED = [
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": ["a"]}, "token_ids[0]"),
    ({"token_ids": [10**6]}, "token_ids"),
    ({"token_ids": [5] * 9000}, "token_ids"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs"),
    ({"sampling_params": {"max_tokens": 9000}}, "sampling_params.max_tokens"),
    ({"sampling_params": {"allowed_token_ids": [1]}}, "sampling_params.allowed_token_ids"),
    (
        {"sampling_params": {"structured_outputs": {"regex": "a{"}}},
        "sampling_params.structured_outputs.regex",
    ),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"features": {"mm_hashes": {}}}, "features"),
    ({"output_mode": "text"}, "output_mode"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]


async def test_what_cannot_be_honoured_is_refused_by_name(fleet):
    for body, param in REFUSED:
        error = (await generate(fleet, 400, **body)).json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(param) or "context" in error["message"]
        assert fleet.workers["decode-0"].submissions == []


async def test_an_unknown_field_is_named(fleet):
    answer = await generate(fleet, sampling_params={"mood": 1}, colour=2)
    assert answer.headers["x-baton-ignored"] == "sampling_params.mood, colour"


async def test_a_rendered_chat_generates_what_the_chat_does(fleet):
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "seed": 4,
        "stop": "x",
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 7,
        "logit_bias": {"7": 2},
        "cache_salt": "salt",
        "response_format": {"type": "json_object"},
    }
    assert (await fleet.chat(**chat)).status_code == 200
    answer = await fleet.http.post("/v1/chat/completions/render", json={"model": MODEL, **chat})
    assert answer.status_code == 200, answer.text
    await generate(fleet, **answer.json())
    directly, rendered = fleet.workers["decode-0"].submissions
    assert rendered.prompt_tokens == directly.prompt_tokens
    assert rendered.hash_seed == directly.hash_seed
    assert rendered.sampling == directly.sampling


async def test_each_rendered_prompt_is_a_request(fleet, model):
    answer = await fleet.http.post("/v1/completions/render", json={"prompt": ["a", "b"]})
    requests = answer.json()
    assert [request["token_ids"] for request in requests] == [*map(model.tokenizer.encode, "ab")]
    assert [request["sampling_params"]["max_tokens"] for request in requests] == [16, 16]
    assert fleet.workers["decode-0"].submissions == []


ABORT = "/inference/v1/abort_requests"
BY_KEY = {
    name: {"authorization": f"Bearer key-of-{name}"} for name in ("one", "two", "second", "ops")
}
KEYS = {
    "key-of-one": ApiKeyConfig(tenant="one"),
    "key-of-second": ApiKeyConfig(tenant="one"),
    "key-of-two": ApiKeyConfig(tenant="two"),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator"),
}


@pytest.fixture
async def slow(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0.02)}, api_keys=KEYS)


async def begun(fleet, caller: str, path: str = GENERATE, **body) -> asyncio.Task:
    """Send a request that would take long, and return it once it has a token."""
    if path == GENERATE:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4000}, **body}
    before = fleet.lane.gateway.in_flight
    sent = asyncio.create_task(fleet.http.post(path, json=body, headers=BY_KEY[caller]))
    actives = fleet.lane.gateway.active
    await until(lambda: len(actives) > before and all(a.record.begun for a in actives.values()))
    return sent


@pytest.mark.parametrize("by", ["request_id", "answer", "operator"])
async def test_aborted_requests_end_with_their_tokens_as_at_vllm(slow, by: str) -> None:
    sent = await begun(slow, "one", request_id="mine")
    other = await begun(slow, "two", request_id="mine")
    names = {"answer": ["generate-tokens-mine"]}.get(by, ["unknown", "mine"])
    caller = BY_KEY["ops" if by == "operator" else "one"]
    aborted = await slow.http.post(ABORT, json={"request_ids": names}, headers=caller)
    assert (aborted.status_code, aborted.content) == (200, b"")
    answer = await sent
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert 1 <= len(choice["token_ids"]) < 1000
    assert answer.json()["usage"]["completion_tokens"] == len(choice["token_ids"])
    if by == "operator":
        assert (await other).json()["choices"][0]["finish_reason"] == "abort"
    else:
        assert not other.done(), "another tenant's request has the same id"
        await slow.http.post(ABORT, json={"request_ids": "mine"}, headers=BY_KEY["two"])
        assert (await other).json()["choices"][0]["finish_reason"] == "abort"
    await until(lambda: slow.workers["decode-0"].cancels and not slow.lane.gateway.in_flight)


async def test_a_key_aborts_no_request_of_another_key(slow) -> None:
    sent = await begun(slow, "one", request_id="mine")
    for caller in ("two", "second"):
        answer = await slow.http.post(ABORT, json={"request_ids": ["mine"]}, headers=BY_KEY[caller])
        assert answer.status_code == 200, "as for an unknown id"
    await asyncio.sleep(0.1)
    assert not sent.done()
    assert (await slow.http.post(ABORT, json={"request_ids": ["mine"]})).status_code == 401
    for body in ({}, {"request_ids": None}, {"request_ids": [1]}, []):
        bad = await slow.http.post(ABORT, json=body, headers=BY_KEY["one"])
        assert bad.status_code == 400, body
    assert not sent.done()
    await slow.http.post(ABORT, json={"request_ids": ["mine"]}, headers=BY_KEY["one"])
    await sent


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2000}, '"finish_reason":"abort"'),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000},
            '"stop_reason":"max_tokens"',
        ),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2000}, '"status":"incomplete"'),
        ("/v1/embeddings", {"input": "hi"}, '"code":"cancelled"'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_api_says_that_a_request_was_cut(make_fleet, path, body, end, stream) -> None:
    fleet = await make_fleet({"decode-0": Script(step_s=0.02, prefill_s=0.3)}, api_keys=KEYS)
    pools = "embed" in path
    if not pools:
        body = {**body, "stream": stream}
    sent = asyncio.create_task(
        fleet.http.post(
            path, json={"model": MODEL, **body}, headers=BY_KEY["one"] | {"x-request-id": "mine"}
        )
    )
    actives = fleet.lane.gateway.active
    await until(
        lambda: actives and (pools or not stream or all(a.record.begun for a in actives.values()))
    )
    await fleet.http.post(ABORT, json={"request_ids": ["mine"]}, headers=BY_KEY["one"])
    answer = await sent
    assert answer.status_code == (499 if pools else 200)
    assert end in answer.text.replace(": ", ":").replace(", ", ",")
