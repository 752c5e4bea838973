"""Loads that several commands share, as dataclasses of options."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from loadtest.commands import options as o
from loadtest.workloads.agent_traces import agent_calls
from loadtest.workloads.agents import MAX_TOOLS, Agents, agent_plan
from loadtest.workloads.call_graph import agent_trace_plan
from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.plan import Plan
from loadtest.workloads.recorded import is_recorded, recorded_plan
from loadtest.workloads.replay import replay_plan
from loadtest.workloads.synthetic import OpenLoop, Sessions, open_loop_plan, session_plan
from loadtest.workloads.traces import TraceError, read_trace

_SWITCHES = {
    "prefix_groups": ("prefix_groups", "prefix_tokens"),
    "hot_tenant": ("hot_tenant",),
    "long_every": ("long_every", "long_tokens"),
    "abort_share": ("abort_share", "abort_after_s"),
    "tool_calls": ("tool_calls", "tool_tokens", "tool_s"),
}
"""Options that belong to a part of a load, by the option that enables it."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Options of random arrivals."""

    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.0
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 100
    cv: Annotated[
        float, typer.Option(min=0, help="Burstiness of arrivals: 0 even, 1 Poisson, 3 very bursty.")
    ] = 1.0
    prompt_tokens: o.PromptTokens = "lognormal:128,0.8,1024"
    answer_tokens: o.AnswerTokens = "lognormal:32,0.6,256"

    def plan(self, name: str, seed: int) -> Plan:
        """Return the plan, with its parameters for the report."""
        load = OpenLoop(**_parsed(asdict(self)))
        return _with_parameters(open_loop_plan(load, name=name, seed=seed), asdict(self))


@dataclass(frozen=True, kw_only=True)
class Disturbed(Arrivals):
    """Options of random arrivals with disturbances."""

    prefix_groups: Annotated[int, typer.Option(min=0, help="Groups that share a prefix.")] = 0
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a shared prefix.")] = 256
    hot_tenant: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of requests from one tenant.")
    ] = 0.0
    long_every: Annotated[int, typer.Option(min=0, help="Make every N-th prompt long.")] = 0
    long_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a long prompt.")] = 2048
    abort_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of clients that disconnect.")
    ] = 0.0
    abort_after_s: Annotated[
        float, typer.Option(min=0, help="Mean seconds from sending until a client disconnects.")
    ] = 0.5


@dataclass(frozen=True, kw_only=True)
class Users:
    """Options of users in conversations."""

    users: Annotated[int, typer.Option(min=1, help="Concurrent users.")] = 4
    sessions: Annotated[int, typer.Option(min=1, help="Consecutive sessions per user.")] = 2
    turns: Annotated[int, typer.Option(min=1, help="Questions per session.")] = 4
    think_s: Annotated[float, typer.Option(min=0, help="Mean seconds before the next one.")] = 2.0
    system_tokens: Annotated[int, typer.Option(min=0, help="Tokens of the system prompt.")] = 64
    prompt_tokens: o.PromptTokens = "lognormal:48,0.6,512"
    answer_tokens: o.AnswerTokens = "lognormal:32,0.6,256"
    tool_calls: Annotated[int, typer.Option(min=0, help="Tool results per question.")] = 0
    tool_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a tool result.")] = 200
    tool_s: Annotated[float, typer.Option(min=0, help="Seconds that a tool takes.")] = 0.2

    def plan(self, seed: int) -> Plan:
        """Return the plan, with its parameters for the report."""
        load = Sessions(**_parsed(asdict(self)))
        return _with_parameters(session_plan(load, name="sessions", seed=seed), asdict(self))


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
    answer_tokens: o.AnswerTokens = "lognormal:60,0.6,250"

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


def _parsed(chosen: dict[str, Any]) -> dict[str, Any]:
    lengths = {name: parse_lengths(chosen[name]) for name in ("prompt_tokens", "answer_tokens")}
    return chosen | lengths


def _with_parameters(plan: Plan, chosen: dict[str, Any]) -> Plan:
    off = {name for switch, names in _SWITCHES.items() if not chosen.get(switch) for name in names}
    return msgspec.structs.replace(
        plan, parameters={name: value for name, value in chosen.items() if name not in off}
    )
