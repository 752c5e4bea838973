"""Reports of requests of this router's earlier processes, which leave them when they end."""

import contextlib
import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from baton.folders import replace_file

KEPT = 200


class PastReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a request that has ended, and its line of the list.

    Attributes:
        arrived_ns: Time of its arrival by the host's monotonic clock.
    """

    tenant: str
    client_id: str
    arrived_ns: int
    summary: dict[str, Any]
    report: dict[str, Any]

    @property
    def elapsed_s(self) -> float:
        """Time from its arrival to its last byte."""
        return float(self.summary["elapsed_s"])

    def line(self, now_ns: int) -> dict[str, Any]:
        """Return its line of the list as of now."""
        return {**self.summary, "age_s": round((now_ns - self.arrived_ns) / 1e9, 6)}


class PastReports:
    """The latest `KEPT` reports in a file, which a router writes at its end for its successor.

    Attributes:
        file: The file; None: nothing is kept. Reports of a killed router are lost.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._read_at: tuple[int, int] = (0, 0)  # the file's time and size
        self._found: list[PastReport] = []

    def newest_first(self, tenant: str | None = None) -> Iterator[PastReport]:
        """Iterate over all, or those of a tenant."""
        self._read()
        return (past for past in self._found if tenant in (None, past.tenant))

    def get(self, name: str, tenant: str | None = None) -> dict[str, Any] | None:
        """Return a report by the router's id or the client's; None if unknown."""
        reports = self.newest_first(tenant)
        return next(
            (past.report for past in reports if name in (past.report["id"], past.client_id)), None
        )

    def keep(self, ended: Iterable[PastReport]) -> None:
        """Write the reports of this process, newest first, before those of earlier ones."""
        if self.file is None:
            return
        self._read()
        whole = heapq.nlargest(KEPT, [*ended, *self._found], key=lambda past: past.arrived_ns)
        with contextlib.suppress(OSError):  # a full disk: the list begins anew
            replace_file(self.file, msgspec.msgpack.encode(whole))

    def _read(self) -> None:
        if self.file is None:
            return
        with contextlib.suppress(OSError, msgspec.DecodeError):
            stat = self.file.stat()
            read_at = (stat.st_mtime_ns, stat.st_size)
            if read_at != self._read_at:
                self._read_at = read_at
                self._found = msgspec.msgpack.decode(self.file.read_bytes(), type=list[PastReport])
