"""Proof that a running vLLM keeps ``exact``: equal bits of a prompt on every path.

    alone      one prompt at a time, which the other paths are compared with
    batch      all prompts at once, too long for one engine step, so that some are cut into chunks
    cached     all prompts again, behind the prefixes that vLLM has cached
    resumed    all prompts with half of their responses, as after the loss of a worker

Tokens and log-probabilities of all computed positions are compared. A log-probability contains a
sum over the whole vocabulary, so it changes if any logit does, unless rounding hides the change.
"""

import asyncio
import hashlib
import os
import struct
from collections.abc import Sequence

import msgspec

from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm.facts import VllmFacts
from baton.engine.vllm.protocol import GENERATE, LogProbs, Usage
from baton.types.errors import InternalError, UnavailableError

_PROMPTS = 8
_TOKENS = 8  # of each response
_FIRST_PROMPT = 200  # tokens; equal on all workers, because their ids contain a digest of its bits
_LIMIT_S = 300.0  # for one response, on a slow CPU
_QUEUED_S = 0.5  # for vLLM to queue the prompts of a batch

Scores = dict[int, tuple[int, float]]
"""Token and log-probability by position of the sequence."""


class _Choice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    logprobs: LogProbs


class _PromptToken(msgspec.Struct, frozen=True):
    logprob: float


class Response(msgspec.Struct, frozen=True):
    """Response to ``score_body``; ``prompt_logprobs`` has a row for each position."""

    choices: tuple[_Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[dict[int, _PromptToken] | None, ...] | None = None


async def prove_exact(origin: HttpOrigin, facts: VllmFacts, vocab_size: int) -> str:
    """Compare the paths on the running server; return a digest of the bits of one prompt.

    Raises:
        InternalError: The server is not batch-invariant, or a path differs.
    """
    if not facts.batch_invariant:
        raise InternalError(
            "numerics: exact: vLLM's batch-invariant mode is off, because the environment of "
            "`baton up` sets VLLM_BATCH_INVARIANT=0: remove it, or set `numerics: fast`"
        )
    return await _Paths(origin).compare(probes(facts, vocab_size))


def probes(facts: VllmFacts, vocab_size: int) -> list[list[int]]:
    """Return prompts that together exceed the tokens of an engine step, as far as they fit."""
    room = min(facts.max_context_tokens, facts.blocks * facts.block_tokens // _PROMPTS)
    longest = max(room - _TOKENS, 1)
    share = facts.step_tokens // (_PROMPTS - 1)
    lengths = [_FIRST_PROMPT, *(share + 3 * number for number in range(1, _PROMPTS))]
    return [
        [(7919 * at + 104729 * number + 13) % vocab_size for at in range(min(length, longest))]
        for number, length in enumerate(lengths)
    ]


def score_body(prompt: Sequence[int], salt: str, tokens: int, **more: int) -> bytes:
    """Return the JSON body that requests greedy tokens with their log-probabilities."""
    sampling = {
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        **more,
    }
    body = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": salt}
    return msgspec.json.encode(body)


def scores_of(response: Response, prompt: Sequence[int]) -> Scores:
    """Return the scores in a response, without the prompt's if they were not requested."""
    rows = enumerate(response.prompt_logprobs or ())
    scores = {at: (prompt[at], row[prompt[at]].logprob) for at, row in rows if row is not None}
    for at, scored in enumerate(response.choices[0].logprobs.content or (), len(prompt)):
        scores[at] = scored.token_id, scored.logprob
    return scores


def check_equal(path: str, alone: Sequence[Scores], others: Sequence[Scores]) -> None:
    """Compare the scores of a path with those of each prompt alone.

    Raises:
        InternalError: They differ.
    """
    pairs = list(zip(alone, others, strict=True))
    compared = sum(len(other) for _, other in pairs)
    wrong = [
        (own[at], score) for own, other in pairs for at, score in other.items() if own[at] != score
    ]
    if wrong:
        own, other = wrong[0]
        raise InternalError(
            f"numerics: exact: {len(wrong)} of {compared} tokens {path} differ from those of "
            f"prompts alone: token {own[0]} has the log-probability {own[1]!r} alone, and token "
            f"{other[0]} has {other[1]!r} there; set `numerics: fast`"
        )


class _Paths:
    def __init__(self, origin: HttpOrigin) -> None:
        self._origin = origin

    async def compare(self, prompts: Sequence[list[int]]) -> str:
        salts = [os.urandom(16).hex() for _ in prompts]
        alone = [
            await self._scores(prompt, salt) for prompt, salt in zip(prompts, salts, strict=True)
        ]
        batch = await self._batch(prompts)
        check_equal("in a batch", alone, batch)
        cached = await asyncio.gather(
            *(self._behind_cached(*pair) for pair in zip(prompts, salts, strict=True))
        )
        check_equal("behind a cached prefix", alone, cached)
        resumed = await asyncio.gather(
            *(self._resumed(*pair) for pair in zip(prompts, alone, strict=True))
        )
        check_equal("in a resumed response", alone, resumed)
        await self._post("/reset_prefix_cache")
        return _digest(alone[0])

    async def _batch(self, prompts: Sequence[list[int]]) -> list[Scores]:
        """Compute all prompts at once: vLLM queues them while it is paused."""
        await self._post("/pause?mode=keep")
        asked = asyncio.gather(*(self._scores(prompt, os.urandom(16).hex()) for prompt in prompts))
        await asyncio.sleep(_QUEUED_S)
        await self._post("/resume")
        return await asked

    async def _behind_cached(self, prompt: list[int], salt: str) -> Scores:
        response = await self._ask(prompt, salt, _TOKENS)
        details = response.usage.prompt_tokens_details
        if details is None or not details.cached_tokens:
            raise InternalError(
                "numerics: exact: vLLM has cached no prefix of a prompt, so that it cannot be "
                "proven: set `numerics: fast`"
            )
        return scores_of(response, prompt)

    async def _resumed(self, prompt: list[int], alone: Scores) -> Scores:
        half = [alone[len(prompt) + at][0] for at in range(_TOKENS // 2)]
        return await self._scores([*prompt, *half], os.urandom(16).hex(), _TOKENS - len(half))

    async def _scores(self, prompt: list[int], salt: str, tokens: int = _TOKENS) -> Scores:
        """Return the scores of all positions. vLLM reads no cached prefix for them."""
        response = await self._ask(prompt, salt, tokens, prompt_logprobs=0)
        return scores_of(response, prompt)

    async def _ask(self, prompt: list[int], salt: str, tokens: int, **more: int) -> Response:
        body = score_body(prompt, salt, tokens, **more)
        return msgspec.json.decode(await self._post(GENERATE, body), type=Response)

    async def _post(self, target: str, body: bytes = b"") -> bytes:
        try:
            return await self._origin.fetch("POST", target, _LIMIT_S, body)
        except UnavailableError as error:
            raise InternalError(
                "numerics: exact: vLLM fails in its batch-invariant mode, see the worker's engine "
                f"log, or set `numerics: fast`: {error.message}"
            ) from None


def _digest(scores: Scores) -> str:
    packed = b"".join(struct.pack("<qd", *scores[at]) for at in sorted(scores))
    return hashlib.blake2b(packed, digest_size=8).hexdigest()
