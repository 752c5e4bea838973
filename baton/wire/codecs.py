"""Codecs between Python objects and messages: ``X_to_wire`` and ``X_from_wire``, side by side."""

from collections.abc import Iterator, Sequence

import msgspec
from batonpb import common_pb2 as pb
from batonpb import prefill_pb2
from batonpb.decode_pb2 import RouterFrame

from baton.types.errors import BatonError, from_code
from baton.types.events import PromptDone, PromptOutputsReady
from baton.types.params import AdapterRef, SampledToken, SamplingParams
from baton.types.prompt_outputs import PromptLogprobs
from baton.wire.tokens import pack_tokens, unpack_tokens

_SLICE_BYTES = 256 * 1024  # per message with log-probabilities of a prompt


def sampling_to_wire(params: SamplingParams) -> pb.SamplingParams:
    """Encode sampling parameters, every field filled."""
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        n=params.n,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        logit_bias=[pb.LogitBias(token_id=token, bias=bias) for token, bias in params.logit_bias],
        bad_words=[pack_tokens(word) for word in params.bad_words],
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        prompt_logprobs=0 if params.prompt_logprobs is None else params.prompt_logprobs + 1,
        grammar=params.grammar,
    )


def sampling_from_wire(message: pb.SamplingParams) -> SamplingParams:
    """Decode the sampling parameters of a request."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        n=message.n,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        logprobs=None if message.logprobs < 0 else message.logprobs,
        logit_bias=tuple((item.token_id, item.bias) for item in message.logit_bias),
        bad_words=tuple(tuple(unpack_tokens(word)) for word in message.bad_words),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        prompt_logprobs=message.prompt_logprobs - 1 if message.prompt_logprobs else None,
        grammar=message.grammar,
    )


def adapter_to_wire(ref: AdapterRef | None) -> pb.Adapter | None:
    """Encode a LoRA adapter; None stays None."""
    if ref is None:
        return None
    return pb.Adapter(name=ref.name, digest=bytes.fromhex(ref.digest), path=ref.path)


def adapter_from_wire(message: pb.Adapter) -> AdapterRef | None:
    """Decode the adapter that a request names; None for the base model."""
    if not message.digest:
        return None
    return AdapterRef(message.name, message.digest.hex(), message.path)


def error_to_wire(error: BatonError) -> pb.Error:
    """Encode an error of the error tree."""
    return pb.Error(code=error.code, message=error.message, retryable=error.retryable)


def error_from_wire(message: pb.Error) -> BatonError:
    """Decode the error that a peer names; ``InternalError`` for a code from a newer peer."""
    return from_code(message.code, message.message)


def logprob_to_wire(token: SampledToken) -> pb.TokenLogprob:
    """Encode the log-probability of a token and its alternatives."""
    return pb.TokenLogprob(
        logprob=token.logprob or 0.0,
        top_ids=pack_tokens([alternative for alternative, _ in token.top]),
        top_logprobs=[logprob for _, logprob in token.top],
    )


def logprob_from_wire(token_id: int, message: pb.TokenLogprob | None) -> SampledToken:
    """Decode a sampled token."""
    if message is None:
        return SampledToken(token_id)
    top = zip(unpack_tokens(message.top_ids), message.top_logprobs, strict=True)
    return SampledToken(token_id, message.logprob, tuple(top))


def prompt_logprobs_to_wire(scores: PromptLogprobs) -> Iterator[pb.PromptLogprobs]:
    """Encode a prompt's log-probabilities in slices that fit into any message."""
    for begin, part in scores.slices(_SLICE_BYTES):
        yield pb.PromptLogprobs(begin=begin, **msgspec.structs.asdict(part))


def prompt_logprobs_from_wire(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Decode one slice, which belongs at row ``message.begin``."""
    return PromptLogprobs(*(getattr(message, name) for name in PromptLogprobs.__struct_fields__))


def first_tokens_to_wire(
    done: PromptDone, prompt_outputs: PromptOutputsReady
) -> Iterator[prefill_pb2.FirstTokens]:
    """Encode first tokens, preceded by slices of the prompt's log-probabilities, if any."""
    scores = prompt_outputs.scores
    last = None
    for part in prompt_logprobs_to_wire(scores) if scores is not None else ():
        if last is not None:
            yield prefill_pb2.FirstTokens(prompt_logprobs=last)
        last = part
    choices = []
    for token in done.first:
        choice = prefill_pb2.FirstToken(token_id=token.token)
        if token.logprob is not None:
            choice.has_logprob = True
            choice.logprob.CopyFrom(logprob_to_wire(token))
        choices.append(choice)
    yield prefill_pb2.FirstTokens(
        choices=choices,
        cached_tokens=done.cached_tokens,
        queue_ns=done.queue_ns,
        prefill_ns=done.prefill_ns,
        prompt_logprobs=last,
        embedding=prompt_outputs.vector,
        computed_ns=done.computed_ns,
        engine_transfer=done.engine_transfer,
    )


def first_tokens_from_wire(request_id: str, message: prefill_pb2.FirstTokens) -> PromptDone:
    """Decode first tokens: one per choice, none if an embedding is the response."""
    first = [
        logprob_from_wire(choice.token_id, choice.logprob if choice.has_logprob else None)
        for choice in message.choices
    ]
    return PromptDone(
        request_id=request_id,
        first=tuple(first),
        cached_tokens=message.cached_tokens,
        queue_ns=message.queue_ns,
        prefill_ns=message.prefill_ns,
        computed_ns=message.computed_ns,
        engine_transfer=message.engine_transfer,
    )


def gather(frames: Sequence[RouterFrame]) -> RouterFrame:
    """Return one frame that carries ``frames`` (at least one, none of them gathered) in order."""
    return frames[0] if len(frames) == 1 else RouterFrame(frames=frames)


def scatter(frame: RouterFrame) -> Sequence[RouterFrame]:
    """Return the frames that a frame carries, or the frame itself if it is single."""
    return frame.frames or (frame,)
