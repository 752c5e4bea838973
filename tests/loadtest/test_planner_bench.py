"""The oracle of turns: the best order of splits, and the planner's share of it."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types.slo import Slo
from benchmarks.goodput.planner import best_order, compare
from loadtest.simulator.simulation import Setup
from loadtest.workloads.traces import TraceRequest

GOOD = {2: [10, 10, 0, 0], 3: [6, 6, 6, 6], 4: [0, 0, 10, 10]}


def test_it_takes_the_best_split_of_each_window_when_turns_cost_nothing():
    assert best_order(GOOD, [0] * 4) == (40, [2, 2, 4, 4])


def test_turns_that_cost_more_than_they_bring_are_not_made():
    assert best_order(GOOD, [3] * 4) == (34, [2, 2, 4, 4])
    assert best_order(GOOD, [9] * 4) == (24, [3, 3, 3, 3])
    assert best_order(GOOD, [9, 0, 0, 0]) == (40, [2, 2, 4, 4]), "the start is free"


@given(st.lists(st.tuples(*[st.integers(0, 20)] * 3), min_size=1, max_size=5), st.integers(0, 8))
def test_no_order_is_better(windows, cost):
    good = {split: [window[split] for window in windows] for split in range(3)}
    total, order = best_order(good, [cost] * len(windows))

    def worth(splits) -> int:
        turns = sum(abs(a - b) for a, b in pairwise(splits))
        return sum(good[split][n] for n, split in enumerate(splits)) - cost * turns

    assert worth(order) == total
    assert total == max(map(worth, product(range(3), repeat=len(windows))))


@pytest.mark.long
def test_the_planner_is_compared_with_the_fixed_splits():
    """Prompts for which three of four workers prefill, then responses for which one does."""
    prompts = [TraceRequest(n / 2.2, 6000, 60) for n in range(130)]
    responses = [TraceRequest(60 + n / 10, 500, 300) for n in range(300)]
    setup = Setup(
        prefill_workers=1,
        decode_workers=3,
        prefill_kv_tokens=2_097_152,
        decode_kv_tokens=2_097_152,
        spread_s=0.5,
        slo=Slo(ttft_s=3.0, itl_s=0.03),
    )
    found = compare(setup, [*prompts, *responses], [1, 3], [3], 30.0)
    assert {split: len(windows) for split, windows in found.fixed.items()} == {1: 4, 3: 4}
    best_fixed = max(map(sum, found.fixed.values()))
    assert found.oracle_splits[0] == 3
    assert best_fixed <= found.oracle <= found.requests == 430
    assert found.turns[3] >= 0
    assert 0.9 * found.oracle <= found.planner[3] <= found.requests
