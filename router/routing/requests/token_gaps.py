"""Gaps between the output tokens of one request: count, mean, and the longest. Sans-IO."""

from typing import NamedTuple

KEPT_GAPS = 3


class Gap(NamedTuple):
    """Gap between two output tokens."""

    seconds: float
    before_token: int  # index, over all tokens of the request, of the late one
    ended_ns: int  # the router's monotonic clock


class TokenGaps:
    """Gaps of one request in bounded memory: their sum, and the longest few.

    Tokens of one frame share its gap in equal parts, as in ``baton_inter_token_seconds``.
    """

    __slots__ = ("_count", "_longest", "_sum_s")

    def __init__(self) -> None:
        self._count = 0
        self._sum_s = 0.0
        self._longest: list[Gap] = []

    def add(self, gap_s: float, tokens: int, before_token: int, now_ns: int) -> None:
        """Add the gap before ``tokens`` tokens that arrived together, ``gap_s`` for each."""
        # Called for every token: the branch is rarely taken.
        self._count += tokens
        self._sum_s += gap_s * tokens
        if len(self._longest) < KEPT_GAPS or gap_s > self._longest[-1].seconds:
            self._longest.append(Gap(gap_s, before_token, now_ns))
            self._longest.sort(reverse=True)
            del self._longest[KEPT_GAPS:]

    @property
    def longest(self) -> tuple[Gap, ...]:
        """Longest gaps, at most ``KEPT_GAPS``, sorted."""
        return tuple(self._longest)

    @property
    def usual_s(self) -> float:
        """Mean of the other gaps, or of all if there are no others; 0 without gaps."""
        others = self._count - len(self._longest)
        if others > 0:
            return max(self._sum_s - sum(gap.seconds for gap in self._longest), 0.0) / others
        return self._sum_s / self._count if self._count else 0.0
