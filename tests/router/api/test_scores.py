"""Prompt log-probabilities and embeddings over HTTP, against emulated workers."""

import base64
import math
import struct
import threading
from types import SimpleNamespace

import openai
import pytest

from router.frontend.api.embeddings import EmbeddingAnswer
from router.frontend.api.formats.prompt_logprobs import token_key, top_by_key
from tests.router.conftest import MODEL, events_of, until
from tests.router.emulated_worker import Script

TEXT = "The capital of France is Paris"


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0.001, scores_slice=2)})


@pytest.fixture
def ids(model):
    return model.tokenizer.encode(TEXT)


async def test_echo_with_logprobs_speaks_of_the_prompt_too(fleet, model, ids):
    answer = (await fleet.complete(TEXT, echo=True, logprobs=2, max_tokens=3)).json()
    [choice] = answer["choices"]
    assert choice["text"].startswith(TEXT)
    echoed = choice["logprobs"]
    assert {len(values) for values in echoed.values()} == {len(ids) + 3}
    assert echoed["tokens"][: len(ids)] == [model.tokenizer.token_text(i) for i in ids]
    assert echoed["token_logprobs"][: len(ids)] == [None, *(-i / 8 for i in range(1, len(ids)))]
    assert echoed["token_logprobs"][len(ids) :] == [-0.5] * 3
    assert echoed["top_logprobs"][0] is None
    assert echoed["top_logprobs"][1] == {
        model.tokenizer.token_text(ids[1] + k): -1 / 8 - k for k in range(2)
    }
    # The tokens lie where text_offset says, over the border between prompt and answer.
    for token, offset in zip(echoed["tokens"], echoed["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_each_token_has_a_key_of_its_own_with_its_own_value(model):
    tokenizer = model.tokenizer
    first, second, *_ = tokenizer.encode("😀")
    whole = tokenizer.encode("a")[0]
    assert token_key(tokenizer, first).startswith("bytes:\\xf0")
    top = [(second, -1.0), (whole, -2.0)]
    assert list(top_by_key(tokenizer, first, -3.0, top).values()) == [-1.0, -2.0, -3.0]
    found = top_by_key(tokenizer, whole, -2.0, top)
    assert found == {token_key(tokenizer, second): -1.0, "a": -2.0}
    twins = SimpleNamespace(token_bytes=lambda token: b"x")
    assert top_by_key(twins, 3, -4.0, [(1, -1.0), (3, -4.0)]) == {"token_id:1": -1.0, "x": -4.0}
    assert top_by_key(twins, 3, -4.0, [(1, -1.0), (2, -2.0)])["x"] == -4.0
    assert top_by_key(tokenizer, whole, -2.0, []) == {"a": -2.0}


async def test_special_tokens_of_an_echoed_text_have_their_length(fleet, model):
    text = "<|im_start|>user\nhi<|im_end|>"
    fields = {"echo": True, "logprobs": 0, "max_tokens": 2}
    for prompt in (text, model.tokenizer.encode(text)):
        [choice] = (await fleet.complete(prompt, **fields)).json()["choices"]
        echoed = choice["logprobs"]
        decoded = "".join(choice["text"]).startswith("user")
        assert decoded is not isinstance(prompt, str)
        for token, offset in zip(echoed["tokens"], echoed["text_offset"], strict=True):
            special = token.startswith("<|im_")
            assert choice["text"][offset:].startswith(token) or (decoded and special)
        assert [len(top) for top in echoed["top_logprobs"][1:]] == [1] * (len(echoed["tokens"]) - 1)
    expected = [0, 12, 16, 17, 19]
    [choice] = (await fleet.complete(text, **fields)).json()["choices"]
    assert choice["logprobs"]["text_offset"][:5] == expected


@pytest.mark.parametrize("prompt", [TEXT, "ids"])
async def test_scoring_only_as_evaluation_harnesses_ask_for_it(fleet, ids, prompt):
    prompt = ids if prompt == "ids" else prompt
    answer = (await fleet.complete(prompt, echo=True, logprobs=1, max_tokens=0)).json()
    [choice] = answer["choices"]
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert fleet.workers["decode-0"].submissions[-1].sampling.max_tokens == 1


async def test_a_prompt_may_fill_the_context_when_it_is_only_scored(fleet):
    full = [5] * 8192
    fields = {"logprobs": 0, "echo": True}
    assert (await fleet.complete(full, max_tokens=0, **fields)).status_code == 200
    assert (await fleet.complete(full, max_tokens=1, **fields)).status_code == 400
    assert (await fleet.complete([5] * 8193, max_tokens=0, **fields)).status_code == 400


async def test_a_prompt_of_one_token_has_one_null(fleet, ids):
    answer = (await fleet.complete(ids[:1], echo=True, logprobs=1, max_tokens=0)).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None]


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_stream_begins_with_the_scores_and_adds_up_to_the_whole(fleet, max_tokens):
    body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": 2, "prompt_logprobs": 0}
    whole = (await fleet.complete([TEXT, "Two"], **body)).json()["choices"]
    events = events_of((await fleet.complete([TEXT, "Two"], stream=True, **body)).text)
    assert events.pop() == "[DONE]"
    for expected in whole:
        chunks = [e["choices"][0] for e in events if e["choices"][0]["index"] == expected["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
        assert chunks[0]["prompt_logprobs"] == expected["prompt_logprobs"]
        for name, values in expected["logprobs"].items():
            shown = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
            assert [value for part in shown for value in part[name]] == values
        assert chunks[-1]["finish_reason"] == expected["finish_reason"]


async def test_prompt_logprobs_have_vllms_shape(fleet, model, ids):
    answer = (await fleet.complete(TEXT, prompt_logprobs=1, max_tokens=1)).json()
    [choice] = answer["choices"]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(ids)
    assert choice["prompt_logprobs"][2] == {
        str(ids[2]): {
            "logprob": -0.25,
            "rank": 1,
            "decoded_token": model.tokenizer.token_text(ids[2]),
        }
    }
    chat = (await fleet.chat(prompt_logprobs=0)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    events = events_of((await fleet.chat(prompt_logprobs=0, stream=True)).text)
    [told] = [event for event in events[:-1] if "prompt_logprobs" in event]
    assert told["prompt_logprobs"] == chat["prompt_logprobs"]
    assert "prompt_logprobs" not in (await fleet.chat()).json()


async def test_each_kind_is_cut_to_its_own_number_of_alternatives(fleet):
    body = {"echo": True, "logprobs": 3, "prompt_logprobs": 1, "max_tokens": 0}
    [choice] = (await fleet.complete(TEXT, **body)).json()["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3
    assert len(choice["prompt_logprobs"][1]) == 1


async def test_more_scores_than_workers_should_hold_are_refused_with_the_limit(fleet, monkeypatch):
    monkeypatch.setattr(
        "router.frontend.api.formats.prompt_logprobs.MAX_PROMPT_LOGPROBS_BYTES", 1000
    )
    response = await fleet.complete([5] * 100, echo=True, logprobs=4, max_tokens=0)
    assert response.status_code == 400
    assert "at most 25 tokens" in response.json()["error"]["message"]
    assert (await fleet.complete([5] * 20, prompt_logprobs=4)).status_code == 200
    for body in ({"prompt": [[5] * 20] * 2}, {"prompt": [5] * 20, "n": 2}):  # of one call
        response = await fleet.complete(prompt_logprobs=4, **body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_logprobs"


async def test_a_whole_prompt_is_priced_as_uncached(fleet):
    """Its rows are all computed, so what a worker holds of it saves nothing."""
    long = [7] * 640
    await fleet.complete(long, max_tokens=1)

    async def uncached(**body) -> int:
        response = await fleet.complete(long, max_tokens=1, **body)
        story = await fleet.http.get(f"/fleet/requests/{response.headers['x-request-id']}")
        return story.json()["chosen"]["uncached_tokens"]

    assert await uncached() < 640
    assert await uncached(prompt_logprobs=0) == 640


# --- embeddings -----------------------------------------------------------------------------------


async def embed(fleet, given, **body):
    return await fleet.http.post("/v1/embeddings", json={"model": MODEL, "input": given} | body)


def expected(tokens: int) -> list[float]:
    length = math.sqrt(3 * 3 + 4 * 4 + tokens * tokens)
    return pytest.approx([3 / length, 4 / length, tokens / length, 0])


async def test_the_official_client_asks_for_base64_and_gets_numbers(fleet, ids):
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none") as client:
        answer = await client.embeddings.create(model=MODEL, input=TEXT)
    assert answer.data[0].embedding == expected(len(ids))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(ids)
    assert answer.object == "list"
    assert answer.model == MODEL
    submission = fleet.workers["decode-0"].submissions[-1]
    assert submission.pooling == "mean"


async def test_every_form_of_input(fleet, ids):
    for given, lengths in [
        (TEXT, [len(ids)]),
        ([TEXT, "x"], [len(ids), 1]),
        (ids, [len(ids)]),
        ([ids, ids[:2], [9]], [len(ids), 2, 1]),
    ]:
        answer = (await embed(fleet, given)).json()
        assert [entry["index"] for entry in answer["data"]] == list(range(len(lengths)))
        for entry, length in zip(answer["data"], lengths, strict=True):
            assert entry["embedding"] == expected(length)
        assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}


async def test_base64_dimensions_pooling_and_raw_vectors(fleet, ids):
    answer = (await embed(fleet, TEXT, encoding_format="base64")).json()
    packed = base64.b64decode(answer["data"][0]["embedding"])
    assert list(struct.unpack("<4f", packed)) == expected(len(ids))
    cut = (await embed(fleet, TEXT, dimensions=2, pooling="last")).json()
    assert cut["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert fleet.workers["decode-0"].submissions[-1].pooling == "last"
    raw = (await embed(fleet, TEXT, normalize=False)).json()
    assert raw["data"][0]["embedding"] == [3, 4, len(ids), 0]


async def test_many_inputs_run_a_few_at_a_time_and_keep_their_order(make_fleet):
    worker = Script(prefill_s=0.005)
    fleet = await make_fleet({"decode-0": worker}, window_requests=4, max_queued_requests=2)
    answer = (await embed(fleet, [[5] * (1 + i % 50) for i in range(120)])).json()
    assert [round(e["embedding"][2] / e["embedding"][0] * 3) for e in answer["data"]] == [
        1 + i % 50 for i in range(120)
    ]


async def test_many_vectors_are_written_beside_the_event_loop(make_fleet, monkeypatch):
    threads, whole = [], EmbeddingAnswer._whole

    def written(self):
        threads.append(threading.current_thread())
        return whole(self)

    monkeypatch.setattr(EmbeddingAnswer, "_whole", written)
    monkeypatch.setattr("router.frontend.off_loop._LARGE_BYTES", 20)  # a vector here has 16
    fleet = await make_fleet({"decode-0": Script()})
    for inputs in ([[5], [6]], [[5]]):
        assert (await embed(fleet, inputs)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


async def test_a_call_of_many_inputs_presses_out_no_others_records(make_fleet):
    fleet = await make_fleet({"decode-0": Script()}, kept_records=100)
    other = (await fleet.chat(max_tokens=1)).json()["id"]
    call = (await embed(fleet, [[5]] * 120)).headers["x-request-id"]
    assert (await fleet.http.get(f"/fleet/requests/{other}")).status_code == 200
    story = (await fleet.http.get(f"/fleet/requests/{call}")).json()
    assert story["requests"] == 120
    assert [part["id"] for part in story["parts"]] == [f"{call}-{i}" for i in range(56, 120)]
    assert (await fleet.http.get(f"/fleet/requests/{call}-55")).status_code == 404
    assert (await fleet.http.get(f"/fleet/requests/{call}-56")).json() == story["parts"][0]
    for _ in range(2):
        await fleet.complete(["hi"] * 64, max_tokens=1)
    for gone in (other, call, f"{call}-119"):
        assert (await fleet.http.get(f"/fleet/requests/{gone}")).status_code == 404
    assert len(fleet.lane.gateway.kept._calls) == 2


async def test_a_failure_of_one_input_fails_the_call_and_stops_the_others(make_fleet):
    fleet = await make_fleet({"decode-0": Script(fail=("numerics_error", "NaN", False))})
    response = await embed(fleet, [[5]] * 100)
    assert response.status_code == 500
    await until(lambda: fleet.lane.gateway.in_flight == 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [49152]}, "input"),
        ({"input": [5] * 8193}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 577}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"messages": []}, "messages"),
    ],
)
async def test_bad_input_is_refused_by_name(fleet, body, param):
    response = await embed(fleet, "x", **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_too_long_names_the_numbers_and_a_wrong_model_is_404(fleet):
    error = (await embed(fleet, [5] * 8193)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "8193" in error["message"]
    assert "8192" in error["message"]
    assert (await embed(fleet, "x", model="gpt-17")).status_code == 404


async def test_the_request_that_lm_eval_sends(fleet, ids):
    """``--model local-completions``: it cuts off the context in front and the answer behind."""
    body = {"prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    answer = (await fleet.complete(**body, seed=1234)).json()
    [choice] = answer["choices"]
    scores = choice["logprobs"]["token_logprobs"][2:-1]
    assert scores == [-i / 8 for i in range(2, len(ids))]
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][2:-1]]
    assert best == scores, "each token is the likeliest here"
