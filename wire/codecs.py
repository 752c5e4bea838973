"""Between protobuf messages and the engine's own parameter types."""

from collections.abc import Iterator, Sequence

import numpy as np
from batonpb import common_pb2 as pb

from engine.core.params import AdapterRef
from engine.core.prompt_outputs import PromptScores
from engine.core.params import SampledToken, SamplingParams

SCORES_BYTES = 256 * 1024  # of one slice


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Little-endian uint32, as token ids travel everywhere."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of ``pack_tokens``."""
    tokens: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return tokens


def sampling_from_wire(message: pb.SamplingParams) -> SamplingParams:
    """The engine's parameters."""
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
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        prompt_logprobs=message.prompt_logprobs - 1 if message.prompt_logprobs else None,
        grammar=message.grammar,
    )


def adapter_from_wire(message: pb.Adapter) -> AdapterRef | None:
    """The adapter that a request names; None for the base model."""
    if not message.digest:
        return None
    return AdapterRef(message.name, message.digest.hex(), message.path)


def logprob_to_wire(token: SampledToken) -> pb.TokenLogprob:
    """Log-probability of a token and its alternatives."""
    return pb.TokenLogprob(
        logprob=token.logprob or 0.0,
        top_ids=pack_tokens([alternative for alternative, _ in token.top]),
        top_logprobs=[logprob for _, logprob in token.top],
    )


def scores_to_wire(scores: PromptScores) -> Iterator[pb.PromptLogprobs]:
    """A prompt's scores in slices that fit into any message."""
    for begin, part in scores.slices(SCORES_BYTES):
        yield pb.PromptLogprobs(
            begin=begin,
            alternatives=part.alternatives,
            logprobs=part.logprobs,
            ranks=part.ranks,
            top_ids=part.top_ids,
            top_logprobs=part.top_logprobs,
        )


def scores_from_wire(message: pb.PromptLogprobs) -> PromptScores:
    """One slice; ``message.begin`` says where it belongs."""
    return PromptScores(
        message.alternatives,
        message.logprobs,
        message.ranks,
        message.top_ids,
        message.top_logprobs,
    )


def logprob_from_wire(token_id: int, message: pb.TokenLogprob | None) -> SampledToken:
    """A sampled token from its wire form."""
    if message is None:
        return SampledToken(token_id)
    top = zip(unpack_tokens(message.top_ids), message.top_logprobs, strict=True)
    return SampledToken(token_id, message.logprob, tuple(top))
