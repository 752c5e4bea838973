"""``baton simulate``: runs a trace through the fleet's own state machines in virtual time."""

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from baton.engine.emulated_timing import H100_70B, TIMINGS
from baton.types.slo import Slo as RequestSlo
from loadtest.commands.option_groups import with_options
from loadtest.commands.options import echo
from loadtest.commands.running import INTERRUPTED, ended_by_signals
from loadtest.reasons import file_reason
from loadtest.simulator.network import LINKS
from loadtest.simulator.planning import TimedDecision
from loadtest.simulator.policies import FLEET, POLICIES
from loadtest.simulator.report import (
    GOODPUT_NOTES,
    SimulationFigures,
    SimulationSlo,
    as_json,
    figures,
    goodput_table,
    legend,
    table,
    table_notes,
    turns_table,
)
from loadtest.simulator.setup import Plan, Setup
from loadtest.simulator.simulation import Simulation
from loadtest.workloads.agent_traces import agent_calls, is_agent_trace
from loadtest.workloads.call_graph import trace_requests
from loadtest.workloads.shifting import days, shifting
from loadtest.workloads.traces import TraceError, TraceRequest, read_trace

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class _Admission:
    slo_ttft_s: Annotated[
        float | None, typer.Option(min=0.001, help="Limit of TTFT for admission (slo.ttft_s).")
    ] = None
    slo_itl_s: Annotated[
        float | None, typer.Option(min=0.0001, help="Limit of ITL for admission (slo.itl_s).")
    ] = None


@dataclass(frozen=True, kw_only=True)
class _Part:
    shift: Annotated[
        bool, typer.Option("--shift", help="Change lengths and rate every 10 minutes of the trace.")
    ] = False
    in_days: Annotated[
        int,
        typer.Option("--days", min=0, help="Repeat the trace for days whose rate follows a sine."),
    ] = 0
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N requests.")] = None

    def requests(self, trace: Path) -> list[TraceRequest]:
        """Return the requests of the trace that are simulated."""
        requests = _requests(trace, self.limit, "TRACE")
        if any(each.after for each in requests) and (self.shift or self.in_days):
            raise typer.BadParameter("--shift and --days need a trace without agents")
        if self.shift:
            requests = shifting(requests)
        return days(requests, self.in_days) if self.in_days else requests


_ADMITS_ALL = _Admission()
_WHOLE = _Part()
_GOOD = SimulationSlo()


@ended_by_signals()
@with_options(
    "policy",
    "timing",
    "link",
    "memory_bytes_per_s",
    "block_tokens",
    "slo",
    "max_step_tokens",
    "max_queued_requests",
    "check_every_step",
)
def simulate(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, Azure CSV, or a trace of agents.")],
    setup: Setup,
    policy: Annotated[
        str, typer.Option(help=f"Routing policy: {FLEET}, {', '.join(POLICIES)}, or {ALL}.")
    ] = FLEET,
    json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")
    ] = False,
    worker: Annotated[
        str, typer.Option(help=f"Timing model: {', '.join(TIMINGS)}.")
    ] = H100_70B.name,
    link: Annotated[
        str, typer.Option(help=f"Link between workers: {', '.join(LINKS)}.")
    ] = "between-nodes",
    admission: _Admission = _ADMITS_ALL,
    part: _Part = _WHOLE,
    good: SimulationSlo = _GOOD,
) -> None:
    """Simulate a fleet under a trace: real routing, queues, schedulers, KV transfers; no model.

    Step times come from a linear model, described in docs/design/simulator.md. The same arguments
    give the same bytes of JSON. Ctrl-C ends with the figures of the requests simulated so far (exit
    code 130).
    """
    _check_word(policy, [FLEET, *POLICIES, ALL], "--policy")
    _check_word(worker, TIMINGS, "--worker")
    _check_word(link, LINKS, "--link")
    limits = _limits(admission.slo_ttft_s, admission.slo_itl_s, setup)
    requests = part.requests(trace)
    if is_agent_trace(trace):  # whose times are no ticks
        setup = replace(setup, spread_s=0.0)
    results: dict[str, SimulationFigures] = {}
    written: list[bytes] = []
    for name in [*POLICIES, FLEET] if policy == ALL else [policy]:
        fleet = replace(setup, policy=name, slo=limits, timing=TIMINGS[worker], link=LINKS[link])
        simulation, ended = _run(name, fleet, requests)
        if ended:
            results[name] = figures(simulation, ended, good)
            written.append(as_json(simulation, results[name], good))
        if simulation.left_out:
            echo(f"PARTIAL: interrupted, {name} has {len(ended):,} of {len(requests):,} requests")
            break
    if not results:
        raise typer.Exit(INTERRUPTED)
    code = INTERRUPTED if simulation.left_out else 0
    if json:
        whole = written[0] if len(written) == 1 else b"[" + b",".join(written) + b"]\n"
        typer.echo(whole, nl=False)
        raise typer.Exit(code)
    _show(results, good, with_goodput=limits is not None)
    if simulation.planner is not None:
        Console().print(turns_table(simulation.planner.decisions))
    raise typer.Exit(code)


def _check_word(value: str, allowed: Collection[str], option: str) -> None:
    if value not in allowed:
        raise typer.BadParameter(
            f"{value!r} is unknown; use one of {', '.join(allowed)}", param_hint=option
        )


def _limits(ttft_s: float | None, itl_s: float | None, setup: Setup) -> RequestSlo | None:
    if (ttft_s is None) != (itl_s is None):
        raise typer.BadParameter("use --slo-ttft-s and --slo-itl-s together")
    if ttft_s is None or itl_s is None:
        if setup.plan == "auto":
            raise typer.BadParameter("--plan auto needs --slo-ttft-s and --slo-itl-s")
        return None
    return RequestSlo(ttft_s=ttft_s, itl_s=itl_s)


def _show(results: dict[str, SimulationFigures], slo: SimulationSlo, *, with_goodput: bool) -> None:
    Console().print(table(results))
    Console().print(legend(table_notes(slo)), highlight=False)
    if with_goodput:
        Console().print(goodput_table(results))
        Console().print(legend(GOODPUT_NOTES), highlight=False)


def replay(trace: Path, setup: Setup, limit: int | None = None, *, as_json: bool = False) -> None:
    """Print what the planner does with a trace, and the goodput beside that of the fixed split."""
    requests = _requests(trace, limit, "--replay")
    results: dict[str, SimulationFigures] = {}
    decisions: list[TimedDecision] = []
    plans: tuple[Plan, ...] = ("auto", "fixed")
    for plan in plans:
        name = f"{plan} from {setup.prefill_workers} + {setup.decode_workers}"
        simulation, ended = _run(name, replace(setup, plan=plan), requests)
        if simulation.left_out:  # its figures could not be compared
            echo("interrupted")
            raise typer.Exit(INTERRUPTED)
        results[name] = figures(simulation, ended, SimulationSlo())
        if simulation.planner is not None:
            decisions = simulation.planner.decisions
    if as_json:
        result = {"decisions": decisions, "figures": results}
        typer.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
        return
    Console().print(turns_table(decisions))
    Console().print(goodput_table(results))


def _requests(trace: Path, limit: int | None, option: str) -> list[TraceRequest]:
    try:
        if is_agent_trace(trace):
            return trace_requests(agent_calls(trace, limit))
        return read_trace(trace, limit)
    except OSError as error:
        raise typer.BadParameter(file_reason(error), param_hint=option) from error
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _run(
    name: str, setup: Setup, requests: Sequence[TraceRequest]
) -> tuple[Simulation, list[TraceRequest]]:
    """Run until the end or Ctrl-C; return the simulation and the requests that have ended."""
    began_s = time.perf_counter()
    try:
        simulation = Simulation(setup, requests)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    all_records = simulation.records
    try:
        with _progress(name, simulation):
            simulation.run()
    except KeyboardInterrupt:
        simulation.drop_unfinished()
    ended = [
        request for request, record in zip(requests, all_records, strict=True) if record.ended_ns
    ]
    sys.stderr.write(
        f"{name}: {len(ended):,} requests, {simulation.clock.now_ns / 1e9:,.0f} s "
        f"simulated in {time.perf_counter() - began_s:.1f} s\n"
    )
    return simulation, ended


def _progress(name: str, simulation: Simulation) -> Progress:
    """Return a line on standard error with the virtual time, while it is a terminal."""
    last_s = simulation.records[-1].request.arrived_ns / 1e9

    class Simulated(ProgressColumn):
        def render(self, task: Task) -> Text:
            now_s = simulation.clock.now_ns / 1e9
            return Text(
                f"{name}: {now_s:,.0f} s simulated, the last request arrives at {last_s:,.0f} s"
            )

    progress = Progress(Simulated(), console=Console(stderr=True), transient=True)
    progress.add_task(name, total=None)
    progress.disable = not progress.console.is_terminal
    return progress
