"""Requests to vLLM's token endpoint and its streamed responses, without I/O.

Each choice of a request is one vLLM request with one sequence, so that a choice can be ended or
resumed by itself. The cache salt is the seed of the request's block hashes: two tenants never share
a block, and vLLM's KV events name the seed (``kv_events.py``).
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from baton.engine.core.model_runner import RunnerCapabilities
from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.remote.live_request import Parameters
from baton.engine.remote.response import Count, ErrorBody, ResponseReader, TokenId, error_of
from baton.engine.vllm.images import prompt_fields
from baton.types import events as ev
from baton.types.errors import BatonError, InternalError, InvalidRequestError, UnavailableError
from baton.types.params import AdapterRef, SampledToken, SamplingParams

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
SERVER = "vLLM"
REFUSED = range(400, 500)  # codes of errors of the request

_ATTACHED = RunnerCapabilities(
    engine="attached vLLM servers", grammars=True, bad_words=False, adapters=True, images=True
)
_STARTED = RunnerCapabilities(
    engine="vLLM workers", grammars=True, prompt_logprobs=True, adapters=True, images=True
)

_SEED_MASK = (1 << 63) - 1  # vLLM takes signed 64-bit seeds


class LogProb(msgspec.Struct, frozen=True):
    """Log-probability of one candidate."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class TokenLogProb(msgspec.Struct, frozen=True):
    """Log-probability of a sampled token and its alternatives, the sampled token first."""

    token_id: TokenId
    logprob: float
    top_logprobs: tuple[LogProb, ...] = ()


class LogProbs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chunk's tokens."""

    content: tuple[TokenLogProb, ...] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """New tokens of a sequence, the only one of a request."""

    index: Literal[0] = 0
    token_ids: tuple[TokenId, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: LogProbs | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    """Details of a prompt's tokens."""

    cached_tokens: Count | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Server-sent event of a stream, or the body of an error response."""

    choices: tuple[ChunkChoice, ...] = ()
    usage: Usage | None = None
    error: ErrorBody | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None  # only of prompts with images
    kv_transfer_params: Parameters | None = None  # only of responses that are not streamed

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that vLLM had cached; None if it does not report them here."""
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return details.cached_tokens if details is not None else None


_decoder = msgspec.json.Decoder(Chunk)


def adapter_model(ref: AdapterRef) -> str:
    """Return the name of an adapter in vLLM, which does not look like a cache salt."""
    return f"adapter-{ref.digest}"


def refusal(
    spec: RequestSpec,
    hands_over: bool,
    adapters: bool = False,
    pulls: bool = False,
    is_attached: bool = False,
) -> BatonError | None:
    """Return the error of a request that vLLM workers do not serve, or None.

    Args:
        spec: The request.
        hands_over: Whether these workers hand KV over to others.
        adapters: Whether they serve LoRA adapters.
        pulls: Whether they pull prefixes from each other.
        is_attached: Whether others have started vLLM, so that it heeds no extra arguments.
    """
    ended = bool(spec.emitted) and not any(spec.emitted)
    is_pull = spec.kind is Kind.HELD or (spec.kind is Kind.REMOTE and ended)
    if (is_pull and not pulls) or (spec.kind is not Kind.FULL and not hands_over):
        return UnavailableError("these vLLM workers do not hand over KV")
    if spec.kind is Kind.REMOTE and any(spec.emitted):
        return UnavailableError("vLLM workers resume responses without a hand-off")
    scored = spec.params.prompt_logprobs is not None
    if spec.kind is not Kind.FULL and (spec.params.tracks_output or scored):
        return InvalidRequestError(
            "vLLM workers do not hand over responses with a format, bad_words, prompt_logprobs, "
            "presence_penalty or frequency_penalty: leave x-baton-mode out"
        )
    if spec.kind is not Kind.FULL and spec.images:
        return InvalidRequestError("vLLM workers do not hand over prompts with images")
    if is_attached and any(spec.emitted) and spec.params.grammar:
        return UnavailableError(
            "a response with a format cannot be resumed by attached vLLM servers, which would "
            "begin the format again"
        )
    if spec.adapter is not None and not adapters:
        return InvalidRequestError(
            "LoRA adapters are not served by these vLLM workers: add `--enable-lora` to "
            "pools.vllm.args, and set adapters.max_loaded"
        )
    return (_ATTACHED if is_attached else _STARTED).refusal(spec)


def generate_body(
    request_id: str,
    prompt: Sequence[int],
    spec: RequestSpec,
    choice: int,
    eos: Sequence[int],
    transfer: Parameters | None = None,
) -> bytes:
    """Return the JSON body that requests one choice.

    Emitted tokens of a resumed response follow the prompt. vLLM does not count them in bad words,
    and presence and frequency penalties. With ``transfer`` vLLM loads the KV from another vLLM.
    """
    emitted = (spec.emitted[choice] if spec.emitted else None) or ()
    body = {
        "request_id": f"{request_id}/{choice}",
        **prompt_fields([*prompt, *emitted], spec.images),
        "sampling_params": sampling_params(spec.params, choice, emitted, eos),
        "stream": True,
        "stream_options": {"include_usage": True},
        **_shared_fields(spec, transfer),
    }
    return msgspec.json.encode(body)


def prefill_body(
    request_id: str,
    prompt: Sequence[int],
    spec: RequestSpec,
    choice: int,
    eos: Sequence[int],
    transfer: Parameters | None,
) -> bytes:
    """Return the JSON body that requests the first token of one choice.

    It is not streamed, because only whole responses have ``kv_transfer_params``. With ``transfer``
    vLLM keeps the KV for another worker.
    """
    params = spec.params
    first_only = msgspec.structs.replace(params, max_tokens=1, min_tokens=min(params.min_tokens, 1))
    body = {
        "request_id": f"{request_id}/{choice}",
        "token_ids": prompt,
        "sampling_params": sampling_params(first_only, choice, (), eos),
        **_shared_fields(spec, transfer),
    }
    return msgspec.json.encode(body)


def one_token_body(
    request_id: str,
    prompt: Sequence[int],
    spec: RequestSpec,
    transfer: Parameters | None = None,
    **sampling: int,
) -> bytes:
    """Return the JSON body of a request for what vLLM does to compute one token of any choice.

    vLLM takes no request without a token to compute; to move the KV of a prefix, add any one.
    """
    body = {
        "request_id": f"{request_id}/0",
        **prompt_fields(prompt, spec.images),
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False, **sampling},
        **_shared_fields(spec, transfer),
    }
    return msgspec.json.encode(body)


def _shared_fields(spec: RequestSpec, transfer: Parameters | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"cache_salt": spec.hash_seed.hex(), "priority": spec.priority}
    if spec.adapter is not None:
        fields["model"] = adapter_model(spec.adapter)
    if transfer is not None:
        fields["kv_transfer_params"] = transfer
    return fields


def sampling_params(
    params: SamplingParams, choice: int, emitted: Sequence[int], eos: Sequence[int]
) -> dict[str, Any]:
    """Return vLLM's sampling parameters for one choice that has ``emitted`` tokens already.

    The extra arguments are of ``inside/baton_sampling.py``.
    """
    stops = set(params.stop_token_ids)
    if not params.ignore_eos:
        stops.update(eos)
    result: dict[str, Any] = {
        "max_tokens": params.max_tokens - len(emitted),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": sorted(stops),
        "ignore_eos": params.ignore_eos,
        "min_tokens": max(0, params.min_tokens - len(emitted)),
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "detokenize": False,
    }
    if params.temperature:  # a resumed choice must not draw its first noise again
        noise = params.seed + choice + len(emitted) * 0x9E3779B97F4A7C15
        result["seed"] = noise & _SEED_MASK
    if params.logprobs is not None:  # vLLM counts the sampled token; see ``_alternatives``
        result["logprobs"] = params.logprobs + 1 if params.logprobs else 0
    if params.logit_bias:
        result["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.grammar:
        result["structured_outputs"] = {"grammar": params.grammar}
    result["extra_args"] = {
        **({"baton_bad_words": params.bad_words} if params.bad_words else {}),
        **({"baton_emitted": emitted} if params.grammar and emitted else {}),
    }
    return result


class ChoiceStream(ResponseReader):
    """Parser of the response to one ``generate_body``.

    Attributes:
        prompt: Prompt that vLLM must have computed, if it reports one.
    """

    def __init__(self, request_id: str, choice: int, spec: RequestSpec, eos: Sequence[int]) -> None:
        super().__init__(request_id, choice, spec)
        self.prompt: tuple[int, ...] = ()
        self._ends = set(spec.params.stop_token_ids)
        if not spec.params.ignore_eos or spec.params.grammar:
            self._ends.update(eos)

    def _read(self, event: bytes) -> list[ev.Tokens]:
        payload = event.removeprefix(b"data: ")
        if payload == b"[DONE]" or event.startswith(b":"):  # a comment, such as a proxy's
            return []
        chunk = read_chunk(payload)
        if chunk.error is not None:
            raise error_of(SERVER, chunk.error, REFUSED)
        if chunk.cached_tokens is not None:
            self.cached_tokens = chunk.cached_tokens
        if chunk.prompt_token_ids not in (None, self.prompt):
            raise InvalidRequestError(
                "in this model the tokens of an image depend on more than its size, such as on the "
                "number of images, so they were not known beforehand: send one image per request"
            )
        return [self._tokens(choice) for choice in chunk.choices]

    def _tokens(self, choice: ChunkChoice) -> ev.Tokens:
        ids = choice.token_ids or ()
        reason = choice.finish_reason or ""
        if reason not in ("", "stop", "length"):
            raise InternalError(f"vLLM ended the request with finish_reason {reason!r}")
        stop = None
        if reason == "stop" and ids and ids[-1] in self._ends:
            stop = ids[-1]
            ids = ids[:-1]
        content = choice.logprobs.content if choice.logprobs is not None else None
        tokens = [_sampled(n, token, content, self._alternatives) for n, token in enumerate(ids)]
        return self._new(tokens, reason, stop)


def _sampled(
    position: int, token: int, content: Sequence[TokenLogProb] | None, alternatives: int | None
) -> SampledToken:
    if alternatives is None:
        return SampledToken(token)
    if content is None or position >= len(content) or content[position].token_id != token:
        raise InternalError("vLLM sent no log-probability of a token")
    scored = content[position]
    ranked = sorted(
        (candidate for candidate in scored.top_logprobs if candidate.rank is not None),
        key=lambda candidate: candidate.rank or 0,
    )
    top = tuple((candidate.token_id, candidate.logprob) for candidate in ranked[:alternatives])
    return SampledToken(token, scored.logprob, top)


def first_token(answer: Chunk, alternatives: int | None) -> SampledToken:
    """Return the token in the response to a ``prefill_body``.

    Raises:
        InternalError: There is none.
    """
    choice = answer.choices[0] if answer.choices else ChunkChoice()
    if not choice.token_ids or choice.finish_reason not in ("stop", "length"):
        raise InternalError(f"vLLM sampled no first token: finish_reason {choice.finish_reason!r}")
    content = choice.logprobs.content if choice.logprobs is not None else None
    return _sampled(0, choice.token_ids[0], content, alternatives)


def saving_pages(response: bytes) -> int:
    """Return the pages of a prompt that vLLM saves, maybe after its response; see ``staging.py``.

    They are 0 if there is no whole response, as then it has begun none, or the worker ends.
    """
    try:
        parameters = read_chunk(response).kv_transfer_params or {}
    except InternalError:
        return 0
    return int(parameters.get("saving_pages", 0))


def is_aborted(response: bytes) -> bool:
    """Return whether vLLM aborted a request; then its ranks may still write into its pages."""
    try:
        choices = read_chunk(response).choices
    except InternalError:
        return False
    return any(choice.finish_reason == "abort" for choice in choices)


def abort_body(request_id: str, choice: int) -> bytes:
    """Return the body that aborts the request of one choice at ``ABORT``."""
    return msgspec.json.encode({"request_ids": [f"generate-tokens-{request_id}/{choice}"]})


def read_chunk(payload: bytes) -> Chunk:
    """Decode one JSON object of a stream or an error response."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise InternalError(f"vLLM sent {payload[:200]!r}, which is not a chunk: {error}") from None
