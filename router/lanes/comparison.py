"""Sequential tests of a canary's requests against those of the stable model. Pure.

Both are likelihood ratios of two hypotheses, as in Wald's test: "the canary is as the stable model"
and "it is worse by so much". They can be evaluated after each request: a ratio of a healthy canary
exceeds ``1 / p`` at any time with a probability of at most ``p``.

- Errors: the stable model's share of errors, at least 1 %, against 4 points more, or twice as much.
  Of a given number of requests, one exact test finds more than any test that is always evaluated.
  So there is one in addition, of the first 200 requests.
- Latency: the share of requests above the stable model's p95, against twice as much. In addition,
  the canary's own p95 must exceed the stable one by `RATIO_LIMIT`. So a small difference has no
  effect, whatever the number of requests.
"""

import math
from collections.abc import Mapping

from baton.types.gates import Tally

RATIO_LIMIT = 1.15
_ERROR_LIMIT = math.log(1 / 0.004)
_LATENCY_LIMIT = math.log(1 / 0.004)
_LOOK_REQUESTS = 200
_LOOK_P = 0.006
_LEAST_ERRORS = 0.01
_MORE_ERRORS = 0.04
_MOST = 0.95
_PRIOR_REQUESTS = 50  # counted as stable requests, one of which failed
_LEAST_REQUESTS = 100  # of each model, for latencies
_TAIL = 0.05
_SIGMAS = 2.0  # by which the stable model's share above its p95 is uncertain
_STEP = math.log(1.05)
_SMALLEST_S = 1e-5


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration; each ends 5 % above the one before."""
    return max(0, math.floor(math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S) / _STEP))


def seconds_of(bucket: int) -> float:
    """Return the middle of a bucket in seconds."""
    return _SMALLEST_S * math.exp((bucket + 0.5) * _STEP)


def too_many_errors(canary: Tally, stable: Tally) -> str:
    """Return the reason for a rollback by errors; empty if there is none."""
    usual = (stable.errors + 1) / (stable.requests + _PRIOR_REQUESTS)
    usual = min(max(usual, _LEAST_ERRORS), _MOST / 2)
    worse = min(usual + max(_MORE_ERRORS, usual), _MOST)
    looks_bad = (
        _LOOK_REQUESTS <= canary.requests < 1.25 * _LOOK_REQUESTS
        and _tail(canary.errors, canary.requests, usual) < _LOOK_P
    )
    if _ratio(canary.errors, canary.requests, usual, worse) < _ERROR_LIMIT and not looks_bad:
        return ""
    return (
        f"{canary.errors} of {canary.requests} requests failed, with the stable model "
        f"{stable.errors} of {stable.requests}"
    )


def too_slow(what: str, canary: Mapping[int, int], stable: Mapping[int, int]) -> str:
    """Return the reason for a rollback by a latency; empty if there is none.

    ``canary``: number of the canary's requests by bucket. ``stable``: the same for the stable
    model.
    """
    count = sum(canary.values())
    usual_count = sum(stable.values())
    if min(count, usual_count) < _LEAST_REQUESTS:
        return ""
    usual_p95 = _p95(stable)
    share = sum(n for bucket, n in stable.items() if bucket > usual_p95) / usual_count
    share += _SIGMAS * math.sqrt(max(share, 0.01) / usual_count)
    above = sum(n for bucket, n in canary.items() if bucket > usual_p95)
    if _ratio(above, count, share, 2 * share) < _LATENCY_LIMIT:
        return ""
    usual_s = seconds_of(usual_p95)
    p95_s = seconds_of(_p95(canary))
    if p95_s < RATIO_LIMIT * usual_s:
        return ""
    return f"p95 {what} is {p95_s * 1e3:.4g} ms, with the stable model {usual_s * 1e3:.4g} ms"


def p95_s(counts: Mapping[int, int]) -> float | None:
    """Return the p95 of a latency in seconds; None without requests."""
    return seconds_of(_p95(counts)) if counts else None


def _p95(counts: Mapping[int, int]) -> int:
    allowed = _TAIL * sum(counts.values())
    above = 0
    for bucket in sorted(counts, reverse=True):
        above += counts[bucket]
        if above > allowed:
            return bucket
    return 0


def _tail(events: int, count: int, share: float) -> float:
    """Return the probability of so many events or more, with a share of all."""
    fewer = (math.comb(count, n) * share**n * (1 - share) ** (count - n) for n in range(events))
    return 1.0 - sum(fewer)


def _ratio(events: int, count: int, usual: float, worse: float) -> float:
    """Return the logarithm of how much likelier the events are with the worse probability."""
    return events * math.log(worse / usual) + (count - events) * math.log((1 - worse) / (1 - usual))
