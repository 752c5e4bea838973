"""Figures per second, for the live page and `baton top`. Does no I/O.

    series.first_token(0.12)            # as it happens
    series.close(now, queued=0, running=3)  # once a second
    series.after(41)                    # samples 42, 43 …

Bounded: ``limit`` samples, and at most ``VALUES_PER_SAMPLE`` random durations per second for the
percentiles. Counts and sums include all.
"""

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

VALUES_PER_SAMPLE = 512
MAX_EDGES = 256  # pairs of workers in one sample
_NO_SIZES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Figures of one closed interval of about a second. Percentiles are None without values.

    ``number`` rises and is about the Unix second of the end, equal for all routers of a port.
    """

    number: int
    at_s: float  # Unix time of its end
    took_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    generated_tokens: int
    prompt_tokens: int
    ended: int
    failed: int
    refused: int  # answers with status 429
    errors: int  # answers with status 500 or above, and streams that ended with an error
    queued: int
    running: int
    handoffs: dict[str, int]  # first tokens per pair of workers: "worker-0>worker-1"
    limited: dict[str, int]  # ended requests with latency limits: good, late, refused, failed
    last_turn: int  # number of the last change of a worker's role
    sizes: dict[str, int]  # workers that accept requests, by role

    def as_dict(self) -> dict[str, Any]:
        """Return the sample as a dict for JSON."""
        return asdict(self)


class _Durations:
    """Bounded random sample of durations."""

    def __init__(self) -> None:
        self._seen = 0
        self._kept: list[float] = []
        self._random = random.Random(0)

    def add(self, seconds: float) -> None:
        self._seen += 1
        if len(self._kept) < VALUES_PER_SAMPLE:
            self._kept.append(seconds)
        # `randrange` takes four times as long, and this runs for every token.
        elif (place := int(self._random.random() * self._seen)) < VALUES_PER_SAMPLE:
            self._kept[place] = seconds

    def percentiles(self) -> tuple[float | None, float | None]:
        ordered = sorted(self._kept)
        return _percentile(ordered, 0.5), _percentile(ordered, 0.99)


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 6)


@dataclass(slots=True)
class _Open:
    ttft: _Durations = field(default_factory=_Durations)
    itl: _Durations = field(default_factory=_Durations)
    generated_tokens: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    failed: int = 0
    refused: int = 0
    errors: int = 0
    handoffs: Counter[str] = field(default_factory=Counter)
    limited: Counter[str] = field(default_factory=Counter)


_COUNTED = ("generated_tokens", "prompt_tokens", "ended", "failed", "refused", "errors")


class LiveSeries:
    """Ring of the latest ``limit`` samples; ``last`` is the number of the latest, at first 0."""

    def __init__(self, limit: int = 600) -> None:
        self._samples: deque[Sample] = deque(maxlen=limit)
        self._open = _Open()
        self.last = 0
        self._closed_at_s: float | None = None

    def first_token(self, wait_s: float) -> None:
        """Record the first byte of a response, ``wait_s`` after its request arrived."""
        self._open.ttft.add(wait_s)

    def tokens(self, gap_s: float, count: int) -> None:
        """Record ``count`` tokens, ``gap_s`` apart; 0 for the first tokens of a response."""
        self._open.generated_tokens += count
        if gap_s > 0:
            for _ in range(count):
                self._open.itl.add(gap_s)

    def handed_over(self, prefill: str, decode: str) -> None:
        """Record a response that began on this pair of workers."""
        edge = f"{prefill}>{decode}"
        if edge in self._open.handoffs or len(self._open.handoffs) < MAX_EDGES:
            self._open.handoffs[edge] += 1

    def prompt(self, computed_tokens: int) -> None:
        """Record the number of prompt tokens that were computed for a request."""
        self._open.prompt_tokens += computed_tokens

    def ended(self, *, failed: bool) -> None:
        """Record the end of a request."""
        self._open.ended += 1
        self._open.failed += failed

    def answered(self, status: int, *, failed: bool) -> None:
        """Record an HTTP answer. ``failed``: it is a stream that ended with an error."""
        self._open.refused += status == HTTPStatus.TOO_MANY_REQUESTS
        self._open.errors += failed or status >= HTTPStatus.INTERNAL_SERVER_ERROR

    def ended_with_limits(self, outcome: str) -> None:
        """Record what became of a request with latency limits."""
        self._open.limited[outcome] += 1

    def close(
        self,
        at_s: float,
        *,
        queued: int,
        running: int,
        last_turn: int = 0,
        sizes: Mapping[str, int] = _NO_SIZES,
    ) -> Sample:
        """Close the interval at a Unix time, with the requests that wait and run; open the next."""
        now = self._open
        self._open = _Open()
        took_s = 1.0 if self._closed_at_s is None else max(at_s - self._closed_at_s, 1e-3)
        self._closed_at_s = at_s
        self.last = max(self.last + 1, round(at_s))
        ttft_p50_s, ttft_p99_s = now.ttft.percentiles()
        itl_p50_s, itl_p99_s = now.itl.percentiles()
        sample = Sample(
            number=self.last,
            at_s=round(at_s, 3),
            took_s=round(took_s, 3),
            ttft_p50_s=ttft_p50_s,
            ttft_p99_s=ttft_p99_s,
            itl_p50_s=itl_p50_s,
            itl_p99_s=itl_p99_s,
            handoffs=dict(now.handoffs),
            limited=dict(now.limited),
            **{name: getattr(now, name) for name in _COUNTED},
            queued=queued,
            running=running,
            last_turn=last_turn,
            sizes=dict(sizes),
        )
        self._samples.append(sample)
        return sample

    def after(self, number: int) -> list[Sample]:
        """Return the kept samples after ``number``; 0 returns all."""
        return [sample for sample in self._samples if sample.number > number]
