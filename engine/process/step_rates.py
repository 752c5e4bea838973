"""How fast an engine computes, fitted to its own steps. Sans-IO."""

import statistics
from collections import deque

from engine.core.events import StepDone

_KEPT = 0.95  # of earlier prompts' weight at each step: the rate follows within some twenty steps
_LEAST_SAMPLE_TOKENS = 32  # smaller ones say more about overhead than about the rate


class StepRates:
    """The two figures that the router's cost model wants of a worker.

    The rate is tokens by seconds over many steps. One step says little of the next prompt: behind
    100,000 tokens of context a chunk takes three times as long, and a router that took such a rate
    for the worker's would send the worker's own conversations elsewhere.
    """

    def __init__(self) -> None:
        self._prompt_tokens = self._prompt_s = 0.0
        self._decode_steps_s: deque[float] = deque(maxlen=64)

    def add(self, step: StepDone) -> None:
        """A step is done."""
        seconds = step.duration_ns / 1e9
        if not seconds:  # a status between steps, or a step that failed
            return
        if step.prompt_tokens >= _LEAST_SAMPLE_TOKENS:
            self._prompt_tokens = self._prompt_tokens * _KEPT + step.prompt_tokens
            self._prompt_s = self._prompt_s * _KEPT + seconds
        elif step.decode_rows and not step.prompt_tokens:
            self._decode_steps_s.append(seconds)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Fitted rate at which prompts are computed; 0 until one was."""
        return self._prompt_tokens / self._prompt_s if self._prompt_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """Median of recent steps without prompt tokens; 0 until there was one."""
        steps = self._decode_steps_s
        return statistics.median(steps) if steps else 0.0
