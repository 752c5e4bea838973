"""`baton loadtest replay`, `poisson`, `sessions` and `agents`: one plan, one run, one folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loadtest.client.records import CallRecord
from loadtest.commands import options as o
from loadtest.commands.option_groups import with_options
from loadtest.commands.running import INTERRUPTED, run, run_and_show, show_and_write
from loadtest.metrics.turns import turn_figures
from loadtest.results.files import write_results
from loadtest.workloads.agent_traces import agent_calls
from loadtest.workloads.agents import Agents, agent_plan
from loadtest.workloads.agents import alone as alone_plan
from loadtest.workloads.agentx import write_agentx
from loadtest.workloads.call_graph import agent_trace_plan
from loadtest.workloads.plan import Plan
from loadtest.workloads.replay import is_recorded, recorded_plan, replay_plan
from loadtest.workloads.synthetic import OpenLoop, Sessions, open_loop_plan, session_plan
from loadtest.workloads.traces import TraceError, read_trace


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Options for replaying a trace."""

    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N requests.")] = None
    speed: Annotated[float, typer.Option(help="Divisor of the gaps between arrivals.")] = 1.0
    shrink: Annotated[float, typer.Option(help="Divisor of prompt and output lengths.")] = 1.0

    def plan(self, trace: Path, seed: int) -> Plan:
        """Return the plan that replays a trace."""
        if not is_recorded(trace):
            requests = read_trace(trace, self.limit)
            return replay_plan(
                requests, name=trace.name, speed=self.speed, shrink=self.shrink, seed=seed
            )
        if self.shrink != 1:
            raise TraceError(f"{trace}: recorded texts cannot be shrunk: remove --shrink")
        return recorded_plan(trace, limit=self.limit, speed=self.speed)


@dataclass(frozen=True, kw_only=True)
class AgentTrace(Recording):
    """Options for replaying sessions of agents."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay sessions instead: OpenTelemetry's GenAI spans (OTLP JSON lines), or "
            "aiperf's agent traces (a JSON file, or a folder of them)."
        ),
    ] = None

    def plan(self, trace: Path, seed: int) -> Plan:
        """Return the plan in which a request starts when those that it waits for have ended."""
        calls = agent_calls(trace, self.limit)
        return agent_trace_plan(
            calls, name=trace.name, seed=seed, speed=self.speed, shrink=self.shrink
        )


def convert(
    trace: Annotated[Path, typer.Argument(help="Trace of agents, as for `agents --trace`.")],
    folder: Annotated[Path, typer.Argument(help="New folder, with a JSON file per session.")],
) -> None:
    """Write a trace of agents, such as a fleet's own spans, in aiperf's format (weka_trace)."""
    with o.refusals():
        write_agentx(agent_calls(trace), folder)


@with_options("tenant_keys")
def replay(
    ctx: typer.Context,
    trace: Annotated[
        Path, typer.Argument(help="Mooncake JSONL, Azure CSV, or recorded requests (detected).")
    ],
    out: o.Out,
    recording: Recording,
    choices: o.Choices,
    repetition: o.Repetition,
) -> None:
    """Replay a recorded trace with its arrivals, lengths and shared prefixes.

    Recorded requests are JSON lines such as {"timestamp": MS, "body": {"messages": …}}.
    """
    with o.refusals():
        plan = recording.plan(trace, repetition.seed)
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=repetition.resume)


@with_options()
def poisson(
    ctx: typer.Context,
    out: o.Out,
    arrivals: OpenLoop,
    choices: o.Choices,
    repetition: o.Repetition,
) -> None:
    """Send requests at random times, independent of earlier responses (open loop).

    Shared prefixes, a hot tenant, long prompts and disconnecting clients can be added.
    """
    name = "poisson" if arrivals.cv == 1 else "gamma"
    with o.refusals():
        plan = open_loop_plan(arrivals, name=name, seed=repetition.seed)
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=repetition.resume)


@with_options("tenant_keys", "token_ids")
def sessions(
    ctx: typer.Context, out: o.Out, users: Sessions, choices: o.Choices, repetition: o.Repetition
) -> None:
    """Simulate users who read each response, think, and ask again (closed loop)."""
    with o.refusals():
        plan = session_plan(users, name="sessions", seed=repetition.seed)
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=repetition.resume)


@dataclass(frozen=True, kw_only=True)
class _AgentChoices(o.Choices):
    ignore_eos: o.IgnoreEos = False  # text after the end of a tool call would not be its JSON
    alone: Annotated[
        bool, typer.Option("--alone", help="First run one session alone, to compare TTFT with.")
    ] = False


@with_options("tenant_keys", "token_ids", "endpoint", "warmup_s", "ramp_s")
def agents(
    ctx: typer.Context,
    out: o.Out,
    load: Agents,
    recorded: AgentTrace,
    choices: _AgentChoices,
    repetition: o.Repetition,
) -> None:
    """Simulate agents with tools and growing prompts (closed loop), and count cached tokens.

    Every turn sends a tool result if the server called a tool, else a user's message. A server that
    already got this seed has its prompts cached: change --seed. With --trace a request starts when
    those that it waited for have ended, and sends made text of the recorded length.
    """
    trace = recorded.trace
    if trace is not None and (choices.alone or load != Agents()):
        o.fail("--trace has its own sessions: remove the options of made ones")
    with o.refusals():
        plan = (
            agent_plan(load, name="agents", seed=repetition.seed)
            if trace is None
            else recorded.plan(trace, repetition.seed)
        )
    if trace is not None:
        choices = replace(choices, ignore_eos=True)
    settings = o.run_options(choices, ctx.obj, tools=trace is None)
    compared: list[CallRecord] = []
    if choices.alone:
        o.check_out(out)
        before = run(alone_plan(plan), settings, None, label="alone")
        if not before.complete:
            raise typer.Exit(INTERRUPTED)
        write_results(out / "alone", before)
        compared = before.records
    results = run(plan, settings, out, label=plan.name, resume=repetition.resume)
    turns = turn_figures(results.records, compared)
    show_and_write(msgspec.structs.replace(results, turns=turns), out)
