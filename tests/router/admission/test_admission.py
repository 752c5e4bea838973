"""The queue: strict priorities, turns by tenant, a bounded length that is shared."""

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types.errors import QueueFullError
from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import FairQueue, Waiting
from tests.router.conftest import until
from tests.router.emulated_worker import Script
from tests.soak import examples


def test_a_long_line_that_leaves_together_takes_no_time_for_each_other():
    """Each removal copied the line: 20,000 took 13 s of the event loop."""
    queue = FairQueue()
    entries = [Waiting(0, f"r{number}") for number in range(100_000)]
    for entry in entries:
        queue.push(entry)
    began = time.process_time()
    for entry in entries[1::2] + entries[:-2:2]:
        queue.remove(entry)
    assert queue.head() is queue.newest_of("default") is entries[-2]
    assert queue.pop() is entries[-2]
    assert len(queue) == 0
    assert time.process_time() - began < 5


TENANTS = "abcd"


def place(name, tenant="default", priority=0, weight=1, cost=1.0) -> Waiting:
    return Waiting(priority, str(name), weight, tenant, cost)


def offer(queue: Admission, *places: Waiting) -> list[Waiting | None]:
    return [queue.offer(entry, 0, expected_s=1) for entry in places]


def popped(queue: Admission, window: int = 10**6) -> list[Waiting]:
    popped = []
    while (entry := queue.pop(window)) is not None:
        popped.append(entry)
    return popped


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(-3, 3), max_size=30), st.sets(st.integers(0, 29)))
def test_order_is_priority_then_arrival_and_who_left_does_not_come(priorities, leavers):
    queue = Admission(100)
    offer(queue, *(place(n, priority=priority) for n, priority in enumerate(priorities)))
    for leaver in leavers:
        queue.leave(str(leaver))
        queue.leave(str(leaver))
    expected = sorted((priority, n) for n, priority in enumerate(priorities) if n not in leavers)
    assert queue.waiting == len(expected)
    assert [(entry.priority, int(entry.request_id)) for entry in popped(queue)] == expected


def test_the_window_counts_sequences_and_a_wide_request_runs_alone():
    queue = Admission(10)
    offer(queue, *(place(n, weight=weight) for n, weight in enumerate((3, 2, 50))))
    assert queue.pop(4).request_id == "0"
    assert queue.pop(4) is None
    queue.release(3, 10**9)
    assert queue.pop(4).request_id == "1"
    assert queue.pop(4) is None
    queue.release(2, 2 * 10**9)
    assert queue.pop(4).request_id == "2"
    assert queue.running == 50


def test_retry_after_is_the_time_the_queue_takes_at_its_real_rate():
    queue = Admission(10)
    offer(queue, *map(place, range(10)))
    now_ns = 10 * 10**9
    for number in range(8):  # two ends per second
        queue.running += 1
        queue.release(1, now_ns - (8 - number) * 500_000_000)
    with pytest.raises(QueueFullError) as caught:
        queue.offer(place("x"), now_ns, expected_s=1)
    assert 4 <= caught.value.retry_after_s <= 6
    assert queue.drain_per_s(now_ns + 40 * 10**9) == 0  # long ago says nothing of now


# --- turns ----------------------------------------------------------------------------------------


def test_tenants_take_turns_and_a_tenants_own_order_stays():
    queue = Admission(100)
    offer(queue, *(place(f"a{n}", "a") for n in range(5)), *(place(f"b{n}", "b") for n in range(3)))
    names = [entry.request_id for entry in popped(queue)]
    assert names == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4"]


def test_turns_are_counted_in_tokens():
    queue = Admission(100)
    offer(queue, *(place(f"a{n}", "a", cost=300) for n in range(3)))
    offer(queue, *(place(f"b{n}", "b", cost=100) for n in range(7)))
    assert "".join(entry.tenant for entry in popped(queue)) == "abbbabbbab"


def test_who_comes_back_from_a_pause_has_saved_nothing():
    queue = Admission(100)
    offer(queue, place("b", "b"), *(place(f"a{n}", "a") for n in range(20)))
    for _ in range(11):
        queue.pop(100)
    offer(queue, *(place(f"b{n}", "b") for n in range(5)))
    assert "".join(entry.tenant for entry in popped(queue)) == "bababababa" + "aaaaa"


def test_what_a_prefix_hit_saves_is_given_back():
    queue = Admission(100)
    offer(queue, *(place(f"a{n}", "a", cost=1000) for n in range(4)))
    offer(queue, *(place(f"b{n}", "b", cost=1000) for n in range(4)))
    order = []
    while (entry := queue.pop(100)) is not None:
        order.append(entry.tenant)
        if entry.tenant == "a":
            queue.charge(entry, 10)  # nearly all of it was cached
    assert order == ["a", "b", "a", "a", "a", "b", "b", "b"]


def test_priorities_go_before_turns():
    queue = Admission(100)
    offer(queue, *(place(f"a{n}", "a") for n in range(3)), place("urgent", "a", priority=-1))
    offer(queue, place("b", "b"))
    assert [entry.request_id for entry in popped(queue)] == ["urgent", "a0", "b", "a1", "a2"]


def test_sessions_of_a_tenant_take_turns_and_requests_without_one_are_one_session() -> None:
    queue = Admission(100)
    fork = [Waiting(0, f"fork{n}", session="agent") for n in range(4)]
    offer(queue, *fork, *(Waiting(0, f"plain{n}") for n in range(2)))
    offer(queue, Waiting(0, "chat", session="person"))
    queue.leave("fork1")
    order, overtook = [], []
    while (entry := queue.pop(100)) is not None:
        order.append(entry.request_id)
        overtook.append(queue.overtook)
        if entry.request_id == "chat":
            offer(queue, Waiting(0, "chat again", session="person"))
    assert order == ["fork0", "plain0", "chat", "fork2", "plain1", "chat again", "fork3"]
    assert overtook == [False, True, True, False, True, True, False]


def test_the_tier_of_a_request_is_its_turn_within_its_tenant_alone() -> None:
    queue = Admission(100)
    offer(queue, Waiting(0, "flex", tenant="a", session="s", turn=1))
    offer(queue, *(Waiting(0, f"a{n}", tenant="a", session="s") for n in range(2)))
    offer(queue, Waiting(0, "first", tenant="a", turn=-1), Waiting(0, "gone", tenant="a", turn=-1))
    offer(queue, Waiting(0, "b", tenant="b", turn=1), Waiting(0, "b late", tenant="b", turn=1))
    queue.leave("gone")
    served = [entry.request_id for entry in popped(queue)]
    assert served == ["first", "b", "a0", "b late", "a1", "flex"]


def test_a_full_queue_gives_the_newest_place_away_whatever_its_session() -> None:
    queue = Admission(4)
    places = [Waiting(0, f"a{n}", tenant="a", session=f"s{n % 2}") for n in range(4)]
    offer(queue, *places)
    assert offer(queue, place("b", "b")) == [places[-1]]


class Model:
    """Drives a queue with random arrivals and services, and keeps the books."""

    def __init__(self):
        self.queue = FairQueue()
        self.served = Counter()
        self.waiting = {tenant: [] for tenant in TENANTS}
        self.number = 0

    def arrive(self, tenant, cost):
        self.number += 1
        entry = place(self.number, tenant, cost=cost)
        self.queue.push(entry)
        self.waiting[tenant].append(entry)

    def serve(self):
        entry = self.queue.pop()
        assert self.waiting[entry.tenant].pop(0) is entry, "first come, first served"
        self.served[entry.tenant] += entry.cost_tokens
        return entry


STEPS = st.lists(
    st.one_of(st.tuples(st.sampled_from(TENANTS), st.integers(1, 50)), st.just("serve")),
    max_size=40,
)


@settings(max_examples=examples(60), deadline=None)
@given(STEPS, st.sampled_from(TENANTS), st.integers(1, 50))
def test_a_newcomer_waits_for_one_request_of_each_other_tenant_at_most(steps, newcomer, cost):
    model = Model()
    for step in steps:
        if step != "serve":
            if step[0] != newcomer:
                model.arrive(*step)
        elif len(model.queue):
            model.serve()
    others = sum(bool(model.waiting[tenant]) for tenant in TENANTS)
    model.arrive(newcomer, cost)
    before = []
    while (entry := model.serve()).tenant != newcomer:
        before.append(entry.tenant)
        model.arrive(entry.tenant, 50)  # the others flood on
    assert len(before) <= others
    assert len(set(before)) == len(before)


@settings(max_examples=examples(60), deadline=None)
@given(STEPS, st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=20))
def test_tenants_that_wait_all_the_time_get_equal_tokens(steps, costs):
    """Give or take one request each, whatever happened before and whoever else is there."""
    model = Model()
    for step in steps:
        if step != "serve":
            model.arrive(*step)
        elif len(model.queue):
            model.serve()
    for first, second in [*costs, (1, 1)]:
        model.arrive("a", first)
        model.arrive("b", second)
    model.served.clear()
    while model.waiting["a"] and model.waiting["b"]:
        model.serve()
        assert abs(model.served["a"] - model.served["b"]) <= 100


@settings(max_examples=examples(60), deadline=None)
@given(STEPS, st.data())
def test_nobody_starves_and_no_place_is_idle(steps, data):
    """Work conserving: whoever waits is served while there is room, and each exactly once."""
    queue, names, served = Admission(1000), set(), []
    for number, step in enumerate(steps):
        if step == "serve":
            full = queue.running == 3
            entry = queue.pop(3)
            assert (entry is None) == (full or not names - set(served))
            if entry is not None:
                served.append(entry.request_id)
            elif queue.running:
                queue.release(1, number)
        else:
            offer(queue, place(number, step[0], data.draw(st.integers(0, 1)), cost=step[1]))
            names.add(str(number))
    served += [entry.request_id for entry in popped(queue)]
    assert sorted(served) == sorted(names)
    assert queue.waiting == 0
    assert not queue._levels


# --- weights --------------------------------------------------------------------------------------

WEIGHTS = {"a": 3.0, "b": 1.0}


@pytest.mark.parametrize("costs", [{"a": 100.0, "b": 100.0}, {"a": 900.0, "b": 70.0}])
def test_weights_of_3_and_1_are_served_3_to_1_under_saturation(costs):
    """Both always wait; costs are corrected after placement, as the router does."""
    queue, served, names = Admission(100, lambda tenant: WEIGHTS[tenant]), Counter(), Counter()
    for number in range(20_000):
        for tenant, cost in costs.items():
            while queue._waiting_of[tenant] < 4:
                names[tenant] += 1
                offer(queue, place(f"{tenant}{names[tenant]}", tenant, cost=cost))
        entry = queue.pop(8)
        if entry is None:
            queue.release(1, number, "a" if number % 4 else "b")
            continue
        real = entry.cost_tokens * (0.5 if names["a"] % 2 else 1.1)
        queue.charge(entry, real)
        served[entry.tenant] += real
    assert served["a"] / served["b"] == pytest.approx(3.0, abs=0.1)


def test_a_full_queue_and_the_time_to_wait_are_shared_by_weight():
    queue = Admission(8, lambda tenant: WEIGHTS[tenant])
    offer(queue, *(place(f"b{n}", "b") for n in range(8)))
    for number in range(6):
        assert offer(queue, place(f"a{number}", "a"))[0].tenant == "b"
    with pytest.raises(QueueFullError):
        offer(queue, place("a6", "a"))
    with pytest.raises(QueueFullError):
        offer(queue, place("b8", "b"))
    waits = {name: queue.retry_after_s(name, 0, expected_s=10) for name in "ab"}
    assert waits == {"a": 80, "b": 80}, "six of a and two of b drain in the same time"


def test_the_heavier_tenant_may_run_more_before_it_is_over_its_share():
    queue = Admission(100, lambda tenant: WEIGHTS[tenant])
    offer(queue, *(place(f"{tenant}{n}", tenant) for n in range(8) for tenant in "ab"))
    for _ in range(8):
        queue.pop(8)
    assert (queue._running_of["a"], queue._running_of["b"]) == (6, 2)
    assert not queue.is_over_share("a") and not queue.is_over_share("b")
    queue.pop(9)
    queue.release(1, 1, "b")
    assert queue.is_over_share("a") and not queue.is_over_share("b")


# --- a full queue ---------------------------------------------------------------------------------


def test_a_flood_fills_the_queue_for_its_own_tenant_only():
    queue = Admission(6)
    offer(queue, *(place(f"a{n}", "a") for n in range(6)))
    with pytest.raises(QueueFullError, match="6 of this tenant"):
        offer(queue, place("a6", "a"))
    assert [loser.request_id for loser in offer(queue, place("b0", "b"), place("b1", "b"))] == [
        "a5",
        "a4",
    ]
    assert offer(queue, place("b2", "b"))[0].request_id == "a3"
    with pytest.raises(QueueFullError):  # three each: who has most is not pushed out by its equal
        offer(queue, place("b3", "b"))
    with pytest.raises(QueueFullError):
        offer(queue, place("a9", "a"))
    assert queue.waiting == 6
    assert offer(queue, place("c0", "c"))[0].request_id in ("a2", "b2")


def test_who_is_pushed_out_is_the_least_urgent_newest():
    queue = Admission(4)
    offer(queue, *(place(f"a{n}", "a", priority) for n, priority in enumerate((0, 5, -5, 5))))
    assert offer(queue, place("b", "b"))[0].request_id == "a3"


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.booleans()), max_size=60))
def test_the_queue_is_never_longer_than_its_limit_and_shares_are_kept(steps):
    queue, held = Admission(8), Counter()
    for number, (tenant, leaves) in enumerate(steps):
        if leaves and (entry := queue.pop(10**6)) is not None:
            held[entry.tenant] -= 1
            continue
        most = max(held.values(), default=0)
        try:
            [loser] = offer(queue, place(number, tenant))
        except QueueFullError as error:
            assert held[tenant] + 1 >= most, "a tenant below its share was refused"
            assert error.retry_after_s >= 1
        else:
            held[tenant] += 1
            if loser is not None:
                held[loser.tenant] -= 1
        assert queue.waiting == sum(held.values()) <= 8


def test_the_flooder_is_told_to_wait_longer_than_it_would_alone():
    alone, shared = Admission(8), Admission(8)
    offer(alone, *(place(f"a{n}", "a") for n in range(4)))
    offer(shared, *(place(f"a{n}", "a") for n in range(4)), *(place(n, "b") for n in range(4)))
    wait = [queue.retry_after_s("a", 0, expected_s=10) for queue in (alone, shared)]
    assert wait == [40, 80]


# --- over HTTP ------------------------------------------------------------------------------------


def ask(fleet, tenant: str, **body) -> asyncio.Task:
    return asyncio.create_task(fleet.chat(headers={"x-baton-tenant": tenant}, **body))


async def test_a_flood_delays_another_tenant_by_one_turn_and_tickets_keep_the_order(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.005)}, window_requests=1)
    queue = fleet.lane.gateway.admission
    flood = [ask(fleet, "flood") for _ in range(8)]
    await until(lambda: queue.waiting == 7)
    calm = [ask(fleet, "calm") for _ in range(2)]
    await until(lambda: queue.waiting >= 8)
    responses = await asyncio.gather(*flood, *calm)
    assert {response.status_code for response in responses} == {200}
    served = fleet.workers["decode-0"].submissions
    order = [submission.tenant for submission in served]
    first = order.index("calm")
    assert order[first : first + 3].count("calm") == 2, order
    assert first <= 3
    assert [s.ticket for s in served] == sorted(s.ticket for s in served)


async def test_a_flood_is_refused_and_others_are_not(make_fleet):
    fleet = await make_fleet(
        {"decode-0": Script(step_s=0.02)}, window_requests=1, max_queued_requests=4
    )
    flood = [ask(fleet, "flood") for _ in range(10)]
    await until(lambda: fleet.lane.gateway.admission.waiting == 4)
    calm = [ask(fleet, "calm"), ask(fleet, "third")]
    assert [response.status_code for response in await asyncio.gather(*calm)] == [200, 200]
    responses = await asyncio.gather(*flood)
    assert sorted(r.status_code for r in responses) == [200] * 3 + [429] * 7
    for refused in responses:
        if refused.status_code == 429:
            assert int(refused.headers["retry-after"]) >= 1
            assert "of this tenant" in refused.json()["error"]["message"]
    await until(lambda: fleet.lane.gateway.in_flight == 0)
    assert fleet.lane.gateway.admission.running == 0
