"""The simulator: virtual time, the same result for the same seed, and every request one end."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.engine.emulated_timing import EPYC_135M
from baton.planner.state import Resize
from baton.types.slo import Slo as RequestSlo
from fleet.cli.main import app
from loadtest.simulator.network import CONTROL_NS, LINKS, Network, VirtualClock
from loadtest.simulator.policies import FLEET
from loadtest.simulator.report import Goodput, SimulationSlo, as_json, bound_share, figures, goodput
from loadtest.simulator.setup import Setup
from loadtest.simulator.simulation import Simulation
from loadtest.simulator.worker import SimulatedWorker
from loadtest.workloads.agent_traces import agent_calls
from loadtest.workloads.call_graph import trace_requests
from loadtest.workloads.shifting import days
from loadtest.workloads.traces import TraceRequest, read_trace
from router.routing.placement.placer import Placer
from router.routing.placement.prefix_sources import Source
from tests.loadtest.workloads.agent_files import SPANS, written
from tests.soak import examples

SAMPLE = Path(__file__).parents[2] / "router" / "placement" / "conversation_sample.jsonl"
SMALL = Setup(prefill_workers=2, decode_workers=2)


def run(setup: Setup, trace) -> Simulation:
    simulation = Simulation(setup, trace)
    simulation.run()
    return simulation


def figures_of(setup: Setup, trace):
    return figures(run(setup, trace), trace, SimulationSlo())


def assert_nothing_is_left(simulation: Simulation) -> None:
    for life in simulation.lives:
        if life.alive:
            life.core.batch.check_integrity()
            counts = life.core.pool.counts()
            assert counts.in_use == counts.quarantined == 0, life.worker_id
            assert not life.core.batch.has_work()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=20))
def test_virtual_time_never_runs_backwards(events):
    clock, seen = VirtualClock(), []

    def happen(delay_ns: int) -> None:
        seen.append(clock.now_ns)
        clock.after(delay_ns, lambda: seen.append(clock.now_ns))

    for at_ns, delay_ns in events:
        clock.at(at_ns, partial(happen, delay_ns))
    clock.run()
    assert seen == sorted(seen)
    assert len(seen) == 2 * len(events)
    with pytest.raises(ValueError, match="cannot schedule"):
        clock.at(clock.now_ns - 1, clock.run)


def arrivals_ns(network: Network, *ends: tuple[str, str]) -> list[int]:
    """Return when messages arrive that are sent at once, without the cost of the call."""
    arrived = dict[tuple[str, str], int]()
    for source, target in ends:
        pair = (source, target)
        network.send(*pair, 5e6, lambda pair=pair: arrived.update({pair: network.clock.now_ns}))
    network.clock.run()
    return [arrived[pair] - CONTROL_NS for pair in ends]


def test_a_message_takes_the_line_through_the_measured_times_and_ends_queue():
    network = Network(LINKS["between-nodes"], VirtualClock())
    first, second, other = arrivals_ns(network, ("a", "b"), ("a", "c"), ("x", "y"))
    assert first == pytest.approx(158e3, rel=0.01)  # measured: 33 GB/s
    assert second == pytest.approx(2 * 158e3, rel=0.01)
    assert other == pytest.approx(158e3, rel=0.01)


def test_within_a_node_messages_take_another_link():
    network = Network(LINKS["between-nodes"], VirtualClock(), nodes=2)
    assert network.node("worker-1") == network.node("worker-3") == "node-1"
    near, far = arrivals_ns(network, ("worker-1", "worker-3"), ("worker-0", "worker-5"))
    assert far == pytest.approx(158e3, rel=0.01)
    assert near == pytest.approx(LINKS["nvlink"].seconds(5e6) * 1e9)


@pytest.mark.long
def test_the_links_of_a_chain_are_pulled_one_after_the_other(monkeypatch):
    """Before each source another one is asked, for a block that it may have or not."""
    asked = []
    quote = Placer.quote

    def with_one_more(placer, *said):
        quoted = quote(placer, *said)
        placement = quoted.placement
        if not placement.prefix:
            return quoted
        others = min({"worker-0", "worker-1"} - {placement.prefix[0].worker_id})
        asked.append([Source(others, 1), *placement.prefix])
        return quoted._replace(placement=replace(placement, prefix=asked[-1]))

    trace, setup = read_trace(SAMPLE, 200), replace(SMALL, prefill_workers=4)
    before = run(setup, trace)
    monkeypatch.setattr(Placer, "quote", with_one_more)
    simulation = run(replace(setup, check_every_step=True), trace)
    assert asked and all(record.ends == 1 and not record.error for record in simulation.records)
    # The question costs time, so some later prompts are placed elsewhere, or pull nothing.
    pairs = zip(before.records, simulation.records, strict=True)
    alike = [
        (one, other)
        for one, other in pairs
        if one.prefill_id == other.prefill_id and one.pulled_blocks and other.pulled_blocks
    ]
    assert alike
    for one, other in alike:
        assert one.pulled_blocks == other.pulled_blocks, "no block came twice, and none was lost"
    assert_nothing_is_left(simulation)


def test_a_worker_runs_one_step_at_a_time(monkeypatch):
    """Two at once publish the same layers twice, in other rectangles, and transfers fail."""
    begin, begun_twice = SimulatedWorker._begin, []

    def counted(worker, plan):
        begun_twice.append(worker._steps is not None)
        begin(worker, plan)

    monkeypatch.setattr(SimulatedWorker, "_begin", counted)
    run(SMALL, read_trace(SAMPLE, 200))
    assert begun_twice and not any(begun_twice)


def test_workers_find_the_line_of_their_decode_steps():
    """The timing is the truth; steps are taken many at a time, as the mean of their contexts."""
    simulation = run(SMALL, read_trace(SAMPLE, 200))
    t = SMALL.timing
    for life in simulation.lives:
        slot = simulation._table.get(life.worker_id)
        if slot.role == "decode":
            fit = life._rates.decode_fit
            for rows, context in [(5, 50_000), (20, 200_000), (30, 500_000)]:
                true_s = t.step_s + t.answer_s * rows + t.answer_context_s * context
                predicted_s = fit.step_s + fit.row_s * rows + fit.context_s * context
                assert predicted_s == pytest.approx(true_s, rel=0.03)


@pytest.mark.parametrize("workers", [2, 24], ids=["small", "only the best are priced"])
def test_the_same_seed_gives_the_same_bytes(workers):
    trace = read_trace(SAMPLE, 15)
    setup = Setup(prefill_workers=workers, decode_workers=workers, mode="auto", mtbf_s=5.0)

    def written(seed: int) -> bytes:
        simulation = run(replace(setup, seed=seed), trace)
        return as_json(simulation, figures(simulation, trace, SimulationSlo()), SimulationSlo())

    assert written(1) == written(1)
    assert written(1) != written(2)


_IN_A_PROCESS = """
import sys
from tests.loadtest.simulator.test_simulator import *
trace = read_trace(SAMPLE, 200)
simulation = run(Setup(prefill_workers=8, decode_workers=8), trace)
limits = SimulationSlo()
sys.stdout.buffer.write(as_json(simulation, figures(simulation, trace, limits), limits))
"""


@pytest.mark.slow
def test_another_process_gives_the_same_bytes():
    """Sets have another order in each process; nothing may hang on it."""

    def written(hash_seed: str) -> bytes:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _IN_A_PROCESS]
        folder = Path(__file__).parents[3]
        return subprocess.run(
            command, env=environment, cwd=folder, check=True, capture_output=True
        ).stdout

    assert len({written(seed) for seed in ("0", "1", "2")}) == 1


requests = st.lists(
    st.builds(
        lambda at_s, blocks, tail, answer, shared: TraceRequest(
            at_s, 512 * blocks + tail, answer, tuple(range(shared, shared + blocks + 1))
        ),
        st.floats(0, 5),
        st.integers(0, 6),
        st.integers(1, 511),
        st.integers(1, 700),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(15), deadline=None)
@given(
    requests,
    st.sampled_from(["disaggregated", "auto", "colocated"]),
    st.sampled_from([FLEET, "round-robin", "cost"]),
    st.sampled_from([0.0, 4.0]),
    st.integers(0, 5),
)
def test_every_request_ends_once_and_every_block_is_counted_after_every_step(
    trace, mode, policy, mtbf_s, seed
):
    """Small pools, so that requests wait, are preempted, and lose their reservations."""
    setup = replace(
        SMALL,
        mode=mode,
        policy=policy,
        mtbf_s=mtbf_s,
        repair_s=2.0,
        seed=seed,
        prefill_kv_tokens=16 * 512,
        decode_kv_tokens=12 * 512,
        check_every_step=True,
    )
    simulation = run(setup, trace)
    for record in simulation.records:
        assert record.ends == 1, record
        if not record.error:
            assert record.tokens == record.answer_tokens, record
            assert record.request.arrived_ns <= record.placed_ns <= record.first_ns
            assert record.first_ns <= record.last_ns <= record.ended_ns
    if not mtbf_s:
        assert all(not record.error for record in simulation.records)
    assert_nothing_is_left(simulation)


def test_deaths_are_survived_or_told():
    trace = read_trace(SAMPLE, 100)
    setup = Setup(prefill_workers=6, decode_workers=6, mtbf_s=80.0, repair_s=5.0)
    simulation = run(setup, trace)
    result = figures(simulation, trace, SimulationSlo())
    assert result.worker_deaths > 2
    told = {"worker_lost", "poison_request", "unavailable", "queue_full", "transfer_failed"}
    assert set(result.errors) <= told
    assert result.answered > result.requests / 2
    assert_nothing_is_left(simulation)


def test_a_queue_that_is_full_refuses_and_the_others_are_served():
    trace = read_trace(SAMPLE, 60)
    setup = Setup(prefill_workers=1, decode_workers=1, max_queued_requests=4, max_batch_requests=2)
    result = figures_of(setup, trace)
    assert result.errors["queue_full"] > 0
    assert result.answered + result.errors["queue_full"] == result.requests


def conversations(count: int, turns: int) -> list[TraceRequest]:
    """Each turn repeats the last one and adds four blocks; all begin with the same block."""
    trace = []
    for turn in range(turns):
        for one in range(count):
            blocks = 4 * (turn + 1)
            names = (0, *(1000 * (one + 1) + block for block in range(blocks)))
            trace.append(TraceRequest(30.0 * turn + one, 512 * (blocks + 1), 20, names))
    return trace


def test_policies_differ_as_they_must():
    trace = conversations(count=9, turns=5)
    setup = replace(SMALL, prefill_workers=4)
    policies = ("longest-prefix", "round-robin", FLEET)
    found = {name: figures_of(replace(setup, policy=name), trace) for name in policies}
    assert found["longest-prefix"].max_to_mean_work == 4.0  # the first block is everywhere
    assert found[FLEET].max_to_mean_work < 4.0
    assert found["round-robin"].hit_share < 0.8 * found[FLEET].hit_share
    # The last token is always computed, and here its block is full.
    assert found[FLEET].hit_share <= found[FLEET].bound_share
    assert found[FLEET].ttft.mean < found["round-robin"].ttft.mean


def test_a_worker_fitted_to_a_bench_takes_as_long_as_the_bench():
    """`docs/measurements/2026-11.md`, "Beside llama.cpp": the engine column."""
    for tokens, rate in ((512, 3062), (2048, 2201)):
        assert EPYC_135M.prompt_s(tokens) == pytest.approx(tokens / rate, rel=0.05)
    for context, rates in ((128, (101, 359, 863, 1214)), (1024, (97, 264, 475, 541))):
        for batch, rate in zip((1, 4, 16, 32), rates, strict=True):
            each_s = EPYC_135M.answer_s + EPYC_135M.answer_context_s * context
            assert EPYC_135M.step_s + batch * each_s == pytest.approx(batch / rate, rel=0.1)


def test_the_command_writes_figures_and_names_what_is_wrong():
    arguments = ["simulate", str(SAMPLE), "--limit", "40", "--prefill", "2", "--decode", "1"]
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    assert shown.exit_code == 0, shown.output
    content = msgspec.json.decode(shown.stdout)
    assert content["figures"]["answered"] == 40
    assert content["setup"]["worker"]["source"].startswith("assumed")
    assert "no model ran" in content["emulated"]
    wrong = CliRunner().invoke(app, [*arguments, "--policy", "best"])
    assert wrong.exit_code == 2
    assert "round-robin" in wrong.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_conversation_trace_reproduces_what_is_known_of_it():
    """The bound, round robin, and the fleet's own policy on 8 caches of 3.1 million tokens."""
    whole = Path("/work/shared/traces/mooncake_conversation.jsonl")
    if not whole.exists():
        pytest.skip("the whole trace does not ship with the project")
    trace = read_trace(whole)
    assert bound_share(trace) == pytest.approx(0.366, abs=0.001)
    setup = Setup(prefill_workers=8, decode_workers=8)
    assert figures_of(replace(setup, policy="round-robin"), trace).hit_share == pytest.approx(
        0.114, abs=0.005
    )
    fleet = figures_of(setup, trace)
    assert fleet.hit_share >= 0.31
    assert fleet.max_to_mean_work <= 1.05
    assert fleet.ttft.p50 < 1.5
    assert fleet.good_share > 0.94


@pytest.mark.long
def test_a_tier_in_host_memory_gives_back_what_small_pools_evict():
    trace = read_trace(SAMPLE, 300)
    small = replace(SMALL, prefill_kv_tokens=262_144, pull_prefixes=False, check_every_step=True)
    without = run(small, trace)
    tiered = run(replace(small, memory_kv_tokens=4_194_304), trace)
    before, after = (figures(one, trace, SimulationSlo()) for one in (without, tiered))
    assert after.hit_share > before.hit_share
    (tier,) = tiered.lives[0].core.tiers.counts()
    assert tier.brought > 0
    assert_nothing_is_left(tiered)


LIMITS = RequestSlo(ttft_s=10.0, itl_s=0.05)


def goodput_at(speed: float, slo: RequestSlo | None) -> Goodput:
    setup = Setup(prefill_workers=6, decode_workers=2, speed=speed, slo=slo)
    trace = read_trace(SAMPLE)
    return goodput(run(setup, trace).records, setup, LIMITS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_overload_ends_service_without_a_gate_and_degrades_it_with_one():
    best = goodput_at(0.7, None)
    assert best.good_share > 0.95, "the fleet holds this load"
    assert goodput_at(1.4, None).good_per_s < 0.3 * best.good_per_s
    gated = goodput_at(1.4, LIMITS)
    assert gated.good_per_s > 0.95 * best.good_per_s
    assert gated.good_of_admitted_share > 0.9
    assert gated.long_admitted_ratio > 0.8


def test_a_report_is_as_old_as_the_step_that_it_is_from():
    """A request that came within a step is not in the load that the step ends with."""
    trace = [TraceRequest(0.0, 40_000, 8), TraceRequest(0.5, 40_000, 8)]
    simulation = Simulation(Setup(prefill_workers=1, decode_workers=1, spread_s=0.0), trace)
    reported: list[tuple[int, int]] = []
    real = simulation.router.on_status

    def on_status(worker, status):
        if simulation.roles[worker.worker_id] == "prefill":
            as_of_ns = simulation.clock.now_ns - status.load_age_ns
            reported.append((as_of_ns, status.queued_prompt_tokens))
        real(worker, status)

    simulation.router.on_status = on_status
    simulation.run()
    later = [tokens for as_of_ns, tokens in reported if 0.6e9 < as_of_ns < 3e9]
    assert later and min(later) > 40_000, "both prompts, once a report is from after the second"


EQUAL = replace(SMALL, prefill_kv_tokens=2_097_152, decode_kv_tokens=2_097_152)


def test_a_worker_that_turns_ends_what_runs_and_gets_the_new_role_s_requests():
    """Four prompts wait at the worker that turns: it computes the first, another the others."""
    trace = [TraceRequest(0.1 * number, 40_000, 64) for number in range(10)]
    simulation = Simulation(replace(EQUAL, spread_s=0.0, check_every_step=True), trace)
    simulation.clock.at(3_000_000_000, partial(simulation.change_role, "worker-1", "decode"))
    records = simulation.run()
    assert all(record.ends == 1 and not record.error for record in records)
    assert all(record.attempt == 1 for record in records), "no request was placed again as a whole"
    computed = [record.computed_on for record in records]
    assert 0 < computed.count("worker-1") < computed.count("worker-0")
    assert {record.prefill_id for record in records} == {"worker-0", "worker-1"}
    assert_nothing_is_left(simulation)

    later = [TraceRequest(30.0 + number, 2_000, 64) for number in range(6)]
    simulation = Simulation(replace(EQUAL, spread_s=0.0), [*trace, *later])
    simulation.clock.at(3_000_000_000, partial(simulation.change_role, "worker-1", "decode"))
    records = simulation.run()[-6:]
    assert "worker-1" in {record.decode_id for record in records}
    assert {record.prefill_id for record in records} == {"worker-0"}


def test_requests_run_through_turns_and_deaths():
    trace = read_trace(SAMPLE, 60)
    setup = replace(EQUAL, prefill_workers=3, decode_workers=3, check_every_step=True, mtbf_s=60.0)
    simulation = Simulation(replace(setup, repair_s=3.0), trace)
    for second in range(2, 40, 4):
        worker_id = f"worker-{second % 3}"
        role = "decode" if second % 8 == 2 else "prefill"
        change = partial(simulation.change_role, worker_id, role)
        simulation.clock.at(second * 1_000_000_000, change)
    records = simulation.run()
    assert all(record.ends == 1 for record in records)
    assert sum(not record.error for record in records) > 50
    assert_nothing_is_left(simulation)


@settings(max_examples=examples(15), deadline=None)
@given(
    requests,
    st.sampled_from(["disaggregated", "auto"]),
    st.sampled_from([0.0, 4.0]),
    st.lists(
        st.tuples(st.floats(0, 9), st.integers(0, 4), st.sampled_from(["prefill", "decode"])),
        max_size=12,
    ),
)
def test_whatever_turns_every_request_ends_once_and_no_block_is_lost(trace, mode, mtbf_s, turns):
    """Also when no worker of a role is left, which the planner never does."""
    setup = replace(
        EQUAL,
        prefill_workers=3,
        mode=mode,
        mtbf_s=mtbf_s,
        repair_s=2.0,
        prefill_kv_tokens=16 * 512,
        decode_kv_tokens=16 * 512,
        check_every_step=True,
    )
    simulation = Simulation(setup, trace)
    for at_s, number, role in turns:
        turn = partial(simulation.change_role, f"worker-{number}", role)
        simulation.clock.at(round(at_s * 1e9), turn)
    for record in simulation.run():
        assert record.ends == 1, record
        if not record.error:
            assert record.tokens == record.answer_tokens, record
    assert_nothing_is_left(simulation)


def test_workers_with_pools_of_two_sizes_do_not_turn():
    with pytest.raises(ValueError, match="pools of one size; give --prefill-kv-tokens"):
        Simulation(SMALL, read_trace(SAMPLE, 1)).change_role("worker-0", "decode")


STRICT = RequestSlo(ttft_s=3.0, itl_s=0.03)


def changing_mix(phase_s: int) -> list[TraceRequest]:
    """Long prompts, for which three of four workers have to prefill; then long responses."""
    prompts = [TraceRequest(n / 2.2, 6000, 60) for n in range(round(2.2 * phase_s))]
    responses = [TraceRequest(phase_s + n / 10, 500, 600) for n in range(10 * phase_s)]
    return prompts + responses


def planned(trace, prefill: int, plan: str, gate: bool = False, **more) -> Simulation:
    setup = replace(EQUAL, prefill_workers=prefill, plan=plan, slo=STRICT, spread_s=0.5)
    simulation = Simulation(replace(setup, max_batch_requests=128, **more), trace)
    if not gate:
        for record in simulation.records:
            record.request = replace(record.request, slo=None)
    simulation.run()
    assert all(record.ends == 1 for record in simulation.records)
    assert_nothing_is_left(simulation)
    return simulation


def good_share(simulation: Simulation) -> float:
    return goodput(simulation.records, simulation.setup, STRICT).good_share


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_planner_follows_a_mix_that_no_fixed_split_serves():
    trace = changing_mix(120)
    fixed = [good_share(planned(trace, n, "fixed", decode_workers=4 - n)) for n in (2, 3)]
    assert max(fixed) < 0.75
    for start in (1, 2, 3):
        simulation = planned(trace, start, "auto", decode_workers=4 - start)
        assert good_share(simulation) > 0.98
        assert simulation.turns == 4 - start
        prefill = sum(role == "prefill" for role in simulation.roles.values())
        assert prefill == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_planner_leaves_a_steady_mix_alone_and_finds_its_split_under_overload():
    trace = [TraceRequest(n / 2.2, 6000, 60) for n in range(660)]
    steady = planned(trace, 1, "auto", decode_workers=3)
    assert good_share(steady) > 0.95
    assert steady.turns == 2
    right = goodput(steady.records, steady.setup, STRICT)
    over = planned(trace, 1, "auto", gate=True, decode_workers=3, speed=1.5)
    late = [record for record in over.records if record.request.arrived_ns > 60e9]
    found = goodput(late, over.setup, STRICT)
    assert found.good_per_s >= 0.9 * right.good_per_s
    last = over.planner.decisions[-1].decision
    assert last.figures.prefill == 3
    reasons = {decided.decision.reason for decided in over.planner.decisions}
    assert any("no split of 4 workers holds the load" in reason for reason in reasons)


def test_the_planner_turns_a_worker_and_the_report_has_every_decision():
    trace = [TraceRequest(n / 2.0, 6000, 20) for n in range(40)]
    simulation = planned(trace, 1, "auto", decode_workers=3)
    assert simulation.turns >= 1
    content = msgspec.json.decode(
        as_json(simulation, figures(simulation, trace, SimulationSlo()), SimulationSlo())
    )
    turns = [one for one in content["decisions"] if one["decision"]["type"] == "turn"]
    assert content["figures"]["goodput"]["turns"] == len(turns) == simulation.turns
    assert turns[0]["decision"]["role"] == "prefill"
    assert turns[0]["decision"]["figures"]["prefill"] == 1
    quiet = [one for one in content["decisions"] if one["decision"]["type"] == "nothing"]
    assert all(one["decision"]["reason"] for one in quiet)


@pytest.mark.long
def test_a_fleet_grows_with_its_load_and_shrinks_after_it():
    """Added workers take their time to start; those that leave complete what they have."""
    busy = [TraceRequest(n / 4.0, 6000, 40) for n in range(1200)]
    calm = [TraceRequest(300 + n * 4.0, 6000, 40) for n in range(300)]
    grows = {"min_workers": 2, "max_workers": 12, "start_s": 30.0}
    simulation = planned(busy + calm, 1, "auto", decode_workers=1, **grows)
    sizes = [d.decision for d in simulation.planner.decisions if isinstance(d.decision, Resize)]
    totals = [2, *(one.prefill + one.decode for one in sizes)]
    assert max(totals) >= 4
    assert totals[-1] < max(totals)
    assert not any(record.error for record in simulation.records)
    assert (
        len(simulation.roles) - len(simulation.left_ns)
        == totals[-1]
        == sum(simulation.wanted.values())
    )
    everyone_s = len(simulation.roles) * 1500
    assert 2 * 1400 < simulation.worker_s < everyone_s


def test_days_are_as_recorded_at_noon_and_quiet_at_midnight():
    trace = [TraceRequest(n / 2.0, 100 + n, 10, (n, n + 1)) for n in range(1000)]
    two = days(trace, 2, valley=0.1)
    hours = [int(request.arrival_s // 3600) for request in two]
    assert two == sorted(two, key=lambda request: request.arrival_s)
    noon, midnight, next_noon = hours.count(12), hours.count(0), hours.count(36)
    assert noon == pytest.approx(7200, rel=0.03)
    assert next_noon == pytest.approx(noon, rel=0.01)
    assert midnight == pytest.approx(0.1 * 7200, rel=0.1)
    first, again = two[0], two[len(trace)]
    assert again.input_tokens == first.input_tokens
    assert not set(again.block_hashes) & {name for one in trace for name in one.block_hashes}


def test_the_planner_needs_limits_and_pools_of_one_size(tmp_path):
    arguments = ["simulate", str(SAMPLE), "--limit", "20", "--prefill", "1", "--decode", "3"]
    shown = CliRunner().invoke(app, [*arguments, "--plan", "auto"])
    assert shown.exit_code == 2
    assert "--slo-ttft-s" in shown.output
    limits = ["--slo-ttft-s", "3", "--slo-itl-s", "0.03"]
    shown = CliRunner().invoke(app, [*arguments, "--plan", "auto", *limits])
    assert shown.exit_code == 2
    assert "pools" in shown.output
    pools = ["--prefill-kv-tokens", "1048576", "--decode-kv-tokens", "1048576"]
    arguments = [*arguments, "--plan", "auto", *limits, *pools]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "decisions, simulated" in shown.output


def test_each_row_of_the_tables_is_explained():
    arguments = ["simulate", str(SAMPLE), "--limit", "20", "--slo-ttft-s", "3"]
    shown = CliRunner().invoke(app, [*arguments, "--slo-itl-s", "0.03"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    for words in ("max:mean = ", "bound = ", "good = share with TTFT ≤ 10 s", "wasted = ", " %"):
        assert words in shown.stdout
    assert not re.search(r"\d%", shown.stdout)


def test_clients_that_come_again_when_they_are_told_to_are_let_in():
    """At twice the load that the fleet holds, from the first client to the last."""
    trace = [TraceRequest(n / 4.4, 6000, 60) for n in range(400)]
    setup = replace(EQUAL, prefill_workers=3, decode_workers=1, slo=STRICT, spread_s=0.5, tries=10)
    simulation = run(replace(setup, max_batch_requests=128), trace)
    found = goodput(simulation.records, simulation.setup, STRICT)
    assert all(record.ends == 1 for record in simulation.records)
    assert found.second_tries > 50
    assert found.second_try_share > 0.85
    assert found.mean_tries < 2.0
    assert found.good_of_admitted_share > 0.95
    assert_nothing_is_left(simulation)


def test_a_client_with_one_try_is_refused_for_good():
    trace = [TraceRequest(n / 4.4, 6000, 60) for n in range(300)]
    setup = replace(EQUAL, prefill_workers=1, decode_workers=1, slo=STRICT, spread_s=0.5)
    found = goodput(run(setup, trace).records, setup, STRICT)
    assert found.refused_share > 0.3
    assert (found.second_tries, found.second_try_share, found.mean_tries) == (0, None, 1.0)


def test_the_simulated_gate_learns_steps_from_the_second_token_on():
    trace = [TraceRequest(n / 2.0, 6000, 40) for n in range(20)]
    setup = replace(EQUAL, slo=STRICT, link=replace(LINKS["between-nodes"], bytes_per_s=1e9))
    simulation = Simulation(setup, trace)
    learned: list[float] = []
    simulation.router._gate.learn_step = lambda predicted, actual, tokens: learned.append(actual)
    ended = sorted(simulation.run(), key=lambda record: record.ended_ns)
    served = [record for record in ended if not record.error]
    assert len(served) > 10
    assert learned == [(one.last_ns - one.second_ns) / 1e9 / 38 for one in served]
    whole = [(one.last_ns - one.first_ns) / 1e9 / 39 for one in served]
    assert sum(whole) > 1.2 * sum(learned), "the transfer takes as long as many steps"


def test_plan_replays_a_trace_beside_the_fixed_split(tmp_path):
    """Three prefill workers are needed: the planner turns two, and each turn has its figures."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": n * 450, "input_length": 6000, "output_length": 20, "hash_ids": []}
        for n in range(120)
    ]
    trace.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    limits = ["--slo-ttft-s", "3", "--slo-itl-s", "0.03"]
    arguments = ["plan", "--replay", str(trace), "--prefill", "1", "--decode", "3", *limits]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert shown.exit_code == 0, shown.output
    rows = [line.split("│") for line in shown.output.splitlines() if "│" in line]
    turns = [[cell.strip() for cell in row[1:-1]] for row in rows if "requests/s" in row[-2]]
    assert [turn[1:3] for turn in turns] == [["1 + 3", "2 + 2"], ["2 + 2", "3 + 1"]]
    assert all("misses" in turn[3] or "wait" in turn[3] for turn in turns)
    shares = next(
        found
        for line in shown.output.splitlines()
        if line.split()[:1] == ["good"] and (found := re.findall(r"[\d.]+ %", line))
    )
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [one["decision"]["type"] for one in told["decisions"]].count("turn") == 2
    good = {name: 100 * one["goodput"]["good_share"] for name, one in told["figures"].items()}
    assert [f"{share:.1f} %" for share in good.values()] == shares
    assert good["auto from 1 + 3"] > 1.5 * good["fixed from 1 + 3"]
    shown = CliRunner().invoke(app, ["plan", "--replay", str(tmp_path / "none")])
    assert shown.exit_code == 2
    assert "--replay" in shown.output


def test_calls_of_agents_are_sent_when_those_before_them_have_ended(tmp_path):
    """Also those after a refused call, and by the same frontier as in a load test."""
    calls = agent_calls(written(tmp_path / "spans.jsonl", SPANS))
    for more in ({}, {"speed": 4.0}, {"mtbf_s": 2.0, "repair_s": 1.0}):
        setup = replace(SMALL, spread_s=3.0, **more)
        simulation = run(setup, trace_requests(calls))
        assert_nothing_is_left(simulation)
        records = simulation.records
        assert [record.ends for record in records] == [1] * 5
        pauses_ns = [round(pause * 1e9 / setup.speed) for pause in (0.0, 1.0, 1.0, 1.0, 1.5)]
        for call, record, pause_ns in zip(calls, records, pauses_ns, strict=True):
            before_ns = max((records[each].ended_ns for each in call.after), default=0)
            assert abs(record.sent_ns - before_ns - pause_ns) < 1000
            assert record.request.arrived_ns >= record.sent_ns


def test_the_command_takes_traces_of_agents(tmp_path):
    trace = str(written(tmp_path / "spans.jsonl", SPANS))
    command = ["simulate", trace, "--prefill", "1", "--decode", "1", "--json"]
    one, other = (CliRunner().invoke(app, command).stdout for _ in range(2))
    assert json.loads(one)["figures"]["answered"] == 5
    assert json.loads(one)["setup"]["spread_s"] == 0.0
    assert one == other
    refused = CliRunner().invoke(app, [*command, "--shift"])
    assert "trace without agents" in refused.stderr
