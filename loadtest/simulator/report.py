"""Results of a simulation: figures as plain data, and a table."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from typer import Option

from baton.planner.state import Figures as PlannerFigures
from baton.planner.state import Resize, RoleChange
from baton.types.slo import Slo
from loadtest.metrics.summary import Distribution
from loadtest.percent import percent
from loadtest.simulator.planning import TimedDecision
from loadtest.simulator.records import Record
from loadtest.simulator.setup import Setup
from loadtest.simulator.simulation import Simulation
from loadtest.workloads.traces import TraceRequest

_Run = TypeVar("_Run")
LONG_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True)
class SimulationSlo:
    """Limits that a good request must meet, as options."""

    ttft_s: Annotated[float, Option(min=0, help="TTFT limit of a good request.")] = 10.0
    tpot_s: Annotated[float, Option(min=0, help="TPOT limit of a good request.")] = 0.1


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput of a fleet: requests that kept their limits, of all sent. Shares are between 0 and 1.

    Attributes:
        good_per_s: Good requests per second, from the first client to the last; without those that
            came again after that.
        good_share: Good requests of all that were sent.
        refused_share: Requests that got 429.
        good_of_admitted_share: Good requests of those that were answered.
        long_admitted_ratio: Share of prompts over 32,768 tokens that were answered, divided by the
            share of all requests that were; None if there are no such prompts.
        wasted_share: Prompt tokens computed for requests that were not good, of all computed ones.
        turns: Changes of a worker's role.
        worker_hours: Hours for which workers were there until the last arrival, starts included.
        good_per_worker_hour: Good requests per hour of a worker.
        second_tries: Clients that came again after 429 before the last client came.
        second_try_share: Share of these that were let in at their second try; None without any.
        retry_after_s: Mean ``Retry-After`` of their first refusal.
        mean_tries: Tries of a client.
    """

    good_per_s: float
    good_share: float
    refused_share: float
    good_of_admitted_share: float
    long_admitted_ratio: float | None
    wasted_share: float
    turns: int
    worker_hours: float = 0.0
    good_per_worker_hour: float = 0.0
    second_tries: int = 0
    second_try_share: float | None = None
    retry_after_s: float = 0.0
    mean_tries: float = 1.0


def goodput(
    records: list[Record], setup: Setup, slo: Slo, turns: int = 0, worker_s: float = 0.0
) -> Goodput:
    """Return the goodput of a finished simulation."""
    good = {record.id for record in records if is_good(record, setup, slo)}
    admitted = [record for record in records if not record.error]
    long = [record for record in records if record.prompt_tokens > LONG_TOKENS]
    admitted_share = len(admitted) / len(records)
    long_share = sum(not record.error for record in long) / max(len(long), 1)
    computed = {
        record.id: record.prompt_tokens - record.cached_tokens
        for record in records
        if record.started_ns
    }
    wasted = sum(tokens for name, tokens in computed.items() if name not in good)
    sent_ns = [record.sent_ns for record in records]
    last_ns = max(sent_ns)
    span_s = max(last_ns - min(sent_ns), 1) / 1e9
    in_span = sum(record.id in good and record.request.arrived_ns <= last_ns for record in records)
    again = [record for record in records if 0 < record.again_ns <= last_ns]
    let_in = sum(record.tries == 2 and not record.error for record in again)
    return Goodput(
        good_per_s=round(in_span / span_s, 4),
        good_share=round(len(good) / len(records), 4),
        refused_share=round(1 - admitted_share, 4),
        good_of_admitted_share=round(len(good) / max(len(admitted), 1), 4),
        long_admitted_ratio=round(long_share / admitted_share, 4) if long and admitted else None,
        wasted_share=round(wasted / max(sum(computed.values()), 1), 4),
        turns=turns,
        worker_hours=round(worker_s / 3600, 4),
        good_per_worker_hour=round(len(good) / worker_s * 3600, 2) if worker_s else 0.0,
        second_tries=len(again),
        second_try_share=round(let_in / len(again), 4) if again else None,
        retry_after_s=round(fmean(record.retry_after_s for record in again), 2) if again else 0.0,
        mean_tries=round(fmean(record.tries for record in records), 4),
    )


def is_good(record: Record, setup: Setup, slo: Slo) -> bool:
    """Return whether a response kept its limits; the prompt's own time is for all its tokens."""
    if record.error:
        return False
    own_s = setup.timing.step_s + setup.timing.prompt_s(record.prompt_tokens)
    times_ns = (record.first_ns, record.second_ns, record.last_ns)
    first_s, second_s, last_s = ((at_ns - record.request.arrived_ns) / 1e9 for at_ns in times_ns)
    return slo.met_by(own_s, first_s, second_s, last_s, record.tokens)


def _seconds(values_ns: Sequence[float]) -> Distribution:
    distribution = Distribution.of(np.asarray(values_ns, dtype=np.float64) / 1e9)
    if distribution is None:
        return Distribution(count=0, mean=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0, max=0.0)
    rounded = {
        name: round(value, 6) for name, value in msgspec.structs.asdict(distribution).items()
    }
    return Distribution(**rounded)


class SimulationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. Shares are between 0 and 1.

    Attributes:
        hit_share: Share of all prompt blocks that were cached where the prompt was computed.
            Partial blocks at the end of prompts count and are never cached.
        second_token: Time from the first to the second token: a decode step, and the exposed
            transfer.
        prediction_error: |predicted - actual| time from placement to the first token (policy
            ``fleet`` only).
        regret: Time that the best worker would have saved, by the true queues, for every 16th
            placement.
    """

    requests: int
    answered: int
    errors: dict[str, int]
    duration_s: float
    hit_share: float
    pulled_share: float  # share of all blocks that came from another worker's cache
    bound_share: float  # share of blocks cached in one unlimited cache of every earlier prompt
    max_to_mean_work: float  # maximum / mean of the prompt tokens computed per worker
    busy_share: float  # of workers that were prefill workers at some time
    ttft: Distribution  # time from arrival at the router to the first token
    tpot: Distribution  # (last - first) / (tokens - 1) of responses of two tokens or more
    e2e: Distribution
    second_token: Distribution
    longest_gap: Distribution  # longest ITL of each response
    queue: Distribution  # time from arrival to the prompt's first step, in router and worker
    transfer: Distribution
    transfer_gb: float
    good_share: float
    good_per_s: float  # good requests per second; failed ones are not good
    prediction_error: Distribution
    regret: Distribution
    preemptions: int
    evictions: int
    worker_deaths: int
    retried: int
    goodput: Goodput | None  # None: the fleet has no limits of latency


def bound_share(trace: Sequence[TraceRequest]) -> float:
    """Return the share of blocks that an earlier prompt has; 0 for a trace without hashes."""
    seen: set[int] = set()
    total = repeated = 0
    for request in trace:
        total += len(request.block_hashes)
        repeated += sum(block in seen for block in request.block_hashes)
        seen.update(request.block_hashes)
    return repeated / total if total else 0.0


def figures(
    simulation: Simulation, trace: Sequence[TraceRequest], slo: SimulationSlo
) -> SimulationFigures:
    """Compute the figures of a finished simulation."""
    setup = simulation.setup
    records = simulation.records
    answered = [record for record in records if not record.error]
    tpots_ns = {
        record.id: (record.last_ns - record.first_ns) / (record.tokens - 1)
        for record in answered
        if record.tokens > 1
    }
    good = [
        record
        for record in answered
        if _ttft_ns(record) <= slo.ttft_s * 1e9 and tpots_ns.get(record.id, 0) <= slo.tpot_s * 1e9
    ]
    duration_s = simulation.clock.now_ns / 1e9
    blocks = sum(record.blocks for record in records)
    cached_blocks = sum(record.cached_tokens // setup.block_tokens for record in records)
    lives = simulation.lives
    return SimulationFigures(
        requests=len(records),
        answered=len(answered),
        errors=dict(sorted(Counter(r.error for r in records if r.error).items())),
        duration_s=round(duration_s, 3),
        hit_share=round(cached_blocks / blocks, 6),
        pulled_share=round(sum(record.pulled_blocks for record in records) / blocks, 6)
        if blocks
        else 0.0,
        bound_share=round(bound_share(trace), 6),
        max_to_mean_work=round(_max_to_mean_work(simulation), 6),
        busy_share=round(_busy_s(simulation) / duration_s, 6),
        ttft=_seconds([_ttft_ns(record) for record in answered]),
        tpot=_seconds(list(tpots_ns.values())),
        e2e=_seconds([record.last_ns - record.request.arrived_ns for record in answered]),
        second_token=_seconds(
            [record.second_ns - record.first_ns for record in answered if record.second_ns]
        ),
        longest_gap=_seconds([record.longest_gap_ns for record in answered if record.tokens > 1]),
        queue=_seconds(
            [one.started_ns - one.request.arrived_ns for one in records if one.started_ns]
        ),
        transfer=_seconds([record.transfer_ns for record in records if record.transfer_ns]),
        transfer_gb=round(sum(record.transfer_bytes for record in records) / 1e9, 3),
        good_share=round(len(good) / len(records), 6),
        good_per_s=round(len(good) / duration_s, 6),
        prediction_error=_prediction_error(answered),
        regret=_seconds(
            [record.regret_s * 1e9 for record in records if record.regret_s is not None]
        ),
        preemptions=sum(life.core.batch.preemptions for life in lives),
        evictions=sum(life.core.pool.evictions for life in lives),
        worker_deaths=simulation.router.deaths,
        retried=sum(record.attempt > 1 for record in records),
        goodput=goodput(records, setup, setup.slo, simulation.turns, simulation.worker_s)
        if setup.slo is not None
        else None,
    )


def _prediction_error(answered: Sequence[Record]) -> Distribution:
    return _seconds(
        [
            abs(record.predicted_first_s * 1e9 - (record.first_ns - record.placed_ns))
            for record in answered
            if record.predicted_first_s and record.attempt == 1
        ]
    )


def _ttft_ns(record: Record) -> int:
    return record.first_ns - record.request.arrived_ns


def _busy_s(simulation: Simulation) -> float:
    computing = simulation.computing
    busy_ns = sum(life.busy_ns for life in simulation.lives if life.worker_id in computing)
    return busy_ns / 1e9 / len(computing)


def _max_to_mean_work(simulation: Simulation) -> float:
    work = dict.fromkeys(sorted(simulation.computing), 0)
    for record in simulation.records:
        if record.computed_on:
            work.setdefault(record.computed_on, 0)
            work[record.computed_on] += record.prompt_tokens - record.cached_tokens
    mean = fmean(work.values())
    return max(work.values()) / mean if mean else 0.0


def as_json(simulation: Simulation, result: SimulationFigures, slo: SimulationSlo) -> bytes:
    """Return setup and figures as JSON, the same bytes for the same run."""
    setup = simulation.setup
    described = {each.name: getattr(setup, each.name) for each in fields(setup)}
    for internal in ("timing", "link", "memory_bytes_per_s", "check_every_step"):
        del described[internal]
    described |= {
        "mode": setup.mode if setup.prefill_workers else "colocated",
        "worker": setup.timing,
        "link_latency_s": setup.link.latency_s,
        "link_bytes_per_s": setup.link.bytes_per_s,
    }
    content: dict[str, object] = {
        "emulated": "virtual time: no model ran",
        "setup": described,
        "slo": slo,
        "figures": result,
    }
    if simulation.left_out:
        content["left_out_requests"] = simulation.left_out
    if simulation.planner is not None:
        content["decisions"] = simulation.planner.decisions
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def table(results: dict[str, SimulationFigures]) -> Table:
    """Return a table with one column per run, which reads at 80 columns."""
    rows: dict[str, Callable[[SimulationFigures], str]] = {
        "hit": lambda one: percent(one.hit_share),
        "pulled": lambda one: percent(one.pulled_share),
        "bound": lambda one: percent(one.bound_share),
        "max:mean": lambda one: f"{one.max_to_mean_work:.3f}",
        "busy": lambda one: percent(one.busy_share, 0),
        "TTFT p50, s": lambda one: f"{one.ttft.p50:.2f}",
        "TTFT p99, s": lambda one: f"{one.ttft.p99:.1f}",
        "TPOT p50, ms": lambda one: f"{one.tpot.p50 * 1e3:.1f}",
        "TPOT p99, ms": lambda one: f"{one.tpot.p99 * 1e3:.1f}",
        "E2E p50, s": lambda one: f"{one.e2e.p50:.1f}",
        "queue p50, s": lambda one: f"{one.queue.p50:.2f}",
        "good": lambda one: percent(one.good_share),
        "failed": lambda one: str(one.requests - one.answered),
    }
    return _by_run("simulated: virtual time, no model ran", results, rows)


def table_notes(slo: SimulationSlo) -> dict[str, str]:
    """Return explanations of the rows of `table`."""
    return {
        "hit": "share of prompt blocks that were cached at the worker that computed the prompt",
        "pulled": "share of prompt blocks pulled from another worker's cache",
        "bound": "share that one unlimited cache of all earlier prompts would have",
        "max:mean": "computed prompt tokens of the busiest worker ÷ those of the mean worker",
        "busy": "share of the time in which prefill workers computed",
        "TTFT": "time from arrival to the first token",
        "TPOT": "(last token − first token) ÷ (tokens − 1)",
        "E2E": "time from arrival to the end",
        "queue": "time from arrival to the first step of the prompt",
        "good": f"share with TTFT ≤ {slo.ttft_s:g} s and TPOT ≤ {slo.tpot_s:g} s",
    }


GOODPUT_NOTES = {
    "good/s, good": "requests within the limits of latency, per second and as a share of all",
    "refused": "share that admission refused",
    "good of admitted": "share of the admitted requests that were good",
    "long": "admitted share of long prompts ÷ admitted share of all requests",
    "wasted": "share of the computed prompt tokens that were for requests that were not good",
    "turns": "changes of role",
    "good/worker h": "good requests per hour of a worker",
    "2nd try": "share of the refused clients that were let in when they came again",
    "tries": "mean number of tries",
}
"""Explanations of the rows of `goodput_table`."""


def legend(notes: Mapping[str, str]) -> str:
    """Return one line a row of a table: its name and what it means."""
    return "\n".join(f"{name} = {meaning}" for name, meaning in notes.items())


def goodput_table(results: dict[str, SimulationFigures]) -> Table:
    """Return a table with one column per run of a fleet that has limits of latency."""
    goodputs = {
        name: result.goodput for name, result in results.items() if result.goodput is not None
    }
    rows: dict[str, Callable[[Goodput], str]] = {
        "good/s": lambda result: f"{result.good_per_s:.2f}",
        "good": lambda result: percent(result.good_share),
        "refused": lambda result: percent(result.refused_share),
        "good of admitted": lambda result: percent(result.good_of_admitted_share),
        "long": lambda result: (
            "" if result.long_admitted_ratio is None else f"{result.long_admitted_ratio:.2f}"
        ),
        "wasted": lambda result: percent(result.wasted_share),
        "turns": lambda result: str(result.turns),
        "good/worker h": lambda result: f"{result.good_per_worker_hour:.0f}",
        "2nd try": lambda result: (
            "" if result.second_try_share is None else percent(result.second_try_share)
        ),
        "tries": lambda result: f"{result.mean_tries:.2f}",
    }
    return _by_run("goodput, simulated", goodputs, rows)


def _by_run(
    title: str, runs: Mapping[str, _Run], rows: Mapping[str, Callable[[_Run], str]]
) -> Table:
    shown = Table("", title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in runs:
        shown.add_column(name.replace("-", "-\n"), justify="right")
    for name, cell in rows.items():
        shown.add_row(name, *(cell(run) for run in runs.values()))
    return shown


def turns_table(decisions: Sequence[TimedDecision]) -> Table:
    """Return a table with one row per change of a role or of the sizes."""
    shown = Table(title="decisions, simulated", title_justify="left")
    for column in ("at", "from", "to", "reason", "figures"):
        shown.add_column(column, justify="right" if column == "at" else "left")
    for decided in decisions:
        decision = decided.decision
        planned = decision.figures
        before = "" if planned is None else f"{planned.prefill} + {planned.decode}"
        if isinstance(decision, RoleChange) and planned is not None:
            more = 1 if decision.role == "prefill" else -1
            after = f"{planned.prefill + more} + {planned.decode - more}"
        elif isinstance(decision, Resize):
            after = f"{decision.prefill} + {decision.decode}"
        else:
            continue
        shown.add_row(f"{decided.at_s:.0f} s", before, after, decision.reason, _described(planned))
    return shown


def _described(planned: PlannerFigures | None) -> str:
    """Return the figures of a decision."""
    if planned is None:
        return ""
    return (
        f"{planned.requests_per_s:.2f} requests/s, {planned.prompt_s:.2f} s each to compute, "
        f"{planned.output_tokens:.0f} tokens each; prompts wait {planned.prefill_wait_s:.1f} s, "
        f"streams fill {planned.decode_now:.2f} workers"
    )
