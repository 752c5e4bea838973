"""Automatic rollback by statistics, in seeded rollouts."""

from math import comb

import pytest

from baton.types.gates import Tally
from router.lanes.comparison import bucket_of, seconds_of, too_many_errors, too_slow
from tests.router.operators.gates.rollouts import Rollout, share_found


def best_power(count: int, usual: float, worse: float, false: float) -> float:
    """Return the power of the best test of a number of requests, by Neyman and Pearson."""

    def of(events: int, share: float) -> float:
        return comb(count, events) * share**events * (1 - share) ** (count - events)

    power = 0.0
    left = false
    for events in range(count, -1, -1):
        probability = of(events, usual)
        if probability > left:
            return power + left / probability * of(events, worse)
        power += of(events, worse)
        left -= probability
    return power


def test_no_test_finds_five_percent_within_200_requests_as_often_as_asked() -> None:
    """At one false rollback in 100, 95 % cannot be reached with 200 requests: this is the limit."""
    assert best_power(200, 0.01, 0.05, 0.01) == pytest.approx(0.907, abs=0.005)
    assert best_power(240, 0.01, 0.05, 0.01) > 0.95


@pytest.mark.long
def test_five_percent_errors_against_one_are_found() -> None:
    worse = Rollout(errors=0.05)
    assert share_found(worse, 200, 300) >= best_power(200, 0.01, 0.05, 0.01) - 0.08
    assert share_found(worse, 300, 300) >= 0.92


def test_a_p95_of_30_percent_more_is_found_within_400_requests() -> None:
    slower = Rollout(slower=1.3, errors=0.0, usual_errors=0.0, step=10)
    assert share_found(slower, 400, 150, lambda reason: reason.startswith("p95 TTFT")) >= 0.95


@pytest.mark.long
def test_at_most_one_of_100_healthy_rollouts_is_rolled_back() -> None:
    assert share_found(Rollout(step=20), 1000, 200) <= 0.01


def test_a_canary_that_always_fails_is_out_after_a_few_requests() -> None:
    stable = Tally(requests=1000, errors=10)
    failed = [n for n in range(20) if too_many_errors(Tally(requests=n, errors=n), stable)]
    assert failed[0] == 4
    assert "4 of 4 requests failed, with the stable model 10 of 1000" in too_many_errors(
        Tally(requests=4, errors=4), stable
    )


def test_a_canary_is_not_blamed_for_errors_that_the_stable_model_has_too() -> None:
    canary = Tally(requests=200, errors=40)
    assert too_many_errors(canary, Tally(requests=2000, errors=20))
    assert not too_many_errors(canary, Tally(requests=2000, errors=400))


def test_small_differences_of_latency_are_tolerated_whatever_their_number() -> None:
    stable = {bucket_of(0.1 * 1.002**step): 1000 for step in range(500)}
    faster = {bucket_of(0.1 * 1.08 * 1.002**step): 1000 for step in range(500)}
    slower = {bucket_of(0.1 * 1.4 * 1.002**step): 1000 for step in range(500)}
    assert not too_slow("TTFT", faster, stable)
    assert "p95 TTFT is" in too_slow("TTFT", slower, stable)
    assert not too_slow("TTFT", {bucket_of(9.0): 99}, stable)  # too few


def test_buckets_keep_durations_within_their_width() -> None:
    for took_s in (0.0, 2e-5, 0.013, 0.8, 77.0):
        assert seconds_of(bucket_of(took_s)) == pytest.approx(max(took_s, 1e-5), rel=0.03)
