"""Times of an engine's steps, as lines that it fits to them."""

from typing import NamedTuple, Self

STEP_SHARE_PER_STREAM = 0.023
"""Share by which a sequence lengthens a step, until it is measured (measured: 29 → 50 ms from batch
1 to 32)."""


class PromptLine(NamedTuple):
    """Time of a prompt token: ``token_s`` plus ``context_s`` per token before it; 0: unknown."""

    token_s: float = 0.0
    context_s: float = 0.0

    def seconds(self, tokens: float, context: float) -> float:
        """Return the time of prompt tokens with this sum of tokens before each."""
        return tokens * self.token_s + context * self.context_s


class DecodeLine(NamedTuple):
    """Time of a step without prompt tokens: the sum of three parts; all 0: unknown.

    Attributes:
        step_s: Time of each step.
        row_s: Further time per sequence.
        context_s: Further time per token of their contexts.
    """

    step_s: float = 0.0
    row_s: float = 0.0
    context_s: float = 0.0

    def seconds(self, rows: float, context: float) -> float:
        """Return the time of a step; ``context`` are the tokens of all rows."""
        return self.step_s + rows * self.row_s + context * self.context_s

    def rows_within(self, limit_s: float, context_tokens: float) -> float:
        """Return the number of rows of this context each whose step takes ``limit_s``."""
        row_s = self.row_s + self.context_s * context_tokens
        return max(limit_s - self.step_s, 0.0) / row_s if row_s else 0.0

    def beside(self, median_s: float) -> Self:
        """Return the line for the number of streams beside one more.

        Without a fit it begins at the median step, and ``STEP_SHARE_PER_STREAM`` is assumed.
        """
        if any(self):
            return self._replace(step_s=self.step_s + self.row_s)
        return self._replace(step_s=median_s, row_s=median_s * STEP_SHARE_PER_STREAM)
