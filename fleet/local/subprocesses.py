"""Child processes that cannot outlive their parent, and the end of processes."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterable

import psutil

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` that ends the child when the parent *thread* ends.

    The library is loaded before the fork; after it the child makes one system call only. If the
    parent died in between, the changed parent pid shows it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def end_child(child: "subprocess.Popen[bytes]", limit_s: float) -> None:
    """Wait for a child that was told to end, and kill it after the limit."""
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Send SIGTERM, after ``grace_s`` SIGKILL, and wait until the processes are gone."""
    waiting = list(processes)
    for process in waiting:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(waiting, timeout=grace_s)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=2.0)
