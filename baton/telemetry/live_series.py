"""What happened in each of the last seconds, for the live page and `baton top`. Sans-IO.

    series.first_token(0.12)            # as it happens
    series.close(now, queued=0, running=3)  # once a second
    series.after(41)                    # samples 42, 43 …

Bounded: ``limit`` samples, and of each second no more than ``VALUES_PER_SAMPLE`` waits are kept for
its percentiles (counts and sums are of all).
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

VALUES_PER_SAMPLE = 512
MAX_EDGES = 256  # pairs of workers that a sample names


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One closed interval, about a second long. Percentiles are None where nothing was measured.

    ``number`` rises from one to the next, and is about the Unix second of its end: routers that
    share a port have the same number for the same second.
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
    queued: int
    running: int
    handoffs: dict[str, int]  # "prefill-0>decode-0": first tokens that came over this pair

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Waits:
    """A bounded random sample of many durations."""

    def __init__(self) -> None:
        self._seen = 0
        self._kept: list[float] = []
        self._random = random.Random(0)

    def add(self, seconds: float) -> None:
        self._seen += 1
        if len(self._kept) < VALUES_PER_SAMPLE:
            self._kept.append(seconds)
        # `randrange` would take four times as long, and this is done for every token.
        elif (place := int(self._random.random() * self._seen)) < VALUES_PER_SAMPLE:
            self._kept[place] = seconds

    def percentiles(self) -> tuple[float | None, float | None]:
        """The 50th and the 99th."""
        ordered = sorted(self._kept)
        return _percentile(ordered, 0.5), _percentile(ordered, 0.99)


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 6)


@dataclass(slots=True)
class _Open:
    """The second that runs."""

    ttft: _Waits = field(default_factory=_Waits)
    itl: _Waits = field(default_factory=_Waits)
    generated_tokens: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    failed: int = 0
    handoffs: Counter[str] = field(default_factory=Counter)


class LiveSeries:
    """A ring of samples.

    Args:
        limit: Samples that are kept.
    """

    def __init__(self, limit: int = 600) -> None:
        self._samples: deque[Sample] = deque(maxlen=limit)
        self._open = _Open()
        self._number = 0
        self._closed_at_s: float | None = None

    def first_token(self, wait_s: float) -> None:
        """The first byte of an answer went out, so long after its request came."""
        self._open.ttft.add(wait_s)

    def tokens(self, gap_s: float, count: int) -> None:
        """Tokens came after a gap of ``gap_s`` each; the first ones of an answer have no gap."""
        self._open.generated_tokens += count
        if gap_s > 0:
            for _ in range(count):
                self._open.itl.add(gap_s)

    def handed_over(self, prefill: str, decode: str) -> None:
        """An answer began on this pair."""
        edge = f"{prefill}>{decode}"
        if edge in self._open.handoffs or len(self._open.handoffs) < MAX_EDGES:
            self._open.handoffs[edge] += 1

    def prompt(self, computed_tokens: int) -> None:
        """A prompt was read: so many of its tokens were computed for it."""
        self._open.prompt_tokens += computed_tokens

    def ended(self, *, failed: bool) -> None:
        """A request is over."""
        self._open.ended += 1
        self._open.failed += failed

    def close(self, at_s: float, *, queued: int, running: int) -> Sample:
        """End the interval that runs, and begin the next.

        Args:
            at_s: Unix time.
            queued: Requests that wait in the router now.
            running: Requests at the workers now.
        """
        now = self._open
        self._open = _Open()
        took_s = 1.0 if self._closed_at_s is None else max(at_s - self._closed_at_s, 1e-3)
        self._closed_at_s = at_s
        self._number = max(self._number + 1, round(at_s))
        ttft_p50_s, ttft_p99_s = now.ttft.percentiles()
        itl_p50_s, itl_p99_s = now.itl.percentiles()
        sample = Sample(
            number=self._number,
            at_s=round(at_s, 3),
            took_s=round(took_s, 3),
            ttft_p50_s=ttft_p50_s,
            ttft_p99_s=ttft_p99_s,
            itl_p50_s=itl_p50_s,
            itl_p99_s=itl_p99_s,
            generated_tokens=now.generated_tokens,
            prompt_tokens=now.prompt_tokens,
            ended=now.ended,
            failed=now.failed,
            queued=queued,
            running=running,
            handoffs=dict(now.handoffs),
        )
        self._samples.append(sample)
        return sample

    @property
    def last(self) -> int:
        """The number of the latest sample; 0 before the first."""
        return self._number

    def after(self, number: int) -> list[Sample]:
        """The samples that are still here of those after ``number`` (0: all)."""
        return [sample for sample in self._samples if sample.number > number]
