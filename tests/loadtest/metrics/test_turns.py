"""Figures of agents' turns, of runs whose figures are known."""

import pytest

from loadtest.metrics.turns import turn_figures
from tests.loadtest.metrics.test_metrics import record

NO_COUNTS = {"prompt_tokens": None, "cached_tokens": None, "answer_tokens": None}


def turn(session: int, number: int, ttft_s: float, prompt: int | None, cached: int | None):
    return record(
        session=session,
        turn=number,
        intended_s=1.0,
        sent_s=1.0,
        chunk_s=[1.0 + ttft_s, 9.0],
        prompt_tokens=prompt,
        cached_tokens=cached,
        answer_tokens=10,
    )


def test_shares_and_ratios_of_a_known_run():
    records = [turn(0, 1, 4.0, 100, 0), turn(0, 2, 0.5, 200, 110), turn(0, 3, 0.5, 300, 210)]
    records += [turn(1, 1, 2.0, 100, 80), turn(1, 2, 1.0, 200, 50), turn(1, 3, 1.0, 300, 90)]
    alone = [turn(0, 1, 2.0, 100, 0), turn(0, 2, 0.5, 200, 110), turn(0, 3, 0.25, 300, 210)]
    first, second, third, later = turn_figures(records, alone)
    assert [one.turn for one in (first, second, third, later)] == ["1", "2", "3", "from 2"]
    assert (first.requests, later.requests) == (2, 4)
    assert first.ttft_s.p50 == pytest.approx(3.0)
    assert (first.cached_share, first.cached_share_min) == pytest.approx((0.4, 0.0))
    assert first.repeated_share is None
    assert (second.cached_share, second.cached_share_min) == pytest.approx((0.4, 0.25))
    assert second.repeated_share == pytest.approx(110 / 200)
    assert third.ttft_to_alone == pytest.approx(3.0)  # median of 2 and 4
    # Shares of a session are over all its tokens, not the mean of its turns.
    assert (later.cached_share, later.cached_share_min) == pytest.approx(
        ((320 / 500 + 140 / 500) / 2, 140 / 500)
    )
    assert later.repeated_share == pytest.approx((110 + 210) / 500)
    assert later.ttft_to_alone == pytest.approx(2.0)  # of 1, 2, 2 and 4


def test_without_counts_there_are_no_shares():
    records = [turn(0, 1, 1.0, None, None), turn(0, 2, 1.0, 200, None)]
    for one in turn_figures(records):
        assert (one.cached_share, one.cached_share_min, one.repeated_share) == (None, None, None)
        assert one.ttft_to_alone is None
        assert one.ttft_s.p50 == pytest.approx(1.0)


def test_a_refused_turn_counts_as_a_request_without_a_first_token():
    failed = record(session=0, turn=2, chunk_s=[], end="http_error", **NO_COUNTS)
    records = [turn(0, 1, 1.0, 100, 0), failed, turn(0, 3, 1.0, 200, 100)]
    _, second, third, later = turn_figures(records)
    assert (second.requests, second.ttft_s, second.cached_share) == (1, None, None)
    assert third.repeated_share is None
    assert (later.requests, later.ttft_s.count, later.cached_share) == (2, 1, 0.5)


def test_one_turn_has_no_later_ones():
    assert [one.turn for one in turn_figures([turn(0, 1, 1.0, 100, 0)])] == ["1"]
