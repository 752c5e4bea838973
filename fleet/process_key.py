"""Identification of processes that survives reuse of pids, and their end by SIGKILL."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import psutil


class ProcessKey(NamedTuple):
    """Pid and start time of a process; unlike a pid, the two are never reused together."""

    pid: int
    started_s: float  # since boot: the wall clock may be changed

    @classmethod
    def of(cls, pid: int) -> "ProcessKey | None":
        """Return the key of a live process, or None."""
        stat = _stat(pid)
        return cls(pid, stat[1]) if stat is not None else None

    @classmethod
    def own(cls) -> "ProcessKey":
        """Return the key of this process."""
        if (key := cls.of(os.getpid())) is None:
            raise RuntimeError("cannot read /proc")
        return key

    def find(self) -> psutil.Process | None:
        """Return the process if it is still the same one and not a zombie."""
        stat = _stat(self.pid)
        if stat is None or stat[1] != self.started_s or stat[0] in "ZX":
            return None
        try:
            return psutil.Process(self.pid)
        except psutil.Error:
            return None


def _stat(pid: int) -> tuple[str, float] | None:
    """Return a process's state and start time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain any character
    return fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and its descendants; an empty list if it is gone."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def end_at_once(key: ProcessKey) -> None:
    """Send SIGKILL to a process and its descendants, unless the pid is now another process's."""
    process = key.find()
    if process is None:
        return
    for member in family(process):  # the parent first: it must start no other child
        with contextlib.suppress(psutil.Error):
            member.kill()
