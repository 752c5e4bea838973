"""Sampling parameters of the engine: fully resolved, range-checked by the router."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request.

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
    bad_words: tuple[
        tuple[int, ...], ...
    ] = ()  # token sequences that the response must not contain
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: str = ""  # llguidance grammar of the response; empty: none

    @property
    def tracks_output(self) -> bool:
        """True if sampling depends on which tokens of the context are output."""
        penalties = self.presence_penalty or self.frequency_penalty
        return bool(self.grammar or self.bad_words or penalties)


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """Sampled token with log-probabilities of the raw logits, before penalties."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class AdapterRef(msgspec.Struct, frozen=True):
    """LoRA adapter of a request."""

    name: str  # name for clients, metrics and messages
    digest: str  # hexadecimal digest of config and weights
    path: str  # directory that every worker can read


def finish_reason(
    params: SamplingParams, eos: frozenset[int], token: int, generated: int
) -> tuple[str, int | None]:
    """Return whether and how a sampled token ends its choice.

    With a grammar an end token is sampled early, or in spite of ``ignore_eos``, only if no other
    token may follow; it then ends the response. ``generated`` counts this token, too.

    Returns:
        ``("", None)`` to continue, ``("stop", token)`` if the token ends the response without being
        part of it, ``("length", None)`` at the limit.
    """
    if params.grammar and token in eos:
        return "stop", token
    ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
    if ends and generated > params.min_tokens:
        return "stop", token
    if generated >= params.max_tokens:
        return "length", None
    return "", None
