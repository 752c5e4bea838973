"""Sampling parameters as the engine takes them: fully resolved, range-checked by the router."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn.

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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: str = ""  # what the answer must follow, as llguidance takes it; empty = free


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One drawn token; log-probabilities are of the raw logits, before penalties."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
