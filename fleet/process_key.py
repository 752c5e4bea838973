"""Processes identified beyond reuse of their pid, and beyond doubt ended."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import psutil


class ProcessKey(NamedTuple):
    """Identifies a process: pids are reused, a pid together with its start time is not."""

    pid: int
    started_s: float  # since the machine's start: the wall clock may be set

    @classmethod
    def of(cls, pid: int) -> "ProcessKey | None":
        """The key of a live process, or None."""
        found = _stat(pid)
        return cls(pid, found.started_s) if found is not None else None

    def find(self) -> psutil.Process | None:
        """The process, if it is still the same one and not a zombie."""
        found = _stat(self.pid)
        if found is None or found.started_s != self.started_s or found.state in "ZX":
            return None
        try:
            return psutil.Process(self.pid)
        except psutil.Error:
            return None


class _Stat(NamedTuple):
    state: str
    started_s: float


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return _Stat(fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all below it, or an empty list when it is gone."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def end_at_once(key: ProcessKey) -> None:
    """SIGKILL a process and all below it; nothing if the pid is another's by now."""
    process = key.find()
    if process is None:
        return
    for member in family(process):  # the parent first, so that it begins no other child
        with contextlib.suppress(psutil.Error):
            member.kill()
