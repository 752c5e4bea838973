"""Children that never outlive their parent, and processes identified beyond reuse of their pid."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_PR_SET_PDEATHSIG = 1


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


def die_with_parent(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """A ``preexec_fn`` that has the kernel send ``signal_number`` when the parent *thread* ends.

    The library is loaded here, before the fork; after it only one system call is made. A parent
    that died between the fork and that call is noticed by the changed parent pid.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all below it, or an empty list when it is gone."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """SIGTERM, wait up to ``grace_s``, SIGKILL what is left, wait for it to be gone."""
    waiting = list(processes)
    for process in waiting:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    deadline = time.monotonic() + grace_s
    _, left = psutil.wait_procs(waiting, timeout=max(0.0, deadline - time.monotonic()))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=2.0)


def end_at_once(key: ProcessKey) -> None:
    """SIGKILL a process and all below it; nothing if the pid is another's by now."""
    process = key.find()
    if process is None:
        return
    for member in family(process):  # the parent first, so that it begins no other child
        with contextlib.suppress(psutil.Error):
            member.kill()
