"""What a request asks of its prompt's rows beside their KV: scores of its tokens, or one vector.

    plan row ──rows of the prompt──▶ PromptOutputs (of the sequence) ──prompt done──▶ an event

``PromptOutputs`` grows with the prompt's chunks and is thrown away when its sequence is preempted,
so each row is in it once and in order. Every row's part depends on that row alone, and sums run
row by row in fp64 in the order of positions: chunks and neighbours cannot show in the result.
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
"""Of some tokens: log-probability ``[T]``, rank ``[T]``, alternatives ``[T, k]`` and theirs."""


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens, packed little-endian; row 0 is the second token.

    The first token follows nothing and has none.
    """

    alternatives: int  # per token: the most likely ones at its place, best first
    logprobs: bytes  # float32 per token
    ranks: bytes  # uint32 per token: 1 is the likeliest
    top_ids: bytes  # uint32, `alternatives` per token
    top_logprobs: bytes  # float32, `alternatives` per token

    @property
    def rows(self) -> int:
        """Tokens that have a score."""
        return len(self.logprobs) // 4

    def cut(self, begin: int, end: int) -> "PromptLogprobs":
        """Rows ``begin`` to ``end``."""
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
        """(first row, part), each part about ``max_bytes`` at most: a message is never too large.

        Without any row there is one empty part, so that the end can be told from "not yet".
        """
        step = max(max_bytes // bytes_per_row(self.alternatives), 1)
        for begin in range(0, max(self.rows, 1), step):
            yield begin, self.cut(begin, begin + step)


def bytes_per_row(alternatives: int) -> int:
    """What one scored token takes on the wire."""
    return 8 + 8 * alternatives


class PromptLogprobsIntake:
    """Puts the slices of one prompt's scores together; slices that come again change nothing.

    Args:
        rows: How many there will be.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._parts: list[PromptLogprobs] = []
        self._filled = 0

    def put(self, begin: int, part: PromptLogprobs) -> bool:
        """Take a slice. False: rows before it are missing."""
        if begin > self._filled:
            return False
        if begin == self._filled:
            self._parts.append(part)
            self._filled += part.rows
        return True

    @property
    def complete(self) -> PromptLogprobs | None:
        """All of them, once every slice has come."""
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
    """What was gathered so far from one sequence's prompt.

    Args:
        prompt: The whole prompt.
        alternatives: Score the prompt's tokens, each with so many alternatives; None = do not.
        pooling: Pool the hidden rows to one vector: ``"mean"``, ``"last"``, or ``""`` for none.
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
        """What one token costs beside one that is only computed: scores need all its logits."""
        return 1 if self.alternatives is None else SCORED_TOKEN_COST

    def targets(self, start: int, count: int) -> list[int]:
        """The tokens that follow positions ``start ...``; the prompt's last one has none."""
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
        # Along the outer axis numpy adds row after row: any chunking gives the same bits.
        self._sum = np.add.reduce(np.concatenate([total[None], rows], dtype=np.float64), axis=0)
        self._pooled += len(rows)

    def scores(self) -> PromptLogprobs | None:
        """The scores of the whole prompt, or None if nobody asked for them."""
        if self.alternatives is None:
            return None
        columns = zip(*self._scored, strict=True) if self._scored else [()] * 4
        packed = (b"".join(part.tobytes() for part in column) for column in columns)
        return PromptLogprobs(self.alternatives, *packed)

    def vector(self) -> bytes:
        """The pooled vector as float32, not normalised; empty if nobody asked for it."""
        if self._sum is None:
            return b""
        return (self._sum / self._pooled).astype("<f4").tobytes()
