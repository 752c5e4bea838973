"""The planner of roles: a pure machine, in a world of a few sums."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.planner.planner import Planner
from baton.planner.state import Nothing, RoleChange, WorkerState
from baton.registry.types import PromptSum, WorkDemand
from baton.types.geometry import context_tokens
from baton.types.slo import Slo
from baton.types.step_lines import DecodeLine, PromptLine
from tests.soak import examples

SECOND_NS = 1_000_000_000
LOOK_NS = 2 * SECOND_NS
LIMITS = Slo(ttft_s=10.0, itl_s=0.05)
PROMPT_LINE = PromptLine(token_s=1e-4)
DECODE_LINE = DecodeLine(step_s=0.0125, row_s=1e-3)  # 30 rows within 0.85 of the limit
FLOW = 30 / 0.0425  # tokens per second of a decode worker, within 0.85 of the limit


def workers(prefill: int, decode: int, **more) -> list[WorkerState]:
    roles = ["prefill"] * prefill + ["decode"] * decode
    more = {"steps": 1000, "prompt_line": PROMPT_LINE, "decode_line": DECODE_LINE} | more
    return [WorkerState(worker_id=f"worker-{n}", role=role, **more) for n, role in enumerate(roles)]


@dataclass
class World:
    """Sums of one router, and a fleet whose turns are seen at the next look."""

    fleet: list[WorkerState]
    planner: Planner = field(default_factory=lambda: Planner(LIMITS))
    demand: WorkDemand = field(default_factory=WorkDemand)
    now_ns: int = SECOND_NS
    decisions: list = field(default_factory=list)

    def look(self, prefill: float = 0.0, decode: float = 0.0, **now):
        """Two seconds with a load of so many busy prefill workers and full decode workers.

        There are ten requests per second, of prompts that take ``prefill`` / 10 seconds.
        """
        before, count = self.demand, 20 if prefill else 0
        length = round(prefill / 10 / PROMPT_LINE.token_s)
        told = {"responses": count, "output_tokens": round(decode * FLOW * 2)} | now
        prompts = PromptSum(count, count * length, count * context_tokens(0, length))
        self.demand = WorkDemand(
            arrived=add(before.arrived, prompts),
            placed=add(before.placed, prompts),
            uncached=add(before.uncached, prompts),
            responses=before.responses + told.pop("responses"),
            output_tokens=before.output_tokens + told.pop("output_tokens"),
            **told,
        )
        self.planner.observe({"router": self.demand}, self.fleet, self.now_ns)
        decision = self.planner.decide(self.now_ns)
        self.decisions.append(decision)
        if isinstance(decision, RoleChange):
            self.change_role(decision)
        self.now_ns += LOOK_NS
        return decision

    def change_role(self, decision: RoleChange) -> None:
        self.fleet = [
            WorkerState(**{**fields(one), "role": decision.role})
            if one.worker_id == decision.worker_id
            else one
            for one in self.fleet
        ]

    def looks(self, count: int, *load, **now) -> list:
        return [self.look(*load, **now) for _ in range(count)]

    @property
    def split(self) -> tuple[int, int]:
        prefill = sum(one.role == "prefill" for one in self.fleet)
        return prefill, len(self.fleet) - prefill

    @property
    def turns(self) -> list[RoleChange]:
        return [one for one in self.decisions if isinstance(one, RoleChange)]


def add(one: PromptSum, other: PromptSum) -> PromptSum:
    return PromptSum(
        one.count + other.count, one.tokens + other.tokens, one.context + other.context
    )


def fields(worker: WorkerState) -> dict:
    return {name: getattr(worker, name) for name in worker.__struct_fields__}


@pytest.mark.parametrize("start", [1, 3, 4, 7])
def test_from_any_split_it_comes_to_one_that_holds_and_stays(start):
    world = World(workers(start, 8 - start))
    world.looks(20, 4.6, 1.2)
    assert world.split == (6, 2)
    turns = len(world.turns)
    assert turns == abs(6 - start)
    assert all(turn.figures.prefill_need > 0 and turn.reason for turn in world.turns)
    world.looks(100, 4.6, 1.2)
    assert len(world.turns) == turns, "a steady load turns nothing"


def test_a_large_fleet_turns_as_a_small_one_does():
    """One worker of 64 changes little, and the best split is far away."""
    world = World(workers(32, 32))
    world.looks(60, 36.0, 9.0)
    prefill, _ = world.split
    assert 45 <= prefill <= 52
    turns = len(world.turns)
    world.looks(60, 36.0, 9.0)
    assert len(world.turns) == turns


def test_a_split_that_holds_is_left_although_another_would_be_better():
    world = World(workers(4, 4))
    world.looks(30, 2.5, 1.2)
    assert not world.turns
    assert "holds the load" in world.decisions[-1].reason


def test_a_turn_needs_looks_that_agree_and_is_seen_before_the_next():
    world = World(workers(3, 5))
    found = world.looks(5, 4.6, 1.2)
    kinds = [type(one) for one in found]
    assert kinds[0] is Nothing, "the first look has no sums to compare with"
    assert kinds[1:] == [Nothing, Nothing, Nothing, RoleChange]
    assert found[1].reason.startswith("one more look")
    world = World(workers(3, 5))
    world.change_role = lambda decision: None  # no router places by the new role
    found = world.looks(6, 4.6, 1.2)
    assert isinstance(found[4], RoleChange)
    assert found[5] == Nothing(reason="a turn is pending")
    world = World(workers(3, 5))
    found = world.looks(2, 4.6, 1.2, **waiting(3 * 8.0))
    assert isinstance(found[1], RoleChange), "prompts wait so long that one look is enough"


def test_responses_are_known_to_be_long_before_the_first_of_them_ends():
    """Tokens come as before, and hardly a response ends: they are ten times as long."""
    world = World(workers(6, 2))
    world.looks(20, 2.0, 1.2)
    assert not world.turns
    found = world.looks(30, 2.0, 1.7, responses=3)
    assert world.split[1] > 2
    assert found[-1].figures.output_tokens > 3 * world.decisions[19].figures.output_tokens


def test_no_split_holds_twice_the_load_but_the_best_is_taken():
    world = World(workers(3, 5))
    world.looks(30, 9.2, 2.4)
    assert world.split == (6, 2)
    assert "no split of 8 workers holds the load" in world.decisions[-1].reason
    assert world.decisions[-1].figures.prefill_need > 9


def waiting(seconds: float) -> dict:
    return {"computing": PromptSum(50, round(seconds / PROMPT_LINE.token_s), 0)}


def test_prompts_that_wait_keep_their_workers_and_alarm():
    world = World(workers(4, 4))
    world.looks(10, 2.2, 3.7, **waiting(4 * 3.0))
    assert world.split == (4, 4), "decode misses, but prefill has a queue"
    world = World(workers(5, 3))
    world.looks(10, 3.6, 1.0, **waiting(5 * 6.0))
    assert world.split == (6, 2), "arrivals alone would turn nothing"


def test_prompts_that_wait_for_decode_do_not_keep_their_workers():
    """Under a load that no split holds they always wait, at the gate."""
    world = World(workers(3, 1))
    world.looks(12, 3.0, 3.0, **waiting(4 * 5.0))
    assert world.split == (2, 2)
    assert [turn.role for turn in world.turns] == ["decode"]


def test_an_alarm_makes_no_second_turn_before_the_first_has_had_an_effect():
    world = World(workers(1, 5))
    found = world.looks(4, 3.5, 0.8, **waiting(12.0))
    assert [type(one) for one in found] == [Nothing, RoleChange, Nothing, Nothing]
    assert found[2].reason.startswith("the last turn has had no effect yet")
    large = World(workers(8, 24))
    found = large.looks(4, 20.0, 6.0, **waiting(8 * 8.0))
    assert sum(isinstance(one, RoleChange) for one in found) == 3, "up to four at a time"


def test_a_decode_worker_with_a_small_batch_is_as_fast_as_its_steps():
    """Full batches of ten take 22.5 ms, not the limit."""
    needs = []
    for max_streams in (1000, 10):
        world = World(workers(2, 2, max_streams=max_streams))
        world.looks(10, 1.0, 1.0)
        needs.append(world.decisions[-1].figures.decode_need)
    assert needs[1] / needs[0] == pytest.approx(FLOW / (10 / 0.0225), rel=0.01)


def test_streams_keep_their_workers_and_alarm():
    world = World(workers(5, 3))
    world.looks(10, 4.6, 1.2, streams=75)  # 2.5 workers' worth
    assert world.split == (5, 3), "prefill misses, but two decode workers would be too few"
    world = World(workers(5, 3))
    world.looks(10, 3.0, 2.5, streams=96)
    assert world.split == (4, 4), "arrivals alone would turn nothing"


def test_a_backlog_does_not_come_to_too_few_decode_workers():
    """What waits comes to the decode workers as fast as prefill computes it."""
    world = World(workers(6, 2))
    world.looks(20, 4.8, 0.65, **waiting(6 * 12.0))
    assert world.split == (6, 2), "one decode worker holds what arrives, not what waits, too"
    world = World(workers(6, 2))
    world.looks(20, 4.8, 0.65)
    assert world.split == (7, 1)


def test_idle_fleets_are_left_alone_and_forget():
    world = World(workers(3, 5))
    world.looks(20)
    assert not world.turns
    assert "too little load" in world.decisions[-1].reason
    world.looks(10, 4.6, 1.2)
    turns = len(world.turns)
    found = world.looks(100)
    assert len(world.turns) == turns
    assert found[-1].figures is None, "what was long ago is forgotten"


def test_lines_of_a_few_steps_are_not_used():
    world = World(workers(3, 5, steps=1))
    world.looks(5, 4.6, 1.2)
    assert "measured" in world.decisions[-1].reason
    fresh = workers(3, 5)
    fresh[0] = WorkerState(
        **{**fields(fresh[0]), "steps": 2, "prompt_line": PromptLine(token_s=1.0)}
    )
    world = World(fresh)
    world.looks(3, 2.0, 1.2)
    assert world.decisions[-1].figures.prefill_need == pytest.approx(2.0 / 0.85, rel=0.02)


def test_a_limit_below_one_step_is_told():
    world = World(workers(3, 5), Planner(Slo(ttft_s=1.0, itl_s=0.01)))
    world.looks(3, 4.6, 1.2)
    assert "a decode step takes 0.0125 s without any stream" in world.decisions[-1].reason


def test_a_router_that_starts_anew_counts_from_then_on():
    world = World(workers(6, 2))
    world.looks(10, 4.0, 1.2)
    before = world.decisions[-1].figures
    world.demand = WorkDemand()
    world.looks(10, 4.0, 1.2)
    after = world.decisions[-1].figures
    assert after.prefill_need == pytest.approx(before.prefill_need, rel=0.1)
    assert after.requests_per_s > 0


steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 4.0, 9.0]),
        st.sampled_from([0.2, 1.5, 4.0]),
        st.integers(0, 300),
        st.sampled_from([0.0, 20.0, 200.0]),
        st.booleans(),
        st.integers(1, 9),
    ),
    max_size=40,
)


def walk(prefill: int, decode: int, days) -> list[tuple[int, object, list[WorkerState]]]:
    world = World(workers(prefill, decode))
    change, seen = world.change_role, []
    for prefill_load, decode_load, streams, wait_s, visible, repeats in days:
        world.change_role = change if visible else lambda decision: None
        for _ in range(repeats):
            fleet, now_ns = world.fleet, world.now_ns
            now = waiting(wait_s) | {"streams": streams}
            seen.append((now_ns, world.look(prefill_load, decode_load, **now), fleet))
    return seen


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), steps)
def test_turns_keep_the_rules_for_any_load(prefill, decode, days):
    seen = walk(prefill, decode, days)
    turns = [(now_ns, one, fleet) for now_ns, one, fleet in seen if isinstance(one, RoleChange)]
    for _, turn, fleet in turns:
        given_up = [one for one in fleet if one.role != turn.role]
        assert len(given_up) > 1, "a role keeps a worker"
        assert turn.worker_id in {one.worker_id for one in given_up}
        assert turn.figures.requests_per_s > 0, "no load, no turn"
    for (before_ns, before, _), (now_ns, _, fleet) in pairwise(turns):
        roles = {one.worker_id: one.role for one in fleet}
        done = roles[before.worker_id] == before.role
        assert done or now_ns - before_ns >= 10 * SECOND_NS, "one turn at a time"
    for now_ns, turn, _ in turns:
        within = [
            at_ns
            for at_ns, one, _ in turns
            if one.worker_id == turn.worker_id and 0 <= now_ns - at_ns < 60 * SECOND_NS
        ]
        assert len(within) <= 2, "two turns of a worker within a minute"
    assert walk(prefill, decode, days) == seen, "the same load gives the same decisions"
