"""Demand of the last minute, from the sums that routers report. Sans-IO.

Sums of all routers are added and decay with time, so that rates and lengths follow the load, and an
idle fleet forgets.
"""

from collections.abc import Mapping
from math import exp

from baton.registry.types import PromptSum, WorkDemand
from baton.types.step_lines import PromptLine

MEMORY_S = 30.0
"""Time in which the weight of what was observed falls to 1 / e."""

MEMORY_REQUESTS = 400.0
"""The same in requests: with many of them, less time is enough."""

_PRIOR_RESPONSES = 8.0  # in the mean length of responses, until there are enough
_PRIOR_TOKENS = 256.0


class _Prompts:
    """Decaying sum over prompts."""

    def __init__(self) -> None:
        self.count = 0.0
        self.tokens = 0.0
        self.context = 0.0

    def decay(self, kept: float) -> None:
        self.count *= kept
        self.tokens *= kept
        self.context *= kept

    def add(self, now: PromptSum, before: PromptSum) -> None:
        self.count += now.count - before.count
        self.tokens += now.tokens - before.tokens
        self.context += now.context - before.context

    def seconds(self, line: PromptLine) -> float:
        return line.seconds(self.tokens, self.context)


class DemandWindow:
    """Recent demand at all routers together."""

    def __init__(self) -> None:
        self._before: dict[str, WorkDemand] = {}
        self._observed_ns: int | None = None
        self.arrived = _Prompts()
        self.placed = _Prompts()
        self.uncached = _Prompts()
        self.responses = 0.0
        self.output_tokens = 0.0
        self.span_s = 0.0  # weight of the observed time

    def observe(self, demands: Mapping[str, WorkDemand], now_ns: int) -> None:
        """Add what each router has counted since the last call; a new router counts from now on."""
        if self._observed_ns is not None:
            pairs = self._pairs(demands)
            arrived = sum(now.arrived.count - before.arrived.count for now, before in pairs)
            self._decay((now_ns - self._observed_ns) / 1e9, arrived)
            for now, before in pairs:
                self._add(now, before)
        self._observed_ns = now_ns
        self._before = dict(demands)

    def _pairs(self, demands: Mapping[str, WorkDemand]) -> list[tuple[WorkDemand, WorkDemand]]:
        """Return sums of now and before, without those of routers that are new."""
        pairs = [
            (now, self._before[router_id])
            for router_id, now in demands.items()
            if router_id in self._before
        ]
        return [(now, before) for now, before in pairs if before.arrived.count <= now.arrived.count]

    def _decay(self, seconds: float, arrived: int) -> None:
        kept = exp(-seconds / MEMORY_S - arrived / MEMORY_REQUESTS)
        for prompts in (self.arrived, self.placed, self.uncached):
            prompts.decay(kept)
        self.responses *= kept
        self.output_tokens *= kept
        self.span_s = self.span_s * kept + seconds

    def _add(self, now: WorkDemand, before: WorkDemand) -> None:
        self.arrived.add(now.arrived, before.arrived)
        self.placed.add(now.placed, before.placed)
        self.uncached.add(now.uncached, before.uncached)
        self.responses += now.responses - before.responses
        self.output_tokens += now.output_tokens - before.output_tokens

    def miss_share(self, line: PromptLine) -> float:
        """Return the share of prompts' time that is not saved by caches."""
        whole_s = self.placed.seconds(line)
        return self.uncached.seconds(line) / whole_s if whole_s else 1.0

    def tokens_per_response(self) -> float:
        """Return the mean length of responses, by the rate at which generating ones end.

        Tokens of those that still run count, so it grows with their age, long before they end.
        """
        tokens = self.output_tokens + _PRIOR_RESPONSES * _PRIOR_TOKENS
        return tokens / (self.responses + _PRIOR_RESPONSES)
