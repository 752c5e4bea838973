"""Counts the work that clients bring to one router, for the planner of roles. Sans-IO.

    arrived ──▶ waiting ── placed ──▶ computing ── first token ──▶ stream ── ended ──▶

A few additions per request and per received run of tokens.
"""

from dataclasses import dataclass

from baton.registry.types import PromptSum, WorkDemand
from baton.types.geometry import context_tokens


@dataclass(slots=True)
class _Sum:
    count: int = 0
    tokens: int = 0
    context: int = 0

    def add(self, length: int, uncached: int, sign: int = 1) -> None:
        """Add the last ``uncached`` tokens of a prompt of this length."""
        self.count += sign
        self.tokens += sign * uncached
        self.context += sign * context_tokens(length - uncached, length)

    def told(self) -> PromptSum:
        return PromptSum(self.count, self.tokens, self.context)


@dataclass(slots=True)
class _Request:
    prompt_tokens: int
    choices: int
    uncached: int | None = None  # None: not placed yet
    generated: int = 0


class WorkCounter:
    """Demand of one router's requests; ids that are not known are ignored."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._arrived = _Sum()
        self._placed = _Sum()
        self._uncached = _Sum()
        self._waiting = _Sum()
        self._computing = _Sum()
        self._responses = 0
        self._output_tokens = 0
        self._streams = 0
        self._stream_tokens = 0

    def arrived(self, request_id: str, prompt_tokens: int, choices: int = 1) -> None:
        """Count a request that was sent to this router."""
        self._requests[request_id] = _Request(prompt_tokens, choices)
        self._arrived.add(prompt_tokens, prompt_tokens)
        self._waiting.add(prompt_tokens, prompt_tokens)

    def placed(self, request_id: str, uncached_tokens: int) -> None:
        """Count a placement; the first one of a request is in the sums."""
        request = self._requests.get(request_id)
        if request is None or request.generated:
            return
        length = request.prompt_tokens
        if request.uncached is None:
            self._waiting.add(length, length, -1)
            self._placed.add(length, length)
            self._uncached.add(length, uncached_tokens)
        else:
            self._computing.add(length, request.uncached, -1)
        request.uncached = uncached_tokens
        self._computing.add(length, uncached_tokens)

    def generated(self, request_id: str, tokens: int) -> None:
        """Count tokens of a response."""
        request = self._requests.get(request_id)
        if request is None or request.uncached is None:
            return
        if not request.generated:
            self._computing.add(request.prompt_tokens, request.uncached, -1)
            self._streams += request.choices
            self._stream_tokens += request.choices * request.prompt_tokens
        request.generated += tokens
        self._output_tokens += tokens
        self._stream_tokens += tokens

    def ended(self, request_id: str, *, served: bool) -> None:
        """Count the end of a request; one that was not ``served`` may still have had tokens."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.generated:
            self._streams -= request.choices
            self._stream_tokens -= request.choices * request.prompt_tokens + request.generated
        elif request.uncached is None:
            self._waiting.add(request.prompt_tokens, request.prompt_tokens, -1)
        else:
            self._computing.add(request.prompt_tokens, request.uncached, -1)
        if served or request.generated:
            self._responses += 1

    def demand(self) -> WorkDemand:
        """Return the demand until now."""
        return WorkDemand(
            arrived=self._arrived.told(),
            placed=self._placed.told(),
            uncached=self._uncached.told(),
            responses=self._responses,
            output_tokens=self._output_tokens,
            waiting=self._waiting.told(),
            computing=self._computing.told(),
            streams=self._streams,
            stream_tokens=self._stream_tokens,
        )
