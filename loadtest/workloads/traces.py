"""Traces with arrivals and lengths: Mooncake's JSONL and Azure's CSV, detected by content.

Sources: kvcache-ai/Mooncake (FAST'25 release, Apache-2.0) and Azure/AzurePublicDataset (CC-BY-4.0).
Neither contains text; ``loadtest.workloads.prompts`` makes prompts from lengths and hashes.
"""

import csv
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per entry of Mooncake's ``hash_ids``."""

_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceRequest(NamedTuple):
    """Request of a trace."""

    arrival_s: float  # since the first request of the trace
    input_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()  # one per 512 input tokens; the last may be partial
    after: tuple[int, ...] = ()  # places of the requests that must have ended; none: at its arrival
    pause_s: float = 0.0  # from the end of the last of these


class TraceError(ValueError):
    """Invalid trace file; the message has file, line and expected content."""


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a Mooncake JSONL or Azure CSV file, in the order of arrival, the first request at 0 s.

    Raises:
        TraceError: The format is unknown, the file is empty, or a line cannot be read.
        OSError: The file cannot be opened.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            first = file.read(1)
            file.seek(0)
            lines = _mooncake(path, file) if first == "{" else _azure(path, file)
            requests = sorted(islice(lines, limit), key=lambda request: request.arrival_s)
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}: not a text file ({error.reason})") from error
    if not requests:
        raise TraceError(f"{path}: contains no requests")
    start_s = requests[0].arrival_s
    return [request._replace(arrival_s=request.arrival_s - start_s) for request in requests]


def _mooncake(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        lengths = _lengths(path, number, row.input_length, row.output_length)
        yield TraceRequest(row.timestamp / 1e3, *lengths, tuple(row.hash_ids))


def _azure(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    rows = csv.reader(file)
    header = next(rows, [])
    if header != _AZURE_COLUMNS:
        raise TraceError(
            f"{path}:1: neither Mooncake's JSON lines nor Azure's CSV "
            f"(expected header {','.join(_AZURE_COLUMNS)})"
        )
    for row in rows:
        if not row:
            continue
        try:
            moment, context, generated = row
            # Azure has seven decimal places; Python reads six.
            arrival_s = datetime.fromisoformat(moment[:26] + "+00:00").timestamp()
            lengths = _lengths(path, rows.line_num, int(context), int(generated))
        except TraceError:
            raise
        except ValueError as error:
            raise TraceError(f"{path}:{rows.line_num}: {error}") from error
        yield TraceRequest(arrival_s, *lengths)


def _lengths(path: Path, line: int, input_tokens: int, output_tokens: int) -> tuple[int, int]:
    if input_tokens < 1 or output_tokens < 0:
        raise TraceError(f"{path}:{line}: {input_tokens} input and {output_tokens} output tokens")
    return input_tokens, output_tokens
