"""A trace of whole days, made from a recorded one.

The trace is repeated end to end, and its time is stretched so that the rate follows a sine: as
recorded at noon, and ``valley`` times that at midnight. Lengths, bursts within minutes, and shared
prefixes within a repetition stay as recorded.
"""

from collections.abc import Sequence

import numpy as np

from loadtest.workloads.traces import TraceRequest

DAY_S = 86_400.0
VALLEY = 0.1
_POINTS_PER_DAY = 8640  # of the curve, between which it is a line


def days(
    requests: Sequence[TraceRequest], number: int, valley: float = VALLEY
) -> list[TraceRequest]:
    """Return the trace of so many days, from midnight on."""
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
