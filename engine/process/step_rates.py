"""How fast an engine computes, fitted to its own steps. Sans-IO."""

import statistics
from collections import deque

from engine.core.events import StepDone
from telemetry.running_mean import RunningMean

_SAMPLE_WEIGHT = 0.3  # of one step in the rate at which prompts are computed
_LEAST_SAMPLE_TOKENS = 32  # smaller ones say more about overhead than about the rate


class StepRates:
    """The two figures that the router's cost model wants of a worker."""

    def __init__(self) -> None:
        self._prefill_tokens_per_s = RunningMean(_SAMPLE_WEIGHT)
        self._decode_steps_s: deque[float] = deque(maxlen=64)

    def add(self, step: StepDone) -> None:
        """A step is done."""
        seconds = step.duration_ns / 1e9
        if not seconds:  # a status between steps, or a step that failed
            return
        if step.prompt_tokens >= _LEAST_SAMPLE_TOKENS:
            self._prefill_tokens_per_s.add(step.prompt_tokens / seconds)
        elif step.decode_rows and not step.prompt_tokens:
            self._decode_steps_s.append(seconds)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Fitted rate at which prompts are computed; 0 until one was."""
        return self._prefill_tokens_per_s.value

    @property
    def decode_step_s(self) -> float:
        """Median of recent steps without prompt tokens; 0 until there was one."""
        steps = self._decode_steps_s
        return statistics.median(steps) if steps else 0.0
