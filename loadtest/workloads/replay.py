"""Plans from a recorded trace, or from recorded requests of real clients with their bodies.

Scaling lengths and gaps of a trace preserves shared prefixes. Requests are one object per line:

    {"timestamp": 1500, "body": {"messages": [{"role": "user", "content": "…"}], "max_tokens": 50}}

``timestamp`` is in milliseconds of any clock. ``body`` is the body of a request to
``/v1/chat/completions`` (with ``messages``) or ``/v1/completions`` (with ``prompt``).
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from loadtest.workloads.arrivals import spread_ticks_s
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import UNIQUE_KEYS
from loadtest.workloads.traces import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRequest


def replay_plan(
    requests: Sequence[TraceRequest],
    *,
    name: str,
    speed: float = 1.0,
    shrink: float = 1.0,
    seed: int = 0,
) -> Plan:
    """Return the plan that replays a trace, with gaps ÷ ``speed`` and lengths ÷ ``shrink``.

    A block hash stands for the same 512 ÷ shrink words wherever it occurs, so that prompts share
    prefixes as in the trace. ``seed`` chooses the words, and arrivals within a recorded tick.

    Raises:
        ValueError: ``speed`` or ``shrink`` is not above 0, or a hash is too large for a key.
    """
    if not speed > 0 or not shrink > 0:
        raise ValueError(f"speed {speed:g} and shrink {shrink:g} must be above 0")
    rng = np.random.default_rng(seed)
    recorded_s = np.array([request.arrival_s for request in requests])
    arrivals_s = spread_ticks_s(rng, recorded_s) / speed
    conversations = tuple(
        Conversation(start_s=float(start_s), turns=(_turn(index, request, shrink),))
        for index, (start_s, request) in enumerate(zip(arrivals_s, requests, strict=True))
    )
    parameters: dict[str, str | int | float] = {"trace": name, "requests": len(requests)}
    parameters |= {"speed": float(speed), "shrink": float(shrink)}
    return Plan(name="replay", seed=seed, conversations=conversations, parameters=parameters)


def _turn(index: int, request: TraceRequest, shrink: float) -> Turn:
    prompt_tokens = max(1, round(request.input_tokens / shrink))
    return Turn(
        index=index,
        prompt=_segments(index, request.block_hashes, prompt_tokens, shrink),
        max_tokens=max(1, round(request.output_tokens / shrink)),
    )


def _segments(
    index: int, hashes: tuple[int, ...], prompt_tokens: int, shrink: float
) -> tuple[Segment, ...]:
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS / shrink))
    segments = []
    left = prompt_tokens
    for block_hash in hashes:
        if not 0 <= block_hash < UNIQUE_KEYS:
            raise ValueError(f"request {index}: hash {block_hash} is not in [0, 2**40)")
        if left <= 0:
            break
        segments.append(Segment(block_hash, min(block_tokens, left)))
        left -= block_tokens
    if left > 0:  # no hashes were recorded, or rounding left a few tokens
        segments.append(Segment(UNIQUE_KEYS + index, left))
    return tuple(segments)


class _Line(msgspec.Struct):
    timestamp: float  # ms
    body: dict[str, msgspec.Raw]


def is_recorded(path: Path) -> bool:
    """Return whether a file's first line is a recorded request."""
    with path.open("rb") as file:
        try:
            msgspec.json.decode(file.readline(), type=_Line)
        except msgspec.DecodeError:
            return False
    return True


def recorded_plan(path: Path, *, limit: int | None = None, speed: float = 1.0) -> Plan:
    """Return the plan that replays recorded requests, with gaps divided by ``speed``.

    ``model`` and ``stream`` are set when a request is sent; the rest of a body stays unchanged.

    Raises:
        TraceError: A line cannot be read, or has neither messages nor a prompt.
        OSError: The file cannot be opened.
    """
    if not speed > 0:
        raise TraceError(f"speed {speed:g} must be above 0")
    with path.open("rb") as file:
        numbered = ((n, line) for n, line in enumerate(file, start=1) if line.strip())
        lines = [_read(path, number, line) for number, line in islice(numbered, limit)]
    if not lines:
        raise TraceError(f"{path}: contains no requests")
    lines.sort(key=lambda line: line.timestamp)
    conversations = tuple(
        Conversation(
            start_s=(line.timestamp - lines[0].timestamp) / 1e3 / speed,
            turns=(_recorded_turn(index, line),),
        )
        for index, line in enumerate(lines)
    )
    parameters: dict[str, str | int | float] = {"recorded": path.name, "requests": len(lines)}
    parameters["speed"] = float(speed)
    return Plan(name="recorded", seed=0, conversations=conversations, parameters=parameters)


def _read(path: Path, number: int, line: bytes) -> _Line:
    try:
        entry = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}:{number}: {error}") from error
    if not entry.body.keys() & {"messages", "prompt"}:
        raise TraceError(f"{path}:{number}: the body has neither messages nor a prompt")
    return entry


def _recorded_turn(index: int, line: _Line) -> Turn:
    limit = line.body.get("max_completion_tokens", line.body.get("max_tokens"))
    try:
        max_tokens = msgspec.json.decode(limit, type=int) if limit is not None else 0
    except msgspec.DecodeError:
        max_tokens = 0  # the server reports the error
    body = msgspec.json.encode(line.body).decode()
    return Turn(index=index, prompt=(), max_tokens=max_tokens, body=body)
