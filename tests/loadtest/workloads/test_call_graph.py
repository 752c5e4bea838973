"""Dependencies between the calls of a trace of agents, and the times at which they may start."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workloads import call_graph
from loadtest.workloads.call_graph import CallDependencies, CallFrontier, TracePart
from loadtest.workloads.traces import TraceError

TIMES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=10)


def ancestors(after: dict[int, set[int]], call: int) -> set[int]:
    return after[call].union(*(ancestors(after, before) for before in after[call]))


@given(TIMES)
def test_a_call_waits_for_those_that_had_ended_and_for_no_other(times):
    parts = [TracePart(start, start + length, call) for call, (start, length) in enumerate(times)]
    order = CallDependencies()
    last = order.add(parts)
    for one, other in itertools.permutations(parts, 2):
        had_ended = one.end_ns <= other.start_ns and one.start_ns < other.start_ns
        assert (one.call in ancestors(order.after, other.call)) == had_ended
    for before in order.after.values():  # no edge says what two others say
        assert not any(before & ancestors(order.after, call) for call in before)
    followed = set().union(*order.after.values())
    assert last == set(range(len(parts))) - followed


@given(TIMES, st.integers(0, 12), st.integers(0, 12))
def test_what_follows_a_scope_waits_for_all_of_it_and_its_calls_for_what_was_before(
    times, gap, later
):
    inner = [TracePart(100 + s, 100 + s + n, call) for call, (s, n) in enumerate(times)]
    scope = TracePart(100, max(part.end_ns for part in inner), parts=inner)
    before = TracePart(50 - gap, 50, 20)
    after = TracePart(scope.end_ns + 1 + later, scope.end_ns + 50, 21)
    order = CallDependencies()
    assert order.add([after, scope, before]) == {21}
    assert ancestors(order.after, 21) == {20, *range(len(times))}
    assert all(20 in ancestors(order.after, call) for call in range(len(times)))


def test_too_many_edges_are_an_error(monkeypatch):
    monkeypatch.setattr(call_graph, "MAX_EDGES", 20)
    wide = [TracePart(0, 1, call) for call in range(5)] + [
        TracePart(2, 3, 5 + call) for call in range(5)
    ]
    with pytest.raises(TraceError, match="over 20 ways"):
        CallDependencies().add(wide)


GRAPHS = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        *(
            st.sets(st.integers(0, call - 1), max_size=3) if call else st.just(set())
            for call in range(count)
        )
    )
)


@given(GRAPHS, st.lists(st.integers(1, 9), min_size=24, max_size=24))
def test_every_call_starts_once_its_pause_after_the_last_that_it_waits_for(graph, numbers):
    pauses = [number / 4 for number in numbers[:12]]
    lengths = numbers[12:]
    frontier = CallFrontier(graph, pauses)
    due = dict(frontier.begin(100.0))
    ends: dict[int, float] = {}
    while len(ends) < len(due):
        end_s, call = min((due[each] + lengths[each], each) for each in due if each not in ends)
        ends[call] = end_s
        for ready, at_s in frontier.ended(call, end_s):
            assert ready not in due
            due[ready] = at_s
    for call, before in enumerate(graph):
        assert due[call] == max((ends[each] for each in before), default=100.0) + pauses[call]


@pytest.mark.parametrize("after", [[[0]], [[], [2], []], [[-1]]])
def test_a_call_that_waits_for_itself_or_a_later_one_is_an_error(after):
    with pytest.raises(TraceError, match="not before it"):
        CallFrontier(after, [0.0] * len(after))
