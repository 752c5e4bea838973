"""Calls of agents as a dependency graph. Reads no file, and has no clock.

    scope (a trace, an agent, a tool) ─▶ part: a call, or a scope

In a scope a part follows the parts that had ended when it started (parts that overlap do not wait
for each other); what passed since then, such as a tool's time, is its pause. What follows a scope
waits for the last calls in it: sub-agents fork and join.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import UNIQUE_KEYS
from loadtest.workloads.traces import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRequest

MAX_CALLS = 100_000
MAX_EDGES = 1_000_000
MAX_BLOCKS = 10_000_000
MAX_TOKENS = 10_000_000  # of a prompt
BLOCK_TOKENS = 64


class AgentCall(NamedTuple):
    """Call of a trace; ``after`` has the positions of the calls that it waits for, all before it.

    Calls are in the order of their starts; times count from the first one.
    """

    session: str
    agent: str  # "" for the session's main agent
    start_ns: int
    end_ns: int
    input_tokens: int
    output_tokens: int
    model: str = ""
    blocks: tuple[int, ...] = ()  # of the prompt, full ones; equal if all text up to them is equal
    block_tokens: int = BLOCK_TOKENS
    after: tuple[int, ...] = ()


@dataclass(slots=True)
class TracePart:
    """Call, by its number, or scope with parts."""

    start_ns: int
    end_ns: int
    call: int = -1
    parts: list["TracePart"] = field(default_factory=list)

    def widen(self, part: "TracePart") -> None:
        """Make the scope last at least as long as a part of it."""
        self.start_ns = min(self.start_ns, part.start_ns)
        self.end_ns = max(self.end_ns, part.end_ns)


class CallDependencies:
    """Finds what each call waits for; ``after`` lists the calls in an order that respects it."""

    def __init__(self) -> None:
        self.after: dict[int, set[int]] = {}
        self._edges = 0

    def add(self, parts: Iterable[TracePart], before: Iterable[int] = ()) -> set[int]:
        """Order the parts of a scope, after the calls ``before``; return the calls at its end.

        Raises:
            TraceError: The graph has more than a million edges.
        """
        before = set(before)
        running: list[tuple[int, int, int, set[int]]] = []  # end, start, number, calls at its end
        ended: list[tuple[int, int, int, set[int]]] = []  # without those that another one follows
        latest_ns = -1  # latest start of a part that has ended
        for number, part in enumerate(sorted(parts, key=lambda part: part.start_ns)):
            while running and running[0][:2] < (part.start_ns, part.start_ns):
                ended.append(heapq.heappop(running))
                latest_ns = max(latest_ns, ended[-1][1])
            ended = [each for each in ended if each[0] > latest_ns or each[1] == latest_ns]
            after = set().union(*(each[3] for each in ended)) if ended else before
            self._edges += len(after)
            if self._edges > MAX_EDGES:
                raise TraceError(f"the calls wait for each other in over {MAX_EDGES:,} ways")
            if part.call >= 0:
                self.after[part.call] = set(after)
            ends = {part.call} if part.call >= 0 else self.add(part.parts, after)
            heapq.heappush(running, (part.end_ns, part.start_ns, number, ends))
        latest_ns = max([latest_ns, *(each[1] for each in running)])
        last = [each for each in ended + running if each[0] > latest_ns or each[1] == latest_ns]
        return set().union(*(each[3] for each in last)) if last else before

    def numbers(self, calls: Sequence[AgentCall]) -> list[int]:
        """Return the calls' numbers by their starts; what a call waits for is before it."""
        return sorted(self.after, key=lambda number: calls[number].start_ns)


def in_order(calls: Sequence[AgentCall], order: CallDependencies, path: Path) -> list[AgentCall]:
    """Return the calls by their starts, from 0 on, with the places of those that they wait for."""
    ordered = order.numbers(calls)
    if not ordered:
        raise TraceError(f"{path}: contains no requests of a model")
    place = {number: index for index, number in enumerate(ordered)}
    zero_ns = calls[ordered[0]].start_ns
    return [
        calls[number]._replace(
            start_ns=calls[number].start_ns - zero_ns,
            end_ns=calls[number].end_ns - zero_ns,
            after=tuple(sorted(place[before] for before in order.after[number])),
        )
        for number in ordered
    ]


class CallFrontier:
    """Decides when each call of a graph may start.

    ``after`` has for each call the numbers of those that it waits for; its pause counts from the
    end of the last of these, or from the beginning.
    """

    def __init__(self, after: Sequence[Iterable[int]], pauses_s: Sequence[float]) -> None:
        self._pauses_s = pauses_s
        self._missing = [len(set(numbers)) for numbers in after]
        self._followers: list[list[int]] = [[] for _ in after]
        for call, numbers in enumerate(after):
            for number in set(numbers):
                if not 0 <= number < call:
                    raise TraceError(f"call {call} waits for call {number}, which is not before it")
                self._followers[number].append(call)

    def begin(self, now_s: float) -> list[tuple[int, float]]:
        """Return the calls that wait for none, with the times at which they start."""
        first = (call for call, missing in enumerate(self._missing) if not missing)
        return [(call, now_s + self._pauses_s[call]) for call in first]

    def ended(self, number: int, now_s: float) -> list[tuple[int, float]]:
        """Return the calls that waited only for this one, with the times at which they start."""
        ready = []
        for call in self._followers[number]:
            self._missing[call] -= 1
            if not self._missing[call]:
                ready.append((call, now_s + self._pauses_s[call]))
        return ready


def pauses_s(calls: Sequence[AgentCall]) -> list[float]:
    """Return the pause before each call; of those that wait for none, their recorded start."""
    return [
        max(call.start_ns - max((calls[number].end_ns for number in call.after), default=0), 0)
        / 1e9
        for call in calls
    ]


def trace_requests(calls: Sequence[AgentCall]) -> list[TraceRequest]:
    """Return the requests that the simulator runs."""
    return [
        TraceRequest(
            arrival_s=call.start_ns / 1e9,
            input_tokens=call.input_tokens,
            output_tokens=call.output_tokens,
            block_hashes=_larger_blocks(call, UNIQUE_KEYS + MAX_TOKENS * index),
            after=call.after,
            pause_s=pause_s,
        )
        for index, (call, pause_s) in enumerate(zip(calls, pauses_s(calls), strict=True))
    ]


def _larger_blocks(call: AgentCall, unique: int) -> tuple[int, ...]:
    """Return the names of the simulator's blocks: those of the blocks at their ends."""
    ends = range(MOONCAKE_BLOCK_TOKENS, call.input_tokens + MOONCAKE_BLOCK_TOKENS, 512)
    at = [-(-end // call.block_tokens) - 1 for end in ends]
    return tuple(call.blocks[place] if place < len(call.blocks) else unique + place for place in at)


def agent_trace_plan(
    calls: Sequence[AgentCall], *, name: str, seed: int, speed: float, shrink: float
) -> Plan:
    """Return the plan, a conversation per session, with pauses ÷ ``speed``, lengths ÷ ``shrink``.

    Raises:
        TraceError: ``speed`` or ``shrink`` is not above 0.
    """
    if not speed > 0 or not shrink > 0:
        raise TraceError(f"speed {speed:g} and shrink {shrink:g} must be above 0")
    pauses = pauses_s(calls)
    owners: dict[int, int] = {}
    members: dict[str, list[int]] = {}
    agents: dict[tuple[str, str], list[int]] = {}
    places: list[tuple[int, int]] = []  # of each call: in its session, and in its agent
    for index, call in enumerate(calls):
        own = members.setdefault(call.session, [])
        of_agent = agents.setdefault((call.session, call.agent), [len(agents)])
        places.append((len(own), len(of_agent)))
        own.append(index)
        of_agent.append(index)
    conversations = []
    for session, indexes in members.items():
        start_s = pauses[indexes[0]]
        turns = [
            Turn(
                index=index,
                prompt=_segments(index, calls[index], owners, shrink),
                max_tokens=max(1, round(calls[index].output_tokens / shrink)),
                think_s=(pauses[index] - (0.0 if calls[index].after else start_s)) / speed,
                session=agents[session, calls[index].agent][0],
                number=places[index][1],
                after=tuple(places[before][0] for before in calls[index].after),
            )
            for index in indexes
        ]
        conversations.append(
            Conversation(start_s=start_s / speed, turns=tuple(turns), is_graph=True)
        )
    parameters: dict[str, str | int | float] = {"trace": name, "requests": len(calls)}
    parameters |= {"agents": len(agents), "speed": float(speed), "shrink": float(shrink)}
    return Plan(name="agents", seed=seed, conversations=tuple(conversations), parameters=parameters)


def _segments(
    index: int, call: AgentCall, owners: dict[int, int], shrink: float
) -> tuple[Segment, ...]:
    """Return the prompt: a run of blocks is the text of the first call that had them."""
    keys = [owners.setdefault(block, index) for block in call.blocks]
    runs = [(key, len(list(run)) * call.block_tokens) for key, run in groupby(keys)]
    segments = []
    end = shrunk_end = 0
    for key, tokens in [*runs, (UNIQUE_KEYS + index, call.input_tokens)]:
        end = min(end + tokens, call.input_tokens)
        tokens = round(end / shrink) - shrunk_end
        shrunk_end += tokens
        if tokens > 0:
            segments.append(Segment(key, tokens))
    return tuple(segments) or (Segment(UNIQUE_KEYS + index, 1),)
