"""Traces whose load changes, made from a recorded one: with the hour, or every ten minutes.

    as recorded ─▶ long prompts, at 0.45 of the rate ─▶ long responses, at 0.55 ─▶ as recorded …

Lengths of the long prompts and their responses are drawn from microsoft/vidur's
``arxiv_summarization_lengths.csv`` (MIT, 28,257 rows), of which this module has every twentieth
quantile. The long responses are four times as long as recorded.
"""

from collections.abc import Sequence

import numpy as np

from loadtest.workloads.traces import TraceRequest

PHASE_S = 600.0
DAY_S = 86_400.0
VALLEY = 0.1
_POINTS_PER_DAY = 8640  # of the curve, between which it is a line
_LONG_PROMPTS_KEPT = 0.45
_LONG_RESPONSES_KEPT = 0.55
_LONGER = 4

# fmt: off
_ARXIV_PROMPTS = (1, 748, 1242, 1564, 1802, 1986, 2150, 2308, 2453, 2596, 2730, 2861, 2996, 3127,
                  3249, 3370, 3490, 3597, 3702, 3813, 4054)
_ARXIV_RESPONSES = (5, 60, 78, 92, 104, 115, 125, 135, 145, 156, 167, 179, 192, 206, 222, 242, 268,
                    304, 372, 736, 4056)
# fmt: on


def shifting(requests: Sequence[TraceRequest], seed: int = 0) -> list[TraceRequest]:
    """Return the trace with its lengths and rate changed in two of three phases."""
    rng = np.random.default_rng(seed)
    draws = rng.random((len(requests), 3))
    shifted = []
    for request, (kept, prompt, response) in zip(requests, draws.tolist(), strict=True):
        phase = int(request.arrival_s // PHASE_S) % 3
        if phase == 0:
            shifted.append(request)
        elif phase == 1 and kept < _LONG_PROMPTS_KEPT:
            shifted.append(
                TraceRequest(
                    request.arrival_s,
                    _drawn(prompt, _ARXIV_PROMPTS),
                    _drawn(response, _ARXIV_RESPONSES),
                )
            )
        elif phase == 2 and kept < _LONG_RESPONSES_KEPT:
            longer = _LONGER * request.output_tokens
            shifted.append(request._replace(output_tokens=longer))
    return shifted


def _drawn(share: float, quantiles: Sequence[int]) -> int:
    shares = np.linspace(0.0, 1.0, len(quantiles))
    return max(round(float(np.interp(share, shares, quantiles))), 1)


def days(
    requests: Sequence[TraceRequest], number: int, valley: float = VALLEY
) -> list[TraceRequest]:
    """Return the trace of so many days, from midnight on.

    The trace is repeated end to end, and its time is stretched so that the rate follows a sine: as
    recorded at noon, and ``valley`` times that at midnight. Lengths, bursts within minutes, and
    shared prefixes within a repetition stay as recorded.
    """
    times_s = np.linspace(0.0, number * DAY_S, number * _POINTS_PER_DAY + 1)
    swing = (1.0 - np.cos(2 * np.pi * times_s / DAY_S)) / 2
    rates = valley + (1.0 - valley) * swing
    passed_s = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(times_s))])
    length_s = max(requests[-1].arrival_s, 1.0)
    names = 1 + max((max(one.block_hashes, default=0) for one in requests), default=0)
    repetitions = range(int(passed_s[-1] // length_s) + 1)
    recorded = ((n, n * length_s + one.arrival_s, one) for n in repetitions for one in requests)
    return [
        request._replace(
            arrival_s=float(np.interp(recorded_s, passed_s, times_s)),
            block_hashes=tuple(repetition * names + name for name in request.block_hashes),
        )
        for repetition, recorded_s, request in recorded
        if recorded_s < passed_s[-1]
    ]
