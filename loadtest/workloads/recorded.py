"""Recorded requests of real clients with their bodies, replayed on another server.

    {"timestamp": 1500, "body": {"messages": [{"role": "user", "content": "…"}], "max_tokens": 50}}

One object per line. ``timestamp`` is in milliseconds of any clock. ``body`` is the body of a
request to ``/v1/chat/completions`` (with ``messages``) or ``/v1/completions`` (with ``prompt``).
"""

from itertools import islice
from pathlib import Path

import msgspec

from loadtest.workloads.plan import Conversation, Plan, Turn
from loadtest.workloads.traces import TraceError


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
            start_s=(line.timestamp - lines[0].timestamp) / 1e3 / speed, turns=(_turn(index, line),)
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


def _turn(index: int, line: _Line) -> Turn:
    limit = line.body.get("max_completion_tokens", line.body.get("max_tokens"))
    try:
        max_tokens = msgspec.json.decode(limit, type=int) if limit is not None else 0
    except msgspec.DecodeError:
        max_tokens = 0  # the server reports the error
    body = msgspec.json.encode(line.body).decode()
    return Turn(index=index, prompt=(), max_tokens=max_tokens, body=body)
