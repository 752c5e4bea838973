"""Engine speed, fitted to its own steps. Pure."""

from bisect import bisect_left, insort
from collections import deque

from baton.types.events import StepDone
from baton.types.step_lines import STEP_SHARE_PER_STREAM, DecodeLine, PromptLine

_KEPT = 0.95  # decay of earlier steps' weight: the rate follows within some twenty steps
_FIT_KEPT = 0.98  # slower decay: a line needs steps with different contexts
_DECODE_STEPS = 64  # recent steps in the median
_LEAST_SAMPLE_TOKENS = 32  # smaller prompts measure mostly overhead
_LEAST_LINE_S = 0.05  # so do shorter steps: short prompts would show a worker as slow
# Steps with closer contexts do not determine the cost of context.
_LEAST_SPREAD_TOKENS = 256.0
_DECODE_KEPT = 0.998  # decode steps are short, and their rows and contexts change slowly
_LEAST_SPREAD_ROWS = 0.5  # as _LEAST_SPREAD_TOKENS, for rows
_LONGEST_DECODE = 4.0  # longer steps, in medians, were interrupted and count as this long


class StepRates:
    """Speed figures for the router's cost model.

    The rate is tokens per second over many steps. One step is a poor estimate for the next prompt:
    after 100,000 tokens of context a chunk takes three times as long, and such a rate would make
    the router send the worker's own conversations to other workers. So the seconds per prompt token
    are also fitted to the context: a line by least squares, weighted by tokens.
    """

    def __init__(self) -> None:
        self._prompt_tokens = self._prompt_s = 0.0
        self._line = _Line()
        self._plane = _Plane()
        self._decode_steps_s: deque[float] = deque()
        self._sorted_steps_s: list[float] = []  # sorted, for the median in each report

    def add(self, step: StepDone) -> None:
        """Record a finished step."""
        seconds = step.duration_ns / 1e9
        if not seconds:  # a status between steps, or a step that failed
            return
        if step.prompt_tokens >= _LEAST_SAMPLE_TOKENS:
            self._prompt_tokens = self._prompt_tokens * _KEPT + step.prompt_tokens
            self._prompt_s = self._prompt_s * _KEPT + seconds
            tokens = step.prompt_tokens
            if seconds >= _LEAST_LINE_S:
                self._line.add(tokens, step.prompt_context / tokens, seconds / tokens)
        elif step.decode_rows and not step.prompt_tokens:
            self._add_decode_step(seconds)
            longest_s = _LONGEST_DECODE * self.decode_step_s
            self._plane.add(step.decode_rows, step.decode_context, min(seconds, longest_s))

    def _add_decode_step(self, seconds: float) -> None:
        self._decode_steps_s.append(seconds)
        insort(self._sorted_steps_s, seconds)
        if len(self._decode_steps_s) > _DECODE_STEPS:
            oldest_s = self._decode_steps_s.popleft()
            del self._sorted_steps_s[bisect_left(self._sorted_steps_s, oldest_s)]

    @property
    def prefill_tokens_per_s(self) -> float:
        """Fitted prefill rate; 0 before the first prompt."""
        return self._prompt_tokens / self._prompt_s if self._prompt_s else 0.0

    @property
    def prompt_fit(self) -> PromptLine:
        """Fitted time per prompt token and per token of its context, in long steps."""
        return self._line.fit()

    @property
    def decode_fit(self) -> DecodeLine:
        """Fitted time of a decode step by its rows and their contexts."""
        return self._plane.fit()

    @property
    def decode_step_s(self) -> float:
        """Median time of recent steps without prompt tokens; 0 if there were none."""
        steps_s = self._sorted_steps_s
        middle = len(steps_s) // 2
        return (steps_s[middle] + steps_s[~middle]) / 2 if steps_s else 0.0


class _Line:
    """Fit of y = a + b x by decaying least squares; a and b are not negative."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = 0.0  # total weight, and mean of the points
        self._xx = self._xy = 0.0  # sums of products of distances from the mean

    def add(self, weight: float, x: float, y: float) -> None:
        kept = self._weight * _FIT_KEPT
        self._weight = kept + weight
        share = weight / self._weight
        distance_x = x - self._x
        distance_y = y - self._y
        self._x += share * distance_x
        self._y += share * distance_y
        self._xx = self._xx * _FIT_KEPT + kept * share * distance_x * distance_x
        self._xy = self._xy * _FIT_KEPT + kept * share * distance_x * distance_y

    def fit(self) -> PromptLine:
        if not self._weight:
            return PromptLine()
        slope = self._xy / (self._xx + self._weight * _LEAST_SPREAD_TOKENS**2)
        slope = max(slope, 0.0)
        if slope * self._x >= self._y:  # noise: nothing is left for the token itself
            slope = 0.0
        return PromptLine(self._y - slope * self._x, slope)


class _Plane:
    """Fit of y = a + b rows + c context by decaying least squares; none of them is negative.

    What steps have not determined is assumed: ``STEP_SHARE_PER_STREAM`` per row, and nothing for
    context. As for the line, steps that are too close count less than these assumptions.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._context = self._y = 0.0  # total weight, and means
        # Sums of products of distances from the means.
        self._rr = self._rc = self._cc = self._ry = self._cy = 0.0

    def add(self, rows: float, context: float, y: float) -> None:
        kept = self._weight * _DECODE_KEPT
        self._weight = kept + 1.0
        share = 1.0 / self._weight
        far_rows = rows - self._rows
        far_context = context - self._context
        far_y = y - self._y
        self._rows += share * far_rows
        self._context += share * far_context
        self._y += share * far_y
        product = kept * share
        self._rr = self._rr * _DECODE_KEPT + product * far_rows * far_rows
        self._rc = self._rc * _DECODE_KEPT + product * far_rows * far_context
        self._cc = self._cc * _DECODE_KEPT + product * far_context * far_context
        self._ry = self._ry * _DECODE_KEPT + product * far_rows * far_y
        self._cy = self._cy * _DECODE_KEPT + product * far_context * far_y

    def fit(self) -> DecodeLine:
        if not self._weight:
            return DecodeLine()
        row_s, context_s = self._slopes()
        rest_s = self._rows * row_s + self._context * context_s
        if rest_s > self._y:  # noise: nothing is left for the step itself
            row_s *= self._y / rest_s
            context_s *= self._y / rest_s
            rest_s = self._y
        return DecodeLine(self._y - rest_s, row_s, context_s)

    def _slopes(self) -> tuple[float, float]:
        assumed_s = STEP_SHARE_PER_STREAM * self._y / (1.0 + STEP_SHARE_PER_STREAM * self._rows)
        few_rows = self._weight * _LEAST_SPREAD_ROWS**2
        rr = self._rr + few_rows
        cc = self._cc + self._weight * _LEAST_SPREAD_TOKENS**2
        ry = self._ry + few_rows * assumed_s
        both = rr * cc - self._rc * self._rc
        row_s = (ry * cc - self._cy * self._rc) / both
        context_s = (self._cy * rr - ry * self._rc) / both
        if row_s >= 0 and context_s >= 0:
            return row_s, context_s
        only_row_s = max(ry / rr, 0.0)
        only_context_s = max(self._cy / cc, 0.0)
        by_rows = ry * only_row_s >= self._cy * only_context_s  # explains more of the differences
        return (only_row_s, 0.0) if by_rows else (0.0, only_context_s)
