"""Fills harvests: log-probabilities of prompt tokens, and pooled hidden rows.

Each row is treated alone, by the routine that also gives the log-probabilities of drawn tokens. So
a token has the same score, to the bit, whether it was drawn or stands in a prompt.
"""

# ruff: noqa: N803, N806 - suffixes such as q_THD give shapes

from typing import Protocol

import numpy as np
import torch

from engine.core.prompt_outputs import Floats, PromptOutputs, Scores
from engine.sampling.sample import Logits

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


def collect(
    model: Head, prompt_outputs: PromptOutputs, start: int, hidden_TE: torch.Tensor
) -> tuple[list[Scores], Floats]:
    """What a harvest wants of the rows at positions ``start ...``; it takes that in itself.

    Args:
        model: For its logits and its final norm.
        prompt_outputs: Says what is wanted.
        start: Position of the first row.
        hidden_TE: The model's rows.

    Returns:
        The scores in slices, and the rows to pool, ``[T, E]`` (none of either if not wanted).

    Raises:
        NotFiniteError: The logits hold NaN or Inf.
    """
    found: list[Scores] = []
    if prompt_outputs.alternatives is not None:
        targets = prompt_outputs.targets(start, len(hidden_TE))
        for begin in range(0, len(targets), SLICE_ROWS):
            wanted = targets[begin : begin + SLICE_ROWS]
            logits = model.logits(hidden_TE[begin : begin + len(wanted)])
            if not all(logits.finite()):
                raise NotFiniteError
            found.append(_score(logits, wanted, prompt_outputs.alternatives))
    rows_TE = model.normed(hidden_TE) if prompt_outputs.pooling else hidden_TE[:0]
    return found, rows_TE.cpu().numpy()


def _score(logits: Logits, targets: list[int], alternatives: int) -> Scores:
    count = len(targets)
    logprobs, ranks = np.empty(count, np.float32), np.empty(count, np.uint32)
    top_ids = np.empty((count, alternatives), np.uint32)
    top_logprobs = np.empty((count, alternatives), np.float32)
    for index, target in enumerate(targets):
        row_V = torch.log_softmax(logits.row(index), dim=-1)
        own = row_V[target]
        logprobs[index] = float(own)
        ranks[index] = int((row_V > own).sum()) + 1
        if alternatives:
            values, ids = row_V.topk(alternatives)
            top_ids[index], top_logprobs[index] = ids.cpu().numpy(), values.cpu().numpy()
    return logprobs, ranks, top_ids, top_logprobs
