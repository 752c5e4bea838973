"""The loads that several commands send, each as the options that describe it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from loadtest.commands import options as o
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
"""Parts of a load that are off while the option is 0, and the options that belong to each."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Options of requests that arrive at random."""

    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.0
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 100
    cv: Annotated[
        float, typer.Option(min=0, help="Burstiness of gaps: 0 even, 1 Poisson, 3 very bursty.")
    ] = 1.0
    prompt_tokens: o.PromptTokens = "lognormal:128,0.8,1024"
    answer_tokens: o.AnswerTokens = "lognormal:32,0.6,256"

    def plan(self, name: str, seed: int) -> Plan:
        """Return the plan, with its parameters for the report.

        Raises:
            ValueError: A length or a rate cannot be used.
        """
        load = OpenLoop(**_parsed(asdict(self)))
        return _told(open_loop_plan(load, name=name, seed=seed), asdict(self))


@dataclass(frozen=True, kw_only=True)
class Disturbed(Arrivals):
    """Options of requests that arrive at random, and of what disturbs them."""

    prefix_groups: Annotated[int, typer.Option(min=0, help="Groups that share a prefix.")] = 0
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Length of their prefix.")] = 256
    hot_tenant: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of requests that one tenant sends.")
    ] = 0.0
    long_every: Annotated[int, typer.Option(min=0, help="Each N-th prompt is long.")] = 0
    long_tokens: Annotated[int, typer.Option(min=1, help="Length of long prompts.")] = 2048
    abort_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of clients that hang up.")
    ] = 0.0
    abort_after_s: Annotated[float, typer.Option(min=0, help="So long after the send.")] = 0.5


@dataclass(frozen=True, kw_only=True)
class Users:
    """Options of users who ask, read, think and ask again."""

    users: Annotated[int, typer.Option(min=1, help="At the same time.")] = 4
    sessions: Annotated[int, typer.Option(min=1, help="Of each user, one after another.")] = 2
    turns: Annotated[int, typer.Option(min=1, help="Questions in a session.")] = 4
    think_s: Annotated[float, typer.Option(min=0, help="Mean pause before the next one.")] = 2.0
    system_tokens: Annotated[int, typer.Option(min=0, help="Text that all begin with.")] = 64
    prompt_tokens: o.PromptTokens = "lognormal:48,0.6,512"
    answer_tokens: o.AnswerTokens = "lognormal:32,0.6,256"
    tool_calls: Annotated[int, typer.Option(min=0, help="Tool results after each question.")] = 0
    tool_tokens: Annotated[int, typer.Option(min=1, help="Length of a tool's result.")] = 200
    tool_s: Annotated[float, typer.Option(min=0, help="How long a tool takes.")] = 0.2

    def plan(self, seed: int) -> Plan:
        """Return the plan, with its parameters for the report.

        Raises:
            LengthsError: A length cannot be used.
        """
        load = Sessions(**_parsed(asdict(self)))
        return _told(session_plan(load, name="sessions", seed=seed), asdict(self))


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Options of how a trace is played."""

    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None
    speed: Annotated[float, typer.Option(help="Gaps between arrivals are divided by it.")] = 1.0
    shrink: Annotated[float, typer.Option(help="Lengths are divided by it.")] = 1.0

    def plan(self, trace: Path, seed: int) -> Plan:
        """Return the plan that plays a trace.

        Raises:
            TraceError: The trace cannot be read, or not be shrunk.
            ValueError: A number cannot be used.
            OSError: There is no such file.
        """
        if not is_recorded(trace):
            requests = read_trace(trace, self.limit)
            return replay_plan(
                requests, name=trace.name, speed=self.speed, shrink=self.shrink, seed=seed
            )
        if self.shrink != 1:
            raise TraceError(f"{trace}: recorded texts can't be shrunk; leave --shrink out")
        return recorded_plan(trace, limit=self.limit, speed=self.speed)


def _parsed(chosen: dict[str, Any]) -> dict[str, Any]:
    lengths = {name: parse_lengths(chosen[name]) for name in ("prompt_tokens", "answer_tokens")}
    return chosen | lengths


def _told(plan: Plan, chosen: dict[str, Any]) -> Plan:
    """The plan with those of its options that are on."""
    off = {name for switch, names in _SWITCHES.items() if not chosen.get(switch) for name in names}
    return msgspec.structs.replace(
        plan, parameters={name: value for name, value in chosen.items() if name not in off}
    )
