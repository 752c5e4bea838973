"""Sampling. Every row is computed alone, so its result cannot depend on its batch.

The order is vLLM's: grammar, bias and forbidden end tokens, penalties, temperature, ``min_p``,
``top_k``, ``top_p``, then one sample. Sampling is Gumbel-max: the token with the largest ``logit /
temperature + noise`` wins, and the noise is a pure function of (seed, choice, position, token). So
recomputing a request on any worker samples the same tokens.
"""

# ruff: noqa: N803, N806, N815 - suffixes such as q_THD give shapes

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.core.plan import SampleSpec
from baton.types.params import SampledToken, SamplingParams

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_MASK64 = (1 << 64) - 1
_TOP_P_FIRST = 1024
"""Candidates that ``top_p`` sorts before it sorts the whole vocabulary."""
_LARGEST_PENALTY = 1e30
"""Limit of a penalty, as its inverse is: within them a penalised logit stays finite."""


def finite_rows(x_TN: torch.Tensor) -> list[bool]:
    """Return for each row whether it is free of NaN and Inf."""
    result: list[bool] = torch.isfinite(x_TN.sum(dim=-1, dtype=torch.float32)).tolist()
    return result


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of S rows, of which the best may be refined.

    Attributes:
        raw_SV: All logits in the model's dtype.
        ids_SC: Tokens with refined logits, best first; ``None`` if ``raw_SV`` is precise.
        refined_SC: Refined logits in fp32.
    """

    raw_SV: torch.Tensor
    ids_SC: torch.Tensor | None = None
    refined_SC: torch.Tensor | None = None
    finite_rows: Callable[[torch.Tensor], list[bool]] = finite_rows

    def rows(self, indexes: Sequence[int]) -> "Logits":
        """Return some of the rows."""
        rows = list(indexes)
        ids_SC = None if self.ids_SC is None else self.ids_SC[rows]
        refined_SC = None if self.refined_SC is None else self.refined_SC[rows]
        return Logits(self.raw_SV[rows], ids_SC, refined_SC, self.finite_rows)

    def finite(self) -> list[bool]:
        """Return for each row whether it is free of NaN and Inf."""
        return self.finite_rows(self.raw_SV)

    def best(self) -> list[int]:
        """Return the token with the largest logit of each row."""
        if self.ids_SC is None or self.refined_SC is None:
            result: list[int] = self.raw_SV.max(dim=-1).indices.tolist()
            return result
        best_S1 = self.refined_SC.max(dim=-1, keepdim=True).indices
        return self.ids_SC.gather(1, best_S1).flatten().tolist()

    def row(self, index: int) -> torch.Tensor:
        """Return the most precise fp32 logits ``[V]`` of one row."""
        row_V = self.raw_SV[index].to(torch.float32, copy=True)
        if self.ids_SC is not None and self.refined_SC is not None:
            # other logits cannot exceed refined ones
            row_V.clamp_(max=float(self.refined_SC[index].min()))
            row_V[self.ids_SC[index]] = self.refined_SC[index]
        return row_V

    def sample(
        self,
        specs: Sequence[Sequence[SampleSpec]],
        eos_token_ids: Sequence[int],
        masks: Sequence[Sequence[Mask | None]] | None = None,
    ) -> list[list[SampledToken]]:
        """Sample one token for each spec (choice) of each row; the logits must be finite.

        ``eos_token_ids`` and the stop tokens are forbidden until ``min_tokens`` is reached.
        ``masks`` are the tokens ``[V]`` that each spec's grammar allows, ``None`` for all.
        """
        best = self.best() if any(_is_plain(s) for choices in specs for s in choices) else []
        sampled = []
        for index, choices in enumerate(specs):
            if all(_is_plain(spec) for spec in choices):
                sampled.append([SampledToken(best[index]) for _ in choices])
                continue
            row_V = self.row(index)
            allowed = masks[index] if masks is not None else [None] * len(choices)
            pairs = zip(choices, allowed, strict=True)
            sampled.append([_one(row_V, spec, eos_token_ids, mask_V) for spec, mask_V in pairs])
        return sampled


def gumbel(seed: int, choice: int, position: int, vocab_size: int) -> Floats:
    """Return standard Gumbel noise for every token of the vocabulary.

    Philox is a counter-based generator: (seed, choice) is the key, and each position has its own
    2^192 counters, so that no two samples share noise.
    """
    raw = np.random.Philox(  # the raw stream is guaranteed stable across numpy versions
        key=np.array([seed & _MASK64, choice & _MASK64], dtype=np.uint64),
        counter=np.array([0, 0, 0, position], dtype=np.uint64),
    ).random_raw(vocab_size)
    uniform = ((raw >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53  # (0, 1]
    exponential = np.maximum(-np.log(uniform), 2.0**-60)
    result: Floats = -np.log(exponential)
    return result


def _is_plain(spec: SampleSpec) -> bool:
    p = spec.params
    return (
        p.temperature == 0.0
        and p.logprobs is None
        and not p.grammar
        and not p.logit_bias
        and not p.bad_words
        and not _has_penalties(p)
        and p.min_tokens <= len(spec.history) - spec.prompt_tokens
    )


def _has_penalties(p: SamplingParams) -> bool:
    return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)


def _one(
    raw_V: torch.Tensor, spec: SampleSpec, eos_token_ids: Sequence[int], mask_V: Mask | None
) -> SampledToken:
    token = _sample_token(raw_V, spec, eos_token_ids, mask_V)
    if spec.params.logprobs is None:
        return SampledToken(token)
    logprobs_V = torch.log_softmax(raw_V, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if spec.params.logprobs:
        values, ids = logprobs_V.topk(spec.params.logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs_V[token]), top)


def _sample_token(
    raw_V: torch.Tensor, spec: SampleSpec, eos_token_ids: Sequence[int], mask_V: Mask | None
) -> int:
    p = spec.params
    scores = raw_V.numpy().astype(np.float64)
    if mask_V is not None:
        scores[~mask_V] = -math.inf
    _bias(scores, spec, eos_token_ids)
    if _has_penalties(p):
        _penalise(scores, spec)
    if p.temperature == 0.0:
        return int(scores.argmax())
    scores /= p.temperature
    ids = candidates(scores, p)
    noise = gumbel(p.seed, spec.choice, len(spec.history), len(scores))
    if ids is None:
        return int((scores + noise).argmax())
    return int(ids[(scores[ids] + noise[ids]).argmax()])


def _bias(scores: Floats, spec: SampleSpec, eos_token_ids: Sequence[int]) -> None:
    p = spec.params
    for token, bias in p.logit_bias:
        scores[token] += bias
    forbidden: set[int] = set()
    if len(spec.history) - spec.prompt_tokens < p.min_tokens:
        forbidden.update(p.stop_token_ids if p.ignore_eos else (*p.stop_token_ids, *eos_token_ids))
    if p.bad_words:
        forbidden.update(_ends_of_bad_words(p.bad_words, spec.history[spec.prompt_tokens :]))
    if p.ignore_eos and p.grammar:
        forbidden.update(eos_token_ids)
    inside = [token for token in forbidden if 0 <= token < len(scores)]
    if inside:
        before = scores[inside]
        scores[inside] = -math.inf
        if p.grammar and scores.max() == -math.inf:
            scores[inside] = before  # the grammar allows nothing else and takes precedence


def _ends_of_bad_words(words: Sequence[Sequence[int]], answer: Sequence[int]) -> Iterator[int]:
    for word in words:
        begin = len(word) - 1
        if not begin or tuple(answer[-begin:]) == tuple(word[:-1]):
            yield word[-1]


def _penalise(scores: Floats, spec: SampleSpec) -> None:
    """Apply repetition to prompt and response, presence and frequency to the response alone."""
    p = spec.params
    if p.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(spec.history, dtype=np.int64))
        seen = seen[np.isfinite(scores[seen])]  # forbidden tokens stay so: -inf · 0 is NaN
        penalty = min(max(p.repetition_penalty, 1 / _LARGEST_PENALTY), _LARGEST_PENALTY)
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    answer = np.asarray(spec.history[spec.prompt_tokens :], dtype=np.int64)
    if answer.size and (p.frequency_penalty or p.presence_penalty):
        seen, counts = np.unique(answer, return_counts=True)
        scores[seen] -= p.frequency_penalty * counts + p.presence_penalty


def candidates(scores: Floats, p: SamplingParams) -> Ids | None:
    """Return the ids that ``min_p``, ``top_k`` and ``top_p`` leave, ``None`` for all.

    ``scores`` are logits divided by the temperature.
    """
    ids: Ids | None = None
    if p.min_p > 0.0:
        ids = np.flatnonzero(scores >= scores.max() + math.log(p.min_p))
    if p.top_k > 0 and p.top_k < (len(scores) if ids is None else len(ids)):
        ids = _largest(scores, ids, p.top_k)
    if p.top_p < 1.0:
        ids = _nucleus(scores, ids, p.top_p)
    return ids


def _largest(scores: Floats, ids: Ids | None, count: int) -> Ids:
    """Return the ``count`` largest, in falling order; equal scores are ordered by id."""
    values = scores if ids is None else scores[ids]
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    within = np.flatnonzero(values >= threshold)  # may hold more than count on ties
    order = within[np.argsort(-values[within], kind="stable")][:count]
    return order if ids is None else ids[order]


def _nucleus(scores: Floats, ids: Ids | None, top_p: float) -> Ids:
    """Return the smallest set of the most likely tokens whose probability reaches ``top_p``."""
    values = scores if ids is None else scores[ids]
    weights = np.exp(values - values.max())
    goal = top_p * weights.sum()
    for count in (min(_TOP_P_FIRST, len(values)), len(values)):
        order = _largest(values, None, count)
        reached = np.cumsum(weights[order])
        if reached[-1] >= goal:
            break
    keep = order[: int(np.searchsorted(reached, goal)) + 1]
    return keep if ids is None else ids[keep]
