"""Children that never outlive their parent, and how processes are ended."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable

import psutil

_PR_SET_PDEATHSIG = 1


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
