"""Requests to vLLM and its responses, by exchanges that were recorded from a real one."""

import json
from pathlib import Path

import msgspec
import pytest

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.vllm import protocol
from baton.engine.vllm.protocol import ChoiceStream, generate_body, refusal
from baton.types.errors import (
    BatonError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from baton.types.params import AdapterRef, SampledToken, SamplingParams

RECORDED = Path(__file__).parent / "recorded"
EOS = (2,)


def spec(**params: object) -> RequestSpec:
    sampling = msgspec.convert({"max_tokens": 8, **params}, SamplingParams)
    return RequestSpec(kind=Kind.FULL, params=sampling, hash_seed=b"\x01" * 16)


def read(name: str, of: RequestSpec, pieces: int = 1) -> tuple[ChoiceStream, list[object]]:
    stream = ChoiceStream("r", 0, of, EOS)
    data = (RECORDED / name).read_bytes()
    size = -(-len(data) // pieces)
    tokens = [run for at in range(0, len(data), size) for run in stream.feed(data[at : at + size])]
    return stream, tokens


def test_tokens_have_the_alternatives_that_were_requested() -> None:
    stream, runs = read("logprobs.sse", spec(max_tokens=4, logprobs=2))
    assert [run.index for run in runs] == [0, 1, 2, 3]
    assert [run.finish_reason for run in runs] == ["", "", "", "length"]
    first = runs[0].tokens[0]
    assert first.token == 7042
    assert [token for token, _ in first.top] == [7042, 260]
    assert all(len(run.tokens[0].top) == 2 for run in runs)
    assert stream.finished
    assert stream.generated == 4


def test_an_unlikely_token_is_not_among_its_alternatives() -> None:
    ranks = [(7, 40), (1, 1), (2, 2), (3, 3)]  # the sampled token first, as vLLM sends them
    top = [{"token_id": token, "logprob": -float(rank), "rank": rank} for token, rank in ranks]
    logprobs = {"content": [{"token_id": 7, "logprob": -40.0, "top_logprobs": top}]}
    chunk = {"choices": [{"token_ids": [7], "logprobs": logprobs}]}
    stream = ChoiceStream("r", 0, spec(logprobs=2), EOS)
    (run,) = stream.feed(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    assert run.tokens == (SampledToken(7, -40.0, ((1, -1.0), (2, -2.0))),)


@pytest.mark.parametrize("pieces", [1, 3, 200])
def test_the_response_may_arrive_in_any_pieces(pieces: int) -> None:
    of = spec(max_tokens=4, logprobs=2)
    assert read("logprobs.sse", of, pieces)[1] == read("logprobs.sse", of)[1]


def test_a_stop_token_ends_the_response_without_being_part_of_it() -> None:
    stream, runs = read("stop_token.sse", spec(max_tokens=9, stop_token_ids=(30,)))
    assert [run.tokens for run in runs] == [(SampledToken(7042),), ()]
    assert (runs[-1].finish_reason, runs[-1].stop_token) == ("stop", 30)
    assert stream.generated == 1


def test_an_end_token_behind_a_grammar_is_not_part_of_the_response() -> None:
    _, runs = read("grammar.sse", spec(grammar='start: "Paris"', ignore_eos=True))
    assert [run.tokens for run in runs] == [(SampledToken(38634),), ()]
    assert runs[-1].stop_token == 2


def test_cached_tokens_are_those_that_vllm_reports() -> None:
    assert read("length.sse", spec())[0].cached_tokens == 0
    assert read("cached.sse", spec())[0].cached_tokens == 192


def test_an_error_in_the_stream_is_the_error_of_the_request() -> None:
    with pytest.raises(InvalidRequestError, match="longer than the maximum model length of 4096"):
        read("too_long.json", spec())


def test_an_unknown_answer_is_an_internal_error() -> None:
    stream = ChoiceStream("r", 0, spec(), EOS)
    with pytest.raises(InternalError, match="not a chunk"):
        stream.feed(b"data: <html>\n\n")
    with pytest.raises(InternalError, match="finish_reason 'abort'"):
        stream.feed(b'data: {"choices":[{"token_ids":[],"finish_reason":"abort"}]}\n\n')


def test_a_chunk_that_no_answer_can_have_is_an_internal_error() -> None:
    """Negative ids ended requests with 500, and others' tokens and logprobs were passed on."""
    scored = {"token_id": 7, "logprob": -1.0}
    top = {"token_id": 1 << 40, "logprob": -1.0, "rank": 1}
    end = {"token_ids": [7], "finish_reason": "stop"}
    odd: list[dict[str, object]] = [
        {"choices": [{"token_ids": [7, -3]}]},
        {"choices": [{"token_ids": [1 << 32]}]},
        {"choices": [{"index": 1, "token_ids": [7]}]},
        {"choices": [end, {"token_ids": [8]}]},
        {"choices": [{"token_ids": [7]}]},  # without its log-probability
        {"choices": [{"token_ids": [8], "logprobs": {"content": [scored]}}]},
        {"choices": [{"logprobs": {"content": [{**scored, "top_logprobs": [top]}]}}]},
        {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": -5}}},
    ]
    for number, one in enumerate(odd):
        stream = ChoiceStream("r", 0, spec(logprobs=2 if number in (4, 5, 6) else None), EOS)
        with pytest.raises(InternalError):
            stream.feed(b"data: " + msgspec.json.encode(one) + b"\n\n")


def test_comments_in_a_stream_are_no_garbage() -> None:
    stream = ChoiceStream("r", 0, spec(), EOS)
    (run,) = stream.feed(b': ping\n\ndata: {"choices":[{"token_ids":[7]}]}\n\n:\n\n')
    assert run.tokens == (SampledToken(7),)


def test_the_message_of_an_error_is_short() -> None:
    stream = ChoiceStream("r", 0, spec(), EOS)
    with pytest.raises(InvalidRequestError) as raised:
        stream.feed(b'data: {"error":{"message":"%b","code":400}}\n\n' % (b"y" * 900_000))
    assert len(raised.value.message) < 2100


def test_a_resumed_choice_goes_on_behind_its_tokens() -> None:
    of = msgspec.structs.replace(
        spec(max_tokens=8, min_tokens=5, temperature=1.0, n=2, seed=7), emitted=(None, (11, 12))
    )
    body = json.loads(generate_body("r", [1, 2], of, 1, EOS))
    assert body["token_ids"] == [1, 2, 11, 12]
    assert body["sampling_params"]["max_tokens"] == 6
    assert body["sampling_params"]["min_tokens"] == 3
    fresh = json.loads(generate_body("r", [1, 2], spec(temperature=1.0, n=2, seed=7), 1, EOS))
    assert fresh["sampling_params"]["seed"] == 8
    assert body["sampling_params"]["seed"] != 8  # or its first token would draw old noise
    stream = ChoiceStream("r", 1, of, EOS)
    (run,) = stream.feed(b'data: {"choices":[{"token_ids":[13]}]}\n\n')
    assert run.index == 2


def test_the_salt_of_the_cache_is_the_seed_of_the_block_hashes() -> None:
    body = json.loads(generate_body("r", [1], spec(), 0, EOS))
    assert body["cache_salt"] == "01" * 16


def test_end_tokens_are_sent_unless_they_are_ignored() -> None:
    sent = protocol.sampling_params(spec(stop_token_ids=(9,)).params, 0, (), EOS)
    assert sent["stop_token_ids"] == [2, 9]
    ignored = protocol.sampling_params(spec(ignore_eos=True).params, 0, (), EOS)
    assert ignored["stop_token_ids"] == []
    assert ignored["ignore_eos"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bad_words": ((5,),)}, "bad_words are not served by attached vLLM servers"),
        (
            {"prompt_logprobs": 0},
            "prompt_logprobs and embeddings are not served by attached vLLM servers",
        ),
    ],
)
def test_parameters_that_an_attached_vllm_lacks_are_refused_by_name(
    changes: dict[str, object], text: str
) -> None:
    assert refusal(spec(**changes), hands_over=True) is None
    error = refusal(spec(**changes), hands_over=True, is_attached=True)
    assert isinstance(error, InvalidRequestError)
    assert error.message == text


def test_requests_that_vllm_workers_do_not_serve_are_refused_by_name() -> None:
    replace = msgspec.structs.replace
    assert refusal(spec(), hands_over=False) is None
    pooled = refusal(replace(spec(), pooling="mean"), hands_over=True)
    assert pooled is not None
    assert "embeddings" in pooled.message
    adapter = refusal(replace(spec(), adapter=AdapterRef("a", "00", "/a")), hands_over=True)
    assert adapter is not None
    assert "LoRA" in adapter.message
    formatted = spec(grammar='start: "a"')
    assert refusal(formatted, hands_over=True) is None
    resumed = replace(formatted, emitted=((1,),))
    assert refusal(resumed, hands_over=True) is None
    refused = refusal(resumed, hands_over=True, is_attached=True)
    assert refused is not None
    assert "cannot be resumed" in refused.message


def test_vllm_gets_bad_words_as_tokens_and_what_a_format_continues_from() -> None:
    of = spec(grammar='start: "a"', bad_words=((5, 6),))
    fresh = json.loads(generate_body("r", [1], of, 0, EOS))["sampling_params"]
    assert fresh["extra_args"] == {"baton_bad_words": [[5, 6]]}
    resumed = msgspec.structs.replace(of, emitted=((7, 8),))
    body = json.loads(generate_body("r", [1], resumed, 0, EOS))["sampling_params"]
    assert body["extra_args"] == {"baton_bad_words": [[5, 6]], "baton_emitted": [7, 8]}


@pytest.mark.parametrize("kind", [Kind.PREFILL, Kind.REMOTE])
def test_hand_offs_are_refused_where_vllm_cannot_continue_a_response(kind: Kind) -> None:
    def refused(hands_over: bool = True, **changes: object) -> BatonError | None:
        return refusal(msgspec.structs.replace(spec(**changes), kind=kind), hands_over)

    assert refused() is None
    alone = refused(hands_over=False)
    assert isinstance(alone, UnavailableError)
    assert "do not hand over KV" in alone.message
    for changes in (
        {"grammar": 'start: "a"'},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1},
        {"bad_words": ((5, 6),)},
        {"prompt_logprobs": 0},
    ):
        stateful = refused(**changes)
        assert isinstance(stateful, InvalidRequestError)
        assert "do not hand over responses with a format, bad_words" in stateful.message


def test_resumed_responses_are_not_handed_over_and_prefixes_only_by_some_connectors() -> None:
    replace = msgspec.structs.replace
    resumed = replace(spec(), kind=Kind.REMOTE, emitted=((1,),))
    assert isinstance(refusal(resumed, hands_over=True, pulls=True), UnavailableError)
    for pull in (
        replace(spec(), kind=Kind.HELD),
        replace(spec(), kind=Kind.REMOTE, emitted=(None,)),
    ):
        assert isinstance(refusal(pull, hands_over=True), UnavailableError)
        assert refusal(pull, hands_over=True, pulls=True) is None


def test_a_prompt_for_another_worker_requests_one_token_and_parameters() -> None:
    hold = {"do_remote_decode": True}
    body = json.loads(protocol.prefill_body("r", [1, 2], spec(min_tokens=3), 0, EOS, hold))
    assert body["token_ids"] == [1, 2]
    assert body["sampling_params"]["max_tokens"] == 1
    assert body["sampling_params"]["min_tokens"] == 1
    assert "stream" not in body  # streamed responses have no parameters
    assert body["kv_transfer_params"] == hold
    one = json.loads(protocol.prefill_body("r", [1, 2], spec(max_tokens=1), 0, EOS, None))
    assert "kv_transfer_params" not in one
