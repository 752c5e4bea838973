"""Loads that several commands share, as dataclasses of options."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loadtest.workloads.agent_traces import agent_calls
from loadtest.workloads.agents import MAX_TOOLS, Agents, agent_plan
from loadtest.workloads.call_graph import agent_trace_plan
from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.plan import Plan
from loadtest.workloads.recorded import is_recorded, recorded_plan
from loadtest.workloads.replay import replay_plan
from loadtest.workloads.synthetic import AnswerTokens
from loadtest.workloads.traces import TraceError, read_trace


@dataclass(frozen=True, kw_only=True)
class AgentSessions:
    """Options of agents with tools."""

    sessions: Annotated[int, typer.Option(min=1, help="Concurrent sessions.")] = 10
    turns: Annotated[int, typer.Option(min=1, help="Requests per session.")] = 8
    think_s: Annotated[
        float, typer.Option(min=0, help="Mean seconds that a tool or the user takes.")
    ] = 2.0
    tools: Annotated[int, typer.Option(min=1, max=MAX_TOOLS, help="Number of tools.")] = 24
    system_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the system prompt and the tools together.")
    ] = 19_000
    shared: Annotated[
        bool, typer.Option(help="Give all sessions the same system prompt and tools.")
    ] = True
    turn_tokens: Annotated[
        str,
        typer.Option(
            help="Tokens that each turn adds, in the format of --prompt-tokens elsewhere."
        ),
    ] = "uniform:500-2000"
    result_bytes: Annotated[
        int, typer.Option(min=1, help="Largest message or tool result in bytes.")
    ] = 8192
    answer_tokens: AnswerTokens = "lognormal:60,0.6,250"

    def plan(self, seed: int) -> Plan:
        """Return the plan, with its parameters for the report."""
        chosen = asdict(self)
        lengths = {name: parse_lengths(chosen[name]) for name in ("turn_tokens", "answer_tokens")}
        plan = agent_plan(Agents(**(chosen | lengths)), name="agents", seed=seed)
        shown = chosen | {"shared": "yes" if self.shared else "no"}
        return msgspec.structs.replace(plan, parameters=shown)


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
