"""Prompt outputs: log-probabilities of prompt tokens, and pooled hidden rows.

Each row is computed alone, by the routine for the log-probabilities of sampled tokens. So a token
has the same score, to the bit, whether it was sampled or is part of a prompt.
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
"""Number of rows whose logits exist at once: 6 MiB of fp32 at a vocabulary of 49k."""


class NotFiniteError(ArithmeticError):
    """Logits contain NaN or Inf."""


class LmHead(Protocol):
    """LM head of a model."""

    def logits(self, x_SE: torch.Tensor) -> Logits:
        """Return the logits of hidden rows."""

    def normed(self, x_SE: torch.Tensor) -> torch.Tensor:
        """Return the rows after the final norm, ``[S, E]`` fp32."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Contribution of one plan row to its prompt outputs, applied after the step."""

    prompt_outputs: PromptOutputs
    scores: list[Scores]
    rows_TE: Floats

    def hand_over(self) -> None:
        """Add the contribution to the prompt outputs."""
        self.prompt_outputs.take(self.scores, self.rows_TE)


def collect_rows(
    model: LmHead,
    rows: Sequence[PlanRow],
    ends: Sequence[int],
    hidden_TE: torch.Tensor,
    skipped: Collection[int],
) -> tuple[list[Collected], set[int]]:
    """Compute the prompt outputs of a plan's rows, except the ``skipped`` ones.

    ``ends`` is the end of each plan row in ``hidden_TE``, the step's hidden rows.

    Returns:
        The contributions, and the plan rows whose logits are not finite.
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
    model: LmHead, prompt_outputs: PromptOutputs, start: int, hidden_TE: torch.Tensor
) -> tuple[list[Scores], Floats]:
    """Compute the prompt outputs of hidden rows at positions ``start ...``.

    Returns:
        Scores in slices, and rows to pool, ``[T, E]``; empty if not requested.

    Raises:
        NotFiniteError: The logits contain NaN or Inf.
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
