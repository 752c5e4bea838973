"""Outputs of a prompt's rows beside their KV: scores of its tokens, or one pooled vector.

    plan row ──rows of the prompt──▶ PromptOutputs (of the sequence) ──prompt done──▶ an event

``PromptOutputs`` grows with the prompt's chunks and is discarded when its sequence is preempted, so
it contains each row once and in order. Every row's part depends on that row alone, and sums run row
by row in fp64 in the order of positions: chunks and neighbours do not affect the result.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

MEAN = "mean"
LAST = "last"
POOLINGS = (MEAN, LAST)
SCORED_TOKEN_COST = 2

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint32]
Scores = tuple[Floats, Ids, Ids, Floats]
"""Log-probabilities ``[T]``, ranks ``[T]``, alternatives ``[T, k]`` and their log-probabilities."""


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens, packed little-endian; row 0 is the second token.

    The first token has no context and no score.
    """

    alternatives: int  # number of most likely tokens per position, best first
    logprobs: bytes  # float32 per token
    ranks: bytes  # uint32 per token; 1 is the most likely
    top_ids: bytes  # uint32, `alternatives` per token
    top_logprobs: bytes  # float32, `alternatives` per token

    @property
    def rows(self) -> int:
        """Number of tokens with a score."""
        return len(self.logprobs) // 4

    def cut(self, begin: int, end: int) -> "PromptLogprobs":
        """Return rows ``begin`` to ``end``."""
        one = slice(4 * begin, 4 * end)
        many = 4 * self.alternatives
        wide = slice(many * begin, many * end)
        return PromptLogprobs(
            self.alternatives,
            self.logprobs[one],
            self.ranks[one],
            self.top_ids[wide],
            self.top_logprobs[wide],
        )

    def slices(self, max_bytes: int) -> Iterator[tuple[int, "PromptLogprobs"]]:
        """Yield (first row, part), each part of about ``max_bytes``, to limit message sizes.

        Without rows there is one empty part, which distinguishes the end from "not yet".
        """
        step = max(max_bytes // bytes_per_row(self.alternatives), 1)
        for begin in range(0, max(self.rows, 1), step):
            yield begin, self.cut(begin, begin + step)


def bytes_per_row(alternatives: int) -> int:
    """Return the wire size of one scored token in bytes."""
    return 8 + 8 * alternatives


class PromptLogprobsIntake:
    """Collector of one prompt's slices of scores; repeated slices change nothing."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._parts: list[PromptLogprobs] = []
        self._filled = 0

    def put(self, begin: int, part: PromptLogprobs) -> bool:
        """Add a slice; False if rows before it are missing."""
        if begin > self._filled:
            return False
        if begin == self._filled:
            self._parts.append(part)
            self._filled += part.rows
        return True

    @property
    def complete(self) -> PromptLogprobs | None:
        """All scores, once every slice has arrived."""
        if not self._parts or self._filled < self._rows:
            return None
        if len(self._parts) > 1:
            parts = self._parts
            joined = PromptLogprobs(
                parts[0].alternatives,
                logprobs=b"".join(part.logprobs for part in parts),
                ranks=b"".join(part.ranks for part in parts),
                top_ids=b"".join(part.top_ids for part in parts),
                top_logprobs=b"".join(part.top_logprobs for part in parts),
            )
            self._parts = [joined]
        return self._parts[0]


class PromptOutputs:
    """Outputs gathered so far from one sequence's prompt.

    Args:
        alternatives: Number of alternatives to score per prompt token; None for no scores.
        pooling: Pooling of the hidden rows to one vector: ``"mean"``, ``"last"``, or ``""`` for
            none.
    """

    def __init__(self, prompt: Sequence[int], alternatives: int | None, pooling: str) -> None:
        self.prompt = prompt
        self.alternatives = alternatives
        self.pooling = pooling
        self._sum: npt.NDArray[np.float64] | None = None
        self._pooled = 0  # rows
        self._scored: list[Scores] = []

    @property
    def token_cost(self) -> int:
        """Budget cost of one token, in computed tokens: scores need all its logits."""
        return 1 if self.alternatives is None else SCORED_TOKEN_COST

    def targets(self, start: int, count: int) -> list[int]:
        """Return the tokens that follow positions ``start ...``, except after the last one."""
        return list(self.prompt[start + 1 : start + 1 + count])

    def take(self, scores: Sequence[Scores], rows: Floats) -> None:
        """Add the next tokens' scores, and the next hidden rows ``[T, E]`` to pool."""
        self._scored += scores
        if self.pooling:
            self._pool(rows)

    def _pool(self, rows: Floats) -> None:
        if self.pooling == LAST:
            self._sum = rows[-1].astype(np.float64)
            self._pooled = 1
            return
        total = np.zeros(rows.shape[1]) if self._sum is None else self._sum
        # Along the outer axis numpy adds row by row: any chunking gives the same bits.
        self._sum = np.add.reduce(np.concatenate([total[None], rows], dtype=np.float64), axis=0)
        self._pooled += len(rows)

    def scores(self) -> PromptLogprobs | None:
        """Return the scores of the whole prompt, or None if not requested."""
        if self.alternatives is None:
            return None
        columns = zip(*self._scored, strict=True) if self._scored else [()] * 4
        packed = (b"".join(part.tobytes() for part in column) for column in columns)
        return PromptLogprobs(self.alternatives, *packed)

    def vector(self) -> bytes:
        """Return the pooled vector as float32, not normalised; empty if not requested."""
        if self._sum is None:
            return b""
        return (self._sum / self._pooled).astype("<f4").tobytes()
