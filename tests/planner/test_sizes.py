"""The planner's sizes: a pure machine, looked at every two seconds."""

import re
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.planner.planner import Planner
from baton.planner.sizes import SizePlanner
from baton.planner.state import Figures, Resize
from baton.registry.types import PromptSum, WorkDemand
from baton.types.slo import Slo
from tests.soak import examples

SECOND_NS = 1_000_000_000
LOOK_NS = 2 * SECOND_NS
TTFT_S = 10.0


def load(prefill: float = 0.0, decode: float = 0.0, wait_s: float = 0.0) -> Figures:
    """Figures of a load that needs so many workers of each role."""
    return Figures(
        prefill=1,
        decode=1,
        requests=100.0,
        requests_per_s=5.0,
        prompt_s=0.1,
        miss_share=1.0,
        output_tokens=100.0,
        prefill_need=prefill,
        decode_need=decode,
        prefill_wait_s=wait_s,
        decode_now=0.0,
    )


def demand(waiting: int = 0, arrived: int = 0, streams: int = 0) -> dict[str, WorkDemand]:
    work = WorkDemand(
        arrived=PromptSum(arrived, arrived * 100, 0),
        waiting=PromptSum(waiting, waiting * 100, 0),
        streams=streams,
    )
    return {"router": work}


@dataclass
class World:
    """A fleet that has each size as soon as it is wanted."""

    least: int = 1
    most: int = 16
    sizes: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    first: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    now_ns: int = SECOND_NS
    changes: list[tuple[float, str]] = field(default_factory=list)
    said: str = ""

    def __post_init__(self) -> None:
        self.planner = SizePlanner(self.least, self.most, self.first, TTFT_S)

    def look(self, figures: Figures | None, demands: dict | None = None, *, light: bool = False):
        demands = demand(streams=1) if demands is None else demands
        self.planner.observe(demands, self.now_ns)
        found = self.planner.decide(self.sizes, figures, demands, self.now_ns, light=light)
        if isinstance(found, Resize):
            self.sizes = dict(found.sizes)
            self.changes.append((self.now_ns / 1e9, f"{self.shown}: {found.reason}"))
        self.said = found.reason if isinstance(found, Resize) else found
        self.now_ns += LOOK_NS

    def for_s(self, seconds: float, figures: Figures | None, **more) -> None:
        for _ in range(round(seconds * 1e9 / LOOK_NS)):
            self.look(figures, **more)

    @property
    def shown(self) -> str:
        return f"{self.sizes['prefill']} + {self.sizes['decode']}"

    @property
    def times_s(self) -> list[float]:
        return [at_s for at_s, _ in self.changes]


def test_the_fuller_role_grows_by_one_worker_a_minute() -> None:
    world = World()
    world.for_s(200, load(prefill=0.5, decode=3.2))
    assert world.shown == "1 + 4", "each is below 0.9 of its limit"
    assert all(later - earlier >= 60 for earlier, later in pairwise(world.times_s))


def test_a_fleet_grows_by_a_quarter_while_prompts_wait_longer_than_the_limit() -> None:
    world = World(sizes={"prefill": 6, "decode": 2})
    world.look(load(prefill=12.0, decode=1.0, wait_s=25.0))
    assert world.shown == "8 + 2"


def test_the_role_that_lacks_workers_gets_them_also_while_prompts_wait() -> None:
    """Prompts wait for places in decode, too."""
    world = World(sizes={"prefill": 8, "decode": 1})
    world.look(load(prefill=6.0, decode=1.5, wait_s=25.0))
    assert world.shown == "10 + 2"


def test_a_load_beyond_the_largest_size_is_said() -> None:
    world = World(most=4)
    world.for_s(400, load(prefill=3.0, decode=3.0))
    assert sum(world.sizes.values()) == 4
    assert world.said == "the load needs 3.00 + 3.00 workers, but at most 4 workers are allowed"


def test_workers_leave_after_ten_minutes_of_low_load_one_a_minute() -> None:
    world = World(sizes={"prefill": 4, "decode": 4})
    world.for_s(590, load(prefill=1.0, decode=1.0))
    assert world.shown == "4 + 4"
    world.for_s(1200, load(prefill=1.0, decode=1.0))
    assert world.shown == "2 + 2", "one worker of each would be full"
    assert all(later - earlier >= 60 for earlier, later in pairwise(world.times_s))


def test_what_counts_for_scale_in_is_the_mean_of_ten_minutes() -> None:
    world = World(sizes={"prefill": 4, "decode": 4})
    world.for_s(590, load(prefill=1.0, decode=1.0))
    world.look(load(prefill=3.5, decode=3.5))
    world.for_s(20, load(prefill=1.0, decode=1.0))
    assert sum(world.sizes.values()) == 7, "a short peak keeps no worker"
    world = World(sizes={"prefill": 4, "decode": 4})
    for _ in range(20):
        world.for_s(30, load(prefill=1.0, decode=1.0))
        world.for_s(30, load(prefill=3.5, decode=3.5))
    assert world.shown == "4 + 4"


def test_a_fleet_that_has_grown_keeps_its_workers_for_ten_minutes() -> None:
    world = World(sizes={"prefill": 4, "decode": 4})
    world.for_s(500, load(prefill=1.0, decode=1.0))
    world.look(load(prefill=3.9, decode=3.0))
    assert world.shown == "5 + 4"
    world.for_s(596, load(prefill=1.0, decode=1.0))
    assert world.shown == "5 + 4"
    world.for_s(10, load(prefill=1.0, decode=1.0))
    assert sum(world.sizes.values()) == 8


def test_a_few_long_prompts_do_not_make_it_grow_but_many_that_wait_do() -> None:
    few = msgspec.structs.replace(load(prefill=2.0, decode=0.1, wait_s=13.0), requests=10.0)
    world = World(sizes={"prefill": 4, "decode": 1})
    world.for_s(20, few)
    assert world.shown == "4 + 1", "13 s of work are done in 23 s beside a load of 0.43"
    many = msgspec.structs.replace(few, prefill_need=4.0)
    world.for_s(28, many)
    assert world.shown == "4 + 1", "a worker would start too late for a short burst"
    world.for_s(4, many)
    assert world.shown == "6 + 1"


def test_an_unknown_load_keeps_all_workers_and_a_light_one_does_not() -> None:
    world = World(sizes={"prefill": 4, "decode": 4})
    world.for_s(1000, None)
    assert world.shown == "4 + 4", "no worker has measured its steps yet"
    world.for_s(1000, None, light=True)
    assert world.shown == "0 + 1", "the last worker computes prompts, too"


def test_a_fleet_that_may_be_empty_ends_after_ten_minutes_without_a_request() -> None:
    world = World(least=0)
    world.look(load(), demand(arrived=5, streams=2))
    world.for_s(598, None, demands=demand(arrived=5))
    assert sum(world.sizes.values()) > 0
    world.for_s(4, None, demands=demand(arrived=5))
    assert world.shown == "0 + 0"
    world.for_s(100, None, demands=demand(arrived=5))
    assert world.shown == "0 + 0"


def test_it_starts_again_at_once_with_the_sizes_of_the_file() -> None:
    world = World(least=0, sizes={"prefill": 0, "decode": 0})
    world.look(None, demand())
    assert world.shown == "0 + 0"
    world.look(None, demand(waiting=3))
    assert world.shown == "1 + 1"
    assert world.said == "3 requests wait for a first worker"


@pytest.mark.parametrize(
    ("first", "most", "sizes"), [((0, 0), 4, "0 + 1"), ((2, 2), 3, "0 + 1"), ((0, 3), 3, "0 + 3")]
)
def test_what_starts_from_zero_can_serve_and_is_allowed(
    first: tuple[int, int], most: int, sizes: str
) -> None:
    none = {"prefill": 0, "decode": 0}
    start = {"prefill": first[0], "decode": first[1]}
    world = World(least=0, most=most, sizes=none, first=start)
    world.look(None, demand(waiting=1))
    assert world.shown == sizes


def test_a_fleet_of_one_worker_becomes_a_pair() -> None:
    world = World(sizes={"prefill": 0, "decode": 1})
    world.look(load(prefill=0.5, decode=0.6))
    assert world.shown == "1 + 1"


def test_a_colocated_fleet_stays_colocated() -> None:
    only = {"prefill": 0, "decode": 1}
    world = World(sizes=dict(only), first=only)
    world.for_s(300, load(prefill=1.5, decode=1.0))
    assert world.shown == "0 + 3"


def test_sizes_outside_of_the_bounds_are_mended_first() -> None:
    world = World(least=4, most=6)
    world.look(None)
    assert world.shown == "2 + 2"
    world = World(least=1, most=2, sizes={"prefill": 2, "decode": 2})
    world.look(load(prefill=1.9, decode=0.2))
    assert world.shown == "2 + 1"


def test_turns_go_before_sizes() -> None:
    """The whole planner decides on a size only if no turn is due."""
    planner = Planner(Slo(ttft_s=TTFT_S, itl_s=0.05), SizePlanner(0, 4, {}, TTFT_S))
    planner.observe(demand(waiting=2), [], SECOND_NS)
    decision = planner.decide(SECOND_NS, {"prefill": 0, "decode": 0})
    assert isinstance(decision, Resize)
    assert decision.sizes == {"prefill": 0, "decode": 1}
    assert not isinstance(planner.decide(SECOND_NS), Resize), "without sizes there are only turns"


_NEEDS = st.floats(0.0, 20.0)
_LOOKS = st.lists(
    st.tuples(
        st.none() | st.builds(load, prefill=_NEEDS, decode=_NEEDS, wait_s=st.floats(0.0, 30.0)),
        st.builds(
            demand,
            waiting=st.integers(0, 2),
            arrived=st.integers(0, 5),
            streams=st.integers(0, 1),
        ),
        st.booleans(),
        st.integers(1, 400),  # looks in a row
    ),
    max_size=12,
)


@settings(max_examples=examples(100), deadline=None)
@given(looks=_LOOKS, least=st.integers(0, 3), more=st.integers(0, 6), first=st.integers(0, 2))
def test_in_any_history_sizes_stay_within_bounds_and_can_serve(
    looks: list, least: int, more: int, first: int
) -> None:
    most = max(least + more, 1)
    start = {"prefill": min(first, most - 1), "decode": 1}
    world = World(least=least, most=most, sizes=dict(start), first=start)
    for figures, demands, light, times in looks:
        for _ in range(times):
            before = dict(world.sizes)
            world.look(figures, demands, light=light)
            total, was = sum(world.sizes.values()), sum(before.values())
            assert total <= most
            assert total >= min(least, was)
            assert not total or world.sizes["decode"] >= 1, "prefill workers alone serve nobody"
            assert min(world.sizes.values()) >= 0
            if total < was:
                assert not any(one.waiting.count for one in demands.values()) or figures
    steady = [
        at_s for at_s, text in world.changes if not re.search("wait for a first|no request", text)
    ]
    if world.least <= sum(start.values()):
        assert all(later - earlier >= 60 for earlier, later in pairwise(steady))
