"""Responses of llama-server b11434, as it sent them for SmolLM2, and requests to it."""

import json
import time
from typing import Any

import msgspec
import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.llama_server import protocol
from baton.engine.llama_server.pieces import TokenPieces
from baton.engine.llama_server.protocol import NO_LOGPROB, CompletionStream
from baton.model.artifact import resolve_model
from baton.text.grammar import translate
from baton.text.tokenizer import load_tokenizer
from baton.types.errors import GrammarError, InternalError, InvalidRequestError, UnavailableError
from baton.types.params import SamplingParams

END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def pieces() -> TokenPieces:
    return TokenPieces(load_tokenizer(resolve_model(DEFAULT_MODEL).tokenizer))


def test_a_search_for_lost_tokens_is_short_whatever_a_server_sends(pieces: TokenPieces) -> None:
    """One event of 31 bytes took minutes of the loop: there are up to 8 ** 7 ways to split it."""
    began_s = time.process_time()
    for length in (30, 32, 8_000_000):
        assert pieces.split(b" " * length + b"\xff", 8) == ()
    assert len(pieces.split(b" " * 32, 8)) == 8
    assert time.process_time() - began_s < 0.6  # with the vocabulary


def spec_of(kind: Kind = Kind.FULL, emitted: tuple[Any, ...] = (), **params: Any) -> RequestSpec:
    sampling = SamplingParams(**{"max_tokens": 20, "temperature": 0.0} | params)
    return RequestSpec(kind=kind, params=sampling, hash_seed=b"", emitted=emitted)


def event(content: str, tokens: list[int], so_far: int, **more: Any) -> bytes:
    body = {"index": 0, "content": content, "tokens": tokens, "stop": False, "id_slot": -1}
    text = json.dumps({**body, "tokens_predicted": so_far, "tokens_evaluated": 50, **more})
    return f"data: {text}\n\n".encode()


def last(so_far: int, stop_type: str) -> bytes:
    timings = {"cache_n": 32, "prompt_n": 18, "predicted_n": so_far}
    return event("", [], so_far, stop=True, stop_type=stop_type, timings=timings)


ORANGES = (
    event(" 🍊", [228], 3)
    + event("🍊", [228], 6)
    + event(" 日", [115], 9)
    + event("本", [40993], 10)
)


def stream_of(pieces: TokenPieces, **params: Any) -> CompletionStream:
    return CompletionStream("r", 0, spec_of(**params), (END,), pieces.split, pieces.spell)


def read(stream: CompletionStream, data: bytes, size: int = 7) -> tuple[list[int], list[Any]]:
    """Feed the bytes in small parts; return all tokens, and all reports."""
    reports = []
    for begin in range(0, len(data), size):
        reports += stream.feed(data[begin : begin + size])
    return [sampled.token for report in reports for sampled in report.tokens], reports


def test_tokens_without_an_event_are_found_by_the_bytes_of_their_character(pieces) -> None:
    stream = stream_of(pieces)
    tokens, reports = read(stream, ORANGES + last(10, "limit"))
    encoded = load_tokenizer(resolve_model(DEFAULT_MODEL).tokenizer).encode(" 🍊🍊 日本")
    assert tokens == encoded
    assert b"".join(map(pieces.spell, tokens)).decode() == " 🍊🍊 日本"
    assert [report.index for report in reports] == [0, 3, 6, 9, 10]
    assert (reports[-1].finish_reason, stream.finished, stream.cached_tokens) == (
        "length",
        True,
        32,
    )


def test_a_lost_token_has_no_log_probability(pieces) -> None:
    scored = {"id": 228, "token": " 🍊", "logprob": -0.5}
    other = {"id": 227, "logprob": -6.3}
    more = {"completion_probabilities": [{**scored, "top_logprobs": [scored, other]}]}
    _, reports = read(stream_of(pieces, logprobs=1), event(" 🍊", [228], 3, **more))
    values = [(sampled.logprob, sampled.top) for sampled in reports[0].tokens]
    assert values == [(NO_LOGPROB, ()), (NO_LOGPROB, ()), (-0.5, ((228, -0.5),))]


@pytest.mark.parametrize(
    "damaged", [b"a line\n\n", event("", [], 2), event("", [], 30, stop=True, stop_type="limit")]
)
def test_a_response_does_not_lack_the_tokens_of_a_damaged_event(
    pieces: TokenPieces, damaged: bytes
) -> None:
    """It ended with as many tokens less."""
    with pytest.raises(InternalError, match=r"no event|left out"):
        read(stream_of(pieces), damaged + event("", [270], 3) + last(3, "limit"))


def test_lost_tokens_that_no_vocabulary_has_are_an_error(pieces) -> None:
    with pytest.raises(InternalError, match="left out 3 tokens"):
        read(stream_of(pieces), event("x", [104], 4))


def test_the_end_of_the_model_is_not_in_the_response(pieces) -> None:
    stream = stream_of(pieces)
    tokens, reports = read(stream, event("The", [504], 1) + event("", [END], 2) + last(2, "eos"))
    assert tokens == [504]
    assert (reports[-1].finish_reason, reports[-1].stop_token) == ("stop", END)
    assert (stream.is_early, stream.cached_tokens) == (False, 32)


def test_a_token_of_the_client_ends_the_response_before_the_server_does(pieces) -> None:
    stream = stream_of(pieces, stop_token_ids=(253,))
    data = event("The", [504], 1) + event(" a", [253], 2) + event(" b", [270], 3)
    tokens, reports = read(stream, data)
    assert tokens == [504]
    assert (reports[-1].finish_reason, reports[-1].stop_token) == ("stop", 253)
    assert stream.finished and stream.is_early


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'data: {"error":{"code":500,"message":"no","type":"server_error"}}\n\n', InternalError),
        (b'error: {"code":400,"message":"too long"}\n\n', InvalidRequestError),
        (b'data: {"error":{"code":400,"message":"bad"}}\n\n', InvalidRequestError),
        (b"data: <html>\n\n", InternalError),
        (event("", [], 0, stop=True, stop_type="none"), InternalError),
    ],
)
def test_errors(pieces, data: bytes, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        stream_of(pieces).feed(b": ping\n\n" + data)


def test_a_resumed_choice_goes_on_behind_its_tokens(pieces) -> None:
    spec = spec_of(emitted=((5, 6),), temperature=1.0, seed=9)
    body = json.loads(protocol.completion_body([1, 2], spec, 0, cached=True, context_tokens=4096))
    assert (body["prompt"], body["n_predict"], body["cache_prompt"]) == ([1, 2, 5, 6], 18, True)
    fresh = protocol.completion_body([1], spec_of(seed=9), 0, cached=False, context_tokens=64)
    assert json.loads(fresh)["seed"] == 9 != body["seed"]
    stream = CompletionStream("r", 0, spec, (END,), pieces.split, pieces.spell)
    _, reports = read(stream, event(" b", [270], 1))
    assert reports[0].index == 2


def test_formats_become_fields_of_llama_server() -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    fields = protocol.grammar_fields(translate("json", schema))
    assert json.loads(msgspec.json.encode(fields))["json_schema"]["type"] == "object"
    choices = json.dumps(["yes", 'no "x"'])
    expected = {"grammar": 'root ::= "yes" | "no \\"x\\""'}
    assert protocol.grammar_fields(translate("choice", choices)) == expected
    assert protocol.grammar_fields(translate("regex", "a+")) == {}


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (spec_of(Kind.PREFILL), UnavailableError),
        (spec_of(presence_penalty=0.1), InvalidRequestError),
        (spec_of(min_tokens=1), InvalidRequestError),
        (spec_of(bad_words=((1,),)), InvalidRequestError),
        (spec_of(grammar=translate("regex", "a+")), GrammarError),
        (spec_of(emitted=((1,),), grammar=translate("choice", '["a"]')), UnavailableError),
    ],
)
def test_what_is_not_served_is_refused(spec: RequestSpec, kind: type[Exception]) -> None:
    assert isinstance(protocol.refusal(spec), kind)
    assert protocol.refusal(spec_of(logprobs=2, logit_bias=((3, 1.0),))) is None
