"""Loads that several commands share, as dataclasses of options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from loadtest.workloads.agent_traces import agent_calls
from loadtest.workloads.call_graph import agent_trace_plan
from loadtest.workloads.plan import Plan
from loadtest.workloads.recorded import is_recorded, recorded_plan
from loadtest.workloads.replay import replay_plan
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
