"""Fills prompt outputs: log-probabilities of prompt tokens, and pooled hidden rows.

Each row is treated alone, by the routine that also gives the log-probabilities of sampled tokens.
So a token has the same score, to the bit, whether it was sampled or stands in a prompt.
"""

# ruff: noqa: N803, N806, N815 - suffixes such as q_THD give shapes

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from baton.engine.core.plan import PlanRow
from baton.engine.sampling.sample import Logits
from baton.types.prompt_outputs import Floats, PromptOutputs, Scores

SLICE_ROWS = 32
"""Logits of so many rows exist at once: 6 MiB of fp32 at a vocabulary of 49k."""


class NotFiniteError(ArithmeticError):
    """A row's logits hold NaN or Inf."""


class Head(Protocol):
    """What turns a model's rows into results."""

    def logits(self, x_SE: torch.Tensor) -> Logits:
        """Their logits."""

    def normed(self, x_SE: torch.Tensor) -> torch.Tensor:
        """``[S, E]`` fp32: the rows behind the final norm."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What one plan row gives to its prompt outputs, once the step has succeeded."""

    prompt_outputs: PromptOutputs
    scores: list[Scores]
    rows_TE: Floats

    def hand_over(self) -> None:
        """Let the prompt outputs take it."""
        self.prompt_outputs.take(self.scores, self.rows_TE)


def collect_rows(
    model: Head,
    rows: Sequence[PlanRow],
    ends: Sequence[int],
    hidden_TE: torch.Tensor,
    skipped: Collection[int],
) -> tuple[list[Collected], set[int]]:
    """What the prompt outputs of a plan take of this step.

    Args:
        model: For its logits and its final norm.
        rows: Of the plan.
        ends: Where each plan row's hidden rows end.
        hidden_TE: The step's hidden rows.
        skipped: Plan rows that are not looked at.

    Returns:
        The parts, and the plan rows whose logits are not finite.
    """
    collected = []
    not_finite = set()
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        if row.prompt_outputs is None or index in skipped:
            continue
        own_TE = hidden_TE[end - len(row.tokens) : end]
        try:
            scores, pooled_TE = collect(model, row.prompt_outputs, row.start, own_TE)
        except NotFiniteError:
            not_finite.add(index)
        else:
            collected.append(Collected(row.prompt_outputs, scores, pooled_TE))
    return collected, not_finite


def collect(
    model: Head, prompt_outputs: PromptOutputs, start: int, hidden_TE: torch.Tensor
) -> tuple[list[Scores], Floats]:
    """What prompt outputs take of the rows at positions ``start ...``.

    Args:
        model: For its logits and its final norm.
        prompt_outputs: Says what is asked for.
        start: Position of the first row.
        hidden_TE: The model's rows.

    Returns:
        The scores in slices, and the rows to pool, ``[T, E]`` (none of either if not asked for).

    Raises:
        NotFiniteError: The logits hold NaN or Inf.
    """
    slices: list[Scores] = []
    if prompt_outputs.alternatives is not None:
        targets = prompt_outputs.targets(start, len(hidden_TE))
        for begin in range(0, len(targets), SLICE_ROWS):
            part = targets[begin : begin + SLICE_ROWS]
            logits = model.logits(hidden_TE[begin : begin + len(part)])
            if not all(logits.finite()):
                raise NotFiniteError
            slices.append(_score(logits, part, prompt_outputs.alternatives))
    rows_TE = model.normed(hidden_TE) if prompt_outputs.pooling else hidden_TE[:0]
    return slices, rows_TE.cpu().numpy()


def _score(logits: Logits, targets: list[int], alternatives: int) -> Scores:
    count = len(targets)
    logprobs = np.empty(count, np.float32)
    ranks = np.empty(count, np.uint32)
    top_ids = np.empty((count, alternatives), np.uint32)
    top_logprobs = np.empty((count, alternatives), np.float32)
    for index, target in enumerate(targets):
        row_V = torch.log_softmax(logits.row(index), dim=-1)
        own = row_V[target]
        logprobs[index] = float(own)
        ranks[index] = int((row_V > own).sum()) + 1
        if alternatives:
            values, ids = row_V.topk(alternatives)
            top_ids[index] = ids.cpu().numpy()
            top_logprobs[index] = values.cpu().numpy()
    return logprobs, ranks, top_ids, top_logprobs
