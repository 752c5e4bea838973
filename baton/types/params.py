"""Sampling parameters as the engine takes them: fully resolved, range-checked by the router."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled.

    Noise is a pure function of (seed, choice, position), so equal parameters and equal logits give
    equal tokens on any worker. ``temperature`` 0 is greedy.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # None = off, otherwise the number of alternatives (0 to 20)
    prompt_logprobs: int | None = None  # None = off; otherwise alternatives per prompt token
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that the answer must not hold
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: str = ""  # what the answer must follow, as llguidance takes it; empty = free


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token; log-probabilities are of the raw logits, before penalties."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter that a request asks for."""

    name: str  # as clients say it; for metrics and messages
    digest: str  # hexadecimal, over config and weights: what the engine knows it by
    path: str  # a directory that every worker can read


def finish_reason(
    params: SamplingParams, eos: frozenset[int], token: int, generated: int
) -> tuple[str, int | None]:
    """Whether a token just sampled ends its choice.

    Args:
        params: The request's parameters.
        eos: The model's end tokens.
        token: The token sampled.
        generated: Tokens sampled so far, this one included.

    Returns:
        ``("", None)`` to go on, ``("stop", token)`` when the token itself is the end (it is not
        part of the answer), ``("length", None)`` at the limit.

    With a grammar an end token is sampled early, or in spite of ``ignore_eos``, only where nothing
    else may follow; then it does end the answer.
    """
    if params.grammar and token in eos:
        return "stop", token
    ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
    if ends and generated > params.min_tokens:
        return "stop", token
    if generated >= params.max_tokens:
        return "length", None
    return "", None
