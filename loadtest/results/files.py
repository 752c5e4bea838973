"""Files in a run's folder.

DIR/results.json     everything: options, summary, one record per request
DIR/report.html      the same for people
DIR/partial.jsonl    during a run and after Ctrl-C: the records so far, for ``--resume``
"""

from pathlib import Path
from typing import IO, Literal

import msgspec

from loadtest.client.records import CallRecord, ClientReport
from loadtest.metrics.summary import Summary
from loadtest.metrics.turns import TurnFigures

VERSION: Literal[1] = 1
_RESULTS = "results.json"
_PARTIAL = "partial.jsonl"


class ResultsError(ValueError):
    """Results that cannot be read, or belong to another run; the message has the fix."""


class SearchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one rate of a search."""

    rate: float
    attainment: float
    met: bool
    good_per_s: float
    client_was_bottleneck: bool


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run, complete or interrupted."""

    version: Literal[1] = VERSION
    command: str
    created: str  # ISO 8601, UTC
    url: str
    model: str
    server: dict[str, str]  # properties of the server: engine, endpoint, options
    workload: str
    seed: int
    parameters: dict[str, str | int | float]
    planned_requests: int
    complete: bool
    summary: Summary
    search: list[SearchPoint] = []
    turns: list[TurnFigures] = []  # of agents
    clients: list[ClientReport]
    records: list[CallRecord]


def check_unused(folder: Path, *, resume: bool = False) -> None:
    """Check that a folder has no results that a run would overwrite.

    Raises:
        ResultsError: It has the results of a complete run, or an interrupted one and no ``resume``.
    """
    if (folder / _PARTIAL).exists():
        if not resume:
            raise ResultsError(
                f"{folder} has an interrupted run: continue it with --resume, or give another --out"
            )
    elif (folder / _RESULTS).exists():
        raise ResultsError(f"{folder} has the results of a run: give another --out, or remove it")


def write_whole(file: Path, content: bytes) -> Path:
    """Write a file atomically, and create its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".new")
    scratch.write_bytes(content)
    scratch.replace(file)
    return file


def write_results(folder: Path, results: Results) -> Path:
    """Write ``results.json`` to a folder, atomically."""
    return write_whole(folder / _RESULTS, msgspec.json.encode(results))


def read_results(path: Path) -> Results:
    """Read a results file, or the one in a folder.

    Raises:
        ResultsError: The file cannot be read, or is not of this version.
    """
    file = path / _RESULTS if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=Results)
    except OSError as error:
        raise ResultsError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ResultsError(f"{file} has no results of version {VERSION}: {error}") from error


class _Header(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    # First line of the partial file.

    digest: str
    server: str


class Journal:
    """Records on disk as they arrive, so that an interrupted run of a plan can be resumed."""

    def __init__(self, folder: Path, digest: str, server: str) -> None:
        self._file = folder / _PARTIAL
        self._header = _Header(digest=digest, server=server)
        self._stream: IO[bytes] | None = None

    def load(self) -> list[CallRecord]:
        """Return the records of an interrupted run; empty if there is none.

        Raises:
            ResultsError: That run had another plan or another server.
        """
        try:
            lines = self._file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        try:
            header = msgspec.json.decode(lines[0], type=_Header)
        except msgspec.DecodeError as error:
            raise ResultsError(f"{self._file} cannot be read ({error}): remove it") from error
        if header != self._header:
            raise ResultsError(
                f"{self._file} is of another run (options, seed, URL or model differ): "
                "repeat the same command, or start again without --resume"
            )
        # The text after the last line break is an incomplete record.
        return [msgspec.json.decode(line, type=CallRecord) for line in lines[1:-1]]

    def begin(self, kept: list[CallRecord]) -> None:
        """Create the file with these records."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._file.open("wb")
        self._stream.write(msgspec.json.encode(self._header) + b"\n")
        for record in kept:
            self.add(record)

    def add(self, record: CallRecord) -> None:
        """Append a record, and flush it to the operating system."""
        if self._stream is not None:
            self._stream.write(msgspec.json.encode(record) + b"\n")
            self._stream.flush()

    def close(self, *, complete: bool) -> None:
        """Close the file, and delete it if the run is complete."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if complete:
            self._file.unlink(missing_ok=True)
