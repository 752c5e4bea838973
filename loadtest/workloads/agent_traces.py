"""Traces of agents in either format, detected by content."""

from collections.abc import Callable
from pathlib import Path

from loadtest.workloads.agentx import read_agentx
from loadtest.workloads.call_graph import AgentCall
from loadtest.workloads.otel_spans import read_spans
from loadtest.workloads.traces import TraceError

_HEAD_BYTES = 4096


def is_agent_trace(path: Path) -> bool:
    """Return whether a folder or file is a trace of agents."""
    return path.is_dir() or _reader(path) is not None


def agent_calls(path: Path, limit: int | None = None) -> list[AgentCall]:
    """Return the first calls of a trace of agents.

    Raises:
        TraceError: The trace has another format, is damaged, or is too large.
        OSError: A file cannot be read.
    """
    read = read_agentx if path.is_dir() else _reader(path)
    if read is None:
        raise TraceError(f"{path}: neither spans in OTLP JSON lines nor aiperf's agent traces")
    return read(path)[:limit]


def _reader(path: Path) -> Callable[[Path], list[AgentCall]] | None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if b'"resourceSpans"' in head:
        return read_spans
    return read_agentx if b'"requests"' in head and b'"id"' in head else None
