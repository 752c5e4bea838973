"""aiperf's agent traces (AgentX, Weka): one JSON object per session, in a file or in a folder.

{"id": …, "block_size": 64, "hash_id_scope": "local", "models": […], "requests": [
    {"type": "n", "t": SECONDS, "api_time": SECONDS, "in": TOKENS, "out": TOKENS, "hash_ids": []},
    {"type": "subagent", "t": SECONDS, "agent_id": …, "requests": […]}]}
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from loadtest.workloads.call_graph import (
    MAX_BLOCKS,
    MAX_CALLS,
    MAX_TOKENS,
    AgentCall,
    CallDependencies,
    TracePart,
    in_order,
)
from loadtest.workloads.traces import TraceError

_MAX_FILE_BYTES = 1 << 26
_RAMP_NS = 2_000_000_000  # over which the sessions of a folder start: their times are their own

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e8)]


class _Request(msgspec.Struct, tag_field="type", tag="n"):
    t: _Seconds
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = msgspec.field(name="in")
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = msgspec.field(name="out")
    model: str = "unknown"
    hash_ids: list[int] = []
    api_time: _Seconds | None = None


class _Streamed(_Request, tag_field="type", tag="s"):
    pass


class _Subagent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: _Seconds
    agent_id: str
    requests: list[_Request | _Streamed]
    duration_ms: Annotated[int, msgspec.Meta(ge=0, le=10**11)] | None = None


class _Trace(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    requests: list[_Request | _Streamed | _Subagent]
    hash_id_scope: Literal["local"] = "local"


def read_agentx(path: Path) -> list[AgentCall]:
    """Read the sessions of a file, or of a folder's ``*.json`` files.

    Raises:
        TraceError: A file is not such a trace, or is too large.
        OSError: A file cannot be read.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    calls: list[AgentCall] = []
    order = CallDependencies()
    names: set[str] = set()
    blocks: dict[tuple[object, int], int] = {}  # after a session's name, or another block
    for number, file in enumerate(files):
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise TraceError(f"{file}: larger than {_MAX_FILE_BYTES:,} bytes")
        try:
            trace = msgspec.json.decode(file.read_bytes(), type=_Trace)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TraceError(f"{file}: {error}") from error
        if trace.id in names:
            raise TraceError(f"{file}: id: {trace.id!r} is in two files")
        names.add(trace.id)
        order.add(_parts(trace, calls, blocks, number * _RAMP_NS // len(files)))
        if len(calls) > MAX_CALLS:
            raise TraceError(f"{file}: more than {MAX_CALLS:,} requests")
    return in_order(calls, order, path)


def _parts(
    trace: _Trace, calls: list[AgentCall], blocks: dict[tuple[object, int], int], offset_ns: int
) -> list[TracePart]:
    """Add the calls of a trace to ``calls``; return its parts."""

    def part(request: _Request, agent: str, since_s: float) -> TracePart:
        start_ns = offset_ns + _ns(since_s + request.t)
        end_ns = offset_ns + _ns(since_s + request.t + (request.api_time or 0.0))
        prompt: list[int] = []
        for block in request.hash_ids[: request.input_length // trace.block_size]:
            before = prompt[-1] if prompt else trace.id
            prompt.append(blocks.setdefault((before, block), len(blocks)))
        if len(blocks) > MAX_BLOCKS:
            raise TraceError(f"session {trace.id}: hash_ids: more than {MAX_BLOCKS:,} blocks")
        calls.append(
            AgentCall(
                session=trace.id,
                agent=agent,
                start_ns=start_ns,
                end_ns=end_ns,
                input_tokens=request.input_length,
                output_tokens=max(request.output_length, 1),
                model=request.model,
                blocks=tuple(prompt),
                block_tokens=trace.block_size,
            )
        )
        return TracePart(start_ns, end_ns, len(calls) - 1)

    parts = []
    for entry in trace.requests:
        if isinstance(entry, _Request):
            parts.append(part(entry, "", 0.0))
            continue
        start_ns = offset_ns + _ns(entry.t)
        scope = TracePart(start_ns, start_ns + (entry.duration_ms or 0) * 10**6)
        for request in entry.requests:  # times of older traces count from the entry's
            inner = part(request, entry.agent_id, entry.t if request.t + 1e-6 < entry.t else 0.0)
            scope.parts.append(inner)
            scope.widen(inner)
        if scope.parts:
            parts.append(scope)
    return parts


def _ns(seconds: float) -> int:
    return round(seconds * 1e6) * 1000  # so that sums of decimals compare


def write_agentx(calls: Sequence[AgentCall], folder: Path) -> None:
    """Write each session as a file of a new folder. Agents of agents become the session's own."""
    folder.mkdir(parents=True)
    sessions: dict[str, list[AgentCall]] = {}
    for call in calls:
        sessions.setdefault(call.session, []).append(call)
    for number, (session, members) in enumerate(sessions.items()):
        models = sorted({call.model for call in members})
        agents: dict[str, list[dict[str, Any]]] = {"": []}
        for call in members:
            written = _written(call, members[0].start_ns)
            if call.agent not in agents:
                agents[call.agent] = []
                entry = {"type": "subagent", "t": written["t"], "agent_id": call.agent}
                entry |= {"subagent_type": "agent", "status": "completed", "models": models}
                agents[""].append(entry | {"requests": agents[call.agent]})
            agents[call.agent].append(written)
        trace = {"id": session, "models": models, "block_size": members[0].block_tokens}
        trace |= {"hash_id_scope": "local", "requests": agents[""]}
        (folder / f"session-{number:05}.json").write_bytes(msgspec.json.encode(trace))


def _written(call: AgentCall, zero_ns: int) -> dict[str, Any]:
    start_us, end_us = (round((ns - zero_ns) / 1e3) for ns in (call.start_ns, call.end_ns))
    times = {"type": "n", "t": start_us / 1e6, "api_time": (end_us - start_us) / 1e6}
    lengths = {"in": call.input_tokens, "out": call.output_tokens, "hash_ids": call.blocks}
    return times | {"model": call.model} | lengths
