"""A trace whose mix of prompts and responses changes every ten minutes, made from a recorded one.

    as recorded ─▶ long prompts, at 0.45 of the rate ─▶ long responses, at 0.55 ─▶ as recorded …

Lengths of the long prompts and their responses are drawn from microsoft/vidur's
``arxiv_summarization_lengths.csv`` (MIT, 28,257 rows), of which this module has every twentieth
quantile. The long responses are four times as long as recorded.
"""

from collections.abc import Sequence

import numpy as np

from loadtest.workloads.traces import TraceRequest

PHASE_S = 600.0
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
