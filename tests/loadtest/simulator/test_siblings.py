"""A fork of agents on a simulated fleet: one prefix is computed once, and others do not wait."""

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from baton.engine.emulated_timing import H100_70B
from loadtest.simulator.attempt import DETECT_NS
from loadtest.simulator.setup import Setup
from loadtest.simulator.simulation import Simulation
from loadtest.workloads.traces import TraceRequest
from router.routing.placement.computing_prompts import ComputingPrompts

PREFIX, OWN, SIBLINGS = 20_000, 128, 43
SETUP = Setup(
    prefill_workers=4,
    decode_workers=4,
    mode="auto",
    block_tokens=16,
    max_step_tokens=512,
    spread_s=0.0,
)


def fork(begin_s: float) -> list[TraceRequest]:
    """Siblings that arrive within 50 ms."""
    shared = [f"shared/{block}" for block in range(PREFIX // 16)]
    return [
        TraceRequest(
            begin_s + number * 0.05 / SIBLINGS,
            PREFIX + OWN,
            32,
            (*shared, *(f"{number}/{block}" for block in range(OWN // 16))),
        )
        for number in range(SIBLINGS)
    ]


def others(count: int, tokens: int = 400) -> list[TraceRequest]:
    """Requests without a common prefix, four a second."""
    return [TraceRequest(number / 4 + 1 / 64, tokens, 32, ()) for number in range(count)]


def run(trace, kill=None, setup=SETUP) -> Simulation:
    """Run a trace; ``kill`` is a time in seconds at which the worker with most prompts dies."""
    simulation = Simulation(setup, sorted(trace, key=lambda request: request.arrival_s))

    def die() -> None:
        lives = {life.worker_id: life for life in simulation.lives}
        busiest = max(lives.values(), key=lambda life: life.status().queued_prompt_tokens)
        busiest.die()
        simulation.clock.after(DETECT_NS, partial(simulation.router.on_dead, busiest))

    if kill is not None:
        simulation.clock.at(round(kill * 1e9), die)
    simulation.run()
    return simulation


def of_fork(simulation: Simulation):
    return [record for record in simulation.records if record.prompt_tokens == PREFIX + OWN]


def first_s(record) -> float:
    return (record.first_ns - record.request.arrived_ns) / 1e9


def cached_share(records) -> float:
    """Return the cached share of the prefix of all but the first."""
    shares = sorted(min(record.cached_tokens / PREFIX, 1.0) for record in records)
    return sum(shares[1:]) / (len(shares) - 1)


def test_a_fork_computes_its_prefix_once():
    alone = first_s(run(fork(0.0)[:1]).records[0])
    simulation = run([*fork(2.0), *others(48)])
    records = of_fork(simulation)
    assert not any(record.error for record in simulation.records)
    # No link was measured yet, so one sibling computes the prefix where it would be pulled.
    assert sum(record.cached_tokens < PREFIX / 2 for record in records) <= 2
    assert cached_share(records) >= 0.97
    assert sorted(map(first_s, records))[int(0.9 * SIBLINGS)] <= 1.5 * alone
    rest = [record for record in simulation.records if record not in records]
    before = run(others(48)).records
    assert max(map(first_s, rest)) <= max(map(first_s, before)) + 0.3


@pytest.mark.parametrize("step_tokens", [1700, 8192])
def test_siblings_pull_the_whole_prefix(step_tokens):
    """The first token comes before the events of its step, whose blocks all computed again."""
    timing = msgspec.structs.replace(H100_70B, kv_bytes_per_token=18_432)
    setup = replace(SETUP, max_step_tokens=step_tokens, timing=timing)
    siblings = fork(0.0)
    trace = [siblings[number]._replace(arrival_s=number / 5) for number in range(10)]
    first, *others = run(trace, setup=setup).records
    assert first.cached_tokens == 0
    assert [record.cached_tokens for record in others] == [PREFIX] * 9
    assert len({record.computed_on for record in others}) > 4


@pytest.mark.parametrize("kill", [3.0, 5.9])
def test_the_death_of_the_worker_costs_no_request(kill):
    """While it computes, or when the siblings have just been placed."""
    simulation = run(fork(2.0), kill=kill)
    records = of_fork(simulation)
    assert simulation.router.deaths == 1
    assert all(record.ends == 1 and not record.error for record in records)
    assert cached_share(records) >= (0.97 if kill < 5 else 0.8)


def test_requests_without_a_common_prefix_are_placed_as_if_nothing_were_recorded(monkeypatch):
    def placements():
        trace = [*others(60), *others(60, tokens=3000)]
        records = run(trace).records
        return [(record.prefill_id, record.decode_id, record.first_ns) for record in records]

    recorded = placements()
    monkeypatch.setattr(ComputingPrompts, "begin", lambda *_: False)
    assert placements() == recorded
