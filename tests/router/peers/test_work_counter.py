"""The work that clients bring to a router: counted once, whatever becomes of it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.registry.redis_store import Registry
from baton.registry.router_demands import RouterDemand, RouterDemands
from baton.registry.types import PromptSum, WorkDemand
from baton.types.geometry import context_tokens
from router.routing.peers.work_counter import WorkCounter
from router.sources import LaneTables

NOTHING = PromptSum()


def test_a_request_is_counted_where_it_is():
    counter = WorkCounter()
    counter.arrived("a", 1000)
    whole = PromptSum(1, 1000, context_tokens(0, 1000))
    assert counter.demand() == WorkDemand(arrived=whole, waiting=whole)
    counter.placed("a", 400)
    rest = PromptSum(1, 400, context_tokens(600, 1000))
    placed = {"arrived": whole, "placed": whole, "uncached": rest}
    assert counter.demand() == WorkDemand(**placed, computing=rest)
    counter.generated("a", 1)
    counter.generated("a", 9)
    assert counter.demand() == WorkDemand(**placed, output_tokens=10, streams=1, stream_tokens=1010)
    counter.ended("a", served=True)
    assert counter.demand() == WorkDemand(**placed, responses=1, output_tokens=10)


def test_a_request_that_is_refused_arrived():
    counter = WorkCounter()
    counter.arrived("a", 1000)
    counter.ended("a", served=False)
    found = counter.demand()
    assert (found.arrived.count, found.waiting, found.responses) == (1, NOTHING, 0)


def test_choices_are_streams_and_a_second_placement_is_not_more_demand():
    counter = WorkCounter()
    counter.arrived("a", 100, choices=3)
    counter.placed("a", 100)
    counter.placed("a", 40)  # its worker died
    found = counter.demand()
    assert (found.placed.count, found.uncached.tokens, found.computing.tokens) == (1, 100, 40)
    counter.generated("a", 3)
    assert (counter.demand().streams, counter.demand().stream_tokens) == (3, 303)
    counter.placed("a", 110)  # its response goes on elsewhere
    assert counter.demand().computing == NOTHING


calls = st.tuples(
    st.sampled_from(["arrived", "placed", "generated", "ended"]), st.integers(0, 5), st.booleans()
)


@given(st.lists(calls, max_size=60))
def test_when_all_have_ended_nothing_waits_or_runs(sequence):
    counter = WorkCounter()
    known, arrived = set(), 0
    for verb, number, flag in sequence:
        name = str(number)
        if verb == "arrived" and name not in known:
            counter.arrived(name, 10 + number, 1 + flag)
            known.add(name)
            arrived += 1
        elif verb == "placed":
            counter.placed(name, 1 + number)
        elif verb == "generated":
            counter.generated(name, 1 + flag)
        elif verb == "ended":
            counter.ended(name, served=flag)
            known.discard(name)
        now = counter.demand()
        assert now.waiting.count + now.computing.count <= len(known)
        assert min(now.waiting.tokens, now.computing.tokens, now.streams, now.stream_tokens) >= 0
        assert now.responses <= now.arrived.count == arrived
    for name in known:
        counter.ended(name, served=True)
    left = counter.demand()
    assert left.waiting == left.computing == NOTHING
    assert left.streams == left.stream_tokens == 0


@pytest.mark.timeout(60)
async def test_a_router_reports_the_work_of_its_clients(make_fleet, redis_server):
    registry = Registry(redis_server.url, "work")
    fleet = await make_fleet({"decode-0": None}, tables=LaneTables.of(registry))
    answer = await fleet.chat(max_tokens=8)
    usage = answer.json()["usage"]
    other = Registry(redis_server.url, "work")
    demands = RouterDemands(other)
    found: list[WorkDemand] = []
    for _ in range(100):
        told = await demands.exchange("test", RouterDemand(beat=1))
        found = [demand.work for demand in told.values()]
        if found and found[0].responses:
            break
        await asyncio.sleep(0.05)
    await registry.close()
    await other.close()
    (work,) = found
    assert work.arrived.count == work.placed.count == work.responses == 1
    assert work.arrived.tokens == usage["prompt_tokens"]
    assert work.uncached.tokens <= work.arrived.tokens
    assert work.output_tokens == usage["completion_tokens"]
    assert work.waiting == work.computing == NOTHING
