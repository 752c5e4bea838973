"""Requests to ``/completion`` of llama-server and its streamed responses, without I/O.

llama-server streams no event for a token that ends within a character. Its ids are lost, and are
found again from the bytes of the character:

    sampled    " 4"    <bytes f0 9f>   <bytes 8d>   <byte 8a>     🍊 has the bytes f0 9f 8d 8a
    events     " 4"                                 "🍊", which counts three tokens
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.engine.core.model_runner import RunnerCapabilities
from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.remote.response import Count, ErrorBody, ResponseReader, TokenId, error_of
from baton.types import events as ev
from baton.types.errors import (
    BatonError,
    GrammarError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from baton.types.params import SampledToken, SamplingParams

COMPLETION = "/completion"
SERVER = "llama-server"
REFUSED = (400, 413, 422)  # codes of errors of the request

NO_LOGPROB = -9999.0
"""Log-probability of a token whose event llama-server left out, as OpenAI has it for unknown."""

_CAPABILITIES = RunnerCapabilities(engine=SERVER, grammars=True, bad_words=False)
_MOST_LOST = 8  # tokens of one character
_SEED_MASK = (1 << 32) - 2  # the largest number of 32 bits stands for a random seed
# temperature before the cuts, as in Baton's engine; penalties count all tokens of the context
_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
_SCHEMA = re.compile(r"start: %json (\{.*\})\n%llguidance \{[^\n]*\}\n", re.DOTALL)
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_CHOICES = re.compile(rf"start: ({_STRING}(?: \| {_STRING})*)\n%llguidance \{{[^\n]*\}}\n")
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


class ScoredToken(msgspec.Struct, frozen=True):
    """Log-probability of a token, and for a sampled one its alternatives."""

    id: TokenId
    logprob: float | None = None
    top_logprobs: "tuple[ScoredToken, ...]" = ()


class Timings(msgspec.Struct, frozen=True):
    """Counts at the end of a response; ``cache_n`` prompt tokens were cached."""

    cache_n: Count | None = None


class Event(msgspec.Struct, frozen=True):
    """Server-sent event of a stream, or the body of an error response.

    Attributes:
        content: Text since the event before.
        tokens_predicted: Number of tokens so far.
    """

    content: str = ""
    tokens: tuple[TokenId, ...] = ()
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    completion_probabilities: tuple[ScoredToken, ...] = ()
    timings: Timings | None = None
    error: ErrorBody | None = None


_decoder = msgspec.json.Decoder(Event)


def refusal(spec: RequestSpec) -> BatonError | None:
    """Return the error of a request that llama-server cannot serve, or None."""
    params = spec.params
    if spec.kind is not Kind.FULL:
        return UnavailableError("llama-server hands over no KV")
    if params.presence_penalty or params.frequency_penalty:
        return InvalidRequestError(
            "presence_penalty and frequency_penalty are not served by llama-server, which counts "
            "the prompt's tokens too"
        )
    if params.min_tokens:
        return InvalidRequestError("min_tokens is not served by llama-server")
    if params.grammar and any(spec.emitted):
        return UnavailableError(
            "a response with a format cannot be resumed by llama-server, which would begin the "
            "format again"
        )
    if params.grammar and not grammar_fields(params.grammar):
        return GrammarError(
            "llama-server serves formats of JSON schemas and lists of choices, and neither "
            "regular expressions nor grammars nor strict tools"
        )
    return _CAPABILITIES.refusal(spec)


def grammar_fields(grammar: str) -> dict[str, Any]:
    """Return the fields of a request for an llguidance grammar; empty if there are none for it."""
    if schema := _SCHEMA.fullmatch(grammar):
        return {"json_schema": msgspec.Raw(schema[1].encode())}
    if choices := _CHOICES.fullmatch(grammar):
        return {"grammar": f"root ::= {choices[1]}"}
    return {}


def completion_body(
    prompt: Sequence[int], spec: RequestSpec, choice: int, *, cached: bool, context_tokens: int
) -> bytes:
    """Return the JSON body that requests one choice.

    Emitted tokens of a resumed response follow the prompt. Without ``cached`` no cached prefix is
    used. ``context_tokens`` is the size of the server's context.
    """
    emitted = (spec.emitted[choice] if spec.emitted else None) or ()
    body = {
        "prompt": [*prompt, *emitted],
        "stream": True,
        "return_tokens": True,
        "cache_prompt": cached,
        "n_predict": spec.params.max_tokens - len(emitted),
        "repeat_last_n": context_tokens,
        **_sampling_fields(spec.params, choice, len(emitted)),
    }
    return msgspec.json.encode(body)


def _sampling_fields(params: SamplingParams, choice: int, emitted: int) -> dict[str, Any]:
    return {
        "samplers": _SAMPLERS,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        # a resumed choice must not draw its first noise again
        "seed": (params.seed + choice + emitted * 0x9E3779B1) % _SEED_MASK,
        "ignore_eos": params.ignore_eos,
        "logit_bias": params.logit_bias,
        # the sampled token's own is not sent without alternatives
        "n_probs": 0 if params.logprobs is None else max(params.logprobs, 1),
        **grammar_fields(params.grammar),
    }


class CompletionStream(ResponseReader):
    """Parser of the response to one ``completion_body``.

    Args:
        split: Returns the ids of a number of tokens with these bytes; empty if there are none.
        spell: Returns the bytes of a token.

    Attributes:
        is_early: Whether it ended at a token of the client, which the server does not know.
    """

    def __init__(
        self,
        request_id: str,
        choice: int,
        spec: RequestSpec,
        eos: Sequence[int],
        split: Callable[[bytes, int], Sequence[int]],
        spell: Callable[[int], bytes],
    ) -> None:
        super().__init__(request_id, choice, spec)
        self.is_early = False
        self._stops = set(spec.params.stop_token_ids)
        self._eos = set(eos)
        self._ends = self._stops if spec.params.ignore_eos else self._stops | self._eos
        self._split = split
        self._spell = spell
        self._counted = 0  # tokens of this stream
        self._end: int | None = None  # the token that ends the choice

    def _read(self, event: bytes) -> list[ev.Tokens]:
        if self.finished or event[:1] in (b"", b":"):
            return []  # a comment, or what follows a token that ends the choice
        payload = event.removeprefix(b"data: ")
        if event.startswith(b"error: "):
            payload = b'{"error": %b}' % event.removeprefix(b"error: ")
        return self._take(read_event(payload))

    def _take(self, event: Event) -> list[ev.Tokens]:
        if event.error is not None:
            raise error_of(SERVER, event.error, REFUSED)
        if event.timings is not None and event.stop:
            self.cached_tokens = event.timings.cache_n
        sampled = self._sampled(event)
        reason = _FINISH.get(event.stop_type, "") if event.stop else ""
        if event.stop and not reason:
            raise InternalError(f"llama-server ended a response by {event.stop_type!r}")
        if self._end is None:
            for position, token in enumerate(sampled):
                if token.token in self._ends:
                    self._end = token.token
                    sampled = sampled[:position]
                    break
        elif sampled:  # tokens behind the end of the choice
            sampled = []
            self.is_early = True
        if self._end is not None and self._end not in self._eos:
            self.is_early = True
        if self.is_early or (reason and self._end is not None):
            reason = "stop"
        if not sampled and not reason:
            return []
        return [self._new(sampled, reason, self._end if reason else None)]

    def _sampled(self, event: Event) -> list[SampledToken]:
        """Return the tokens of an event, and those before it that had none."""
        if not event.tokens and not event.stop:
            return []  # its tokens are lost until the next event
        lost = event.tokens_predicted - self._counted - len(event.tokens)
        self._counted += len(event.tokens) + max(lost, 0)
        scored = {candidate.id: candidate for candidate in event.completion_probabilities}
        tokens = [self._scored(token, scored.get(token)) for token in event.tokens]
        ids: Sequence[int] = ()
        if lost <= _MOST_LOST:
            if lost <= 0 or not event.tokens:  # at the end of a response they stay unknown
                return tokens
            text = event.content.encode().removesuffix(self._spell(event.tokens[0]))
            ids = self._split(text, lost)
        if not ids:
            raise InternalError(
                f"llama-server left out {lost} tokens of {event.content[:40]!r}, which cannot be "
                "found again"
            )
        return [*(self._scored(token, None) for token in ids), *tokens]

    def _scored(self, token: int, candidate: ScoredToken | None) -> SampledToken:
        if self._alternatives is None:
            return SampledToken(token)
        if candidate is None or candidate.logprob is None:
            return SampledToken(token, NO_LOGPROB)
        top = [(other.id, other.logprob or 0.0) for other in candidate.top_logprobs]
        return SampledToken(token, candidate.logprob, tuple(top[: self._alternatives]))


def read_event(payload: bytes) -> Event:
    """Decode one JSON object of a stream or an error response."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        text = payload[:200]
        raise InternalError(f"llama-server sent {text!r}, which is no event: {error}") from None
