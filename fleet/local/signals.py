"""Signals of a foreground fleet, including those that reach only its parent ``make``.

GNU make 4.3 forwards a SIGTERM to its child, but not a SIGINT that was sent to make alone: it
restores the signal's default action and waits for the child. `_watch_make` detects that in the
``SigCgt`` line of ``/proc/<make>/status``. It also detects that make is gone.
"""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

CHANGE_SIGNAL = signal.SIGUSR1  # tells `baton up` to reread the fleet file
_POLL_S = 0.2


class StopRequestedError(BaseException):
    """Raised in the main thread while the fleet starts; like KeyboardInterrupt, not an error."""


class StopSignal:
    """Signals as flags: SIGINT, SIGTERM, SIGHUP or make's end stop the fleet.

    Until `starting_done` they also raise `StopRequestedError` in the main thread, which aborts the
    start. SIGUSR1 requests that the fleet file is reread, SIGUSR2 that routers are replaced.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._change = threading.Event()
        self._raise = True
        self.is_repeated = False  # a stop was requested more than once
        self._new_routers = threading.Event()

    def install(self) -> None:
        """Install the handlers; call again after Ray has started, which replaces them.

        A SIGHUP that was ignored stays ignored, so that `nohup baton up` outlives its terminal.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR2, lambda number, frame: self._new_routers.set())
        signal.signal(CHANGE_SIGNAL, lambda number, frame: self._change.set())

    def watch_make(self) -> None:
        """Start watching the parent, if it is make."""
        parent = os.getppid()
        if _command(parent) in ("make", "gmake"):
            threading.Thread(target=_watch_make, args=(parent,), daemon=True).start()

    def starting_done(self) -> None:
        """End the phase in which a signal raises `StopRequestedError`."""
        self._raise = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for a stop request, and return whether there was one."""
        return self._event.wait(timeout_s)

    @property
    def is_set(self) -> bool:
        """Return whether a stop was requested."""
        return self._event.is_set()

    def take_new_routers(self) -> bool:
        """Return whether new routers were requested since the last call."""
        return _take(self._new_routers)

    def take_change(self) -> bool:
        """Return whether a reread of the file was requested since the last call."""
        return _take(self._change)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_repeated = self._event.is_set()
        if not self._event.is_set():
            self._event.set()
            if self._raise:
                raise StopRequestedError


def _take(event: threading.Event) -> bool:
    is_set = event.is_set()
    event.clear()
    return is_set


def _watch_make(parent: int) -> None:
    caught_before = _catches_sigint(parent)
    while True:
        time.sleep(_POLL_S)
        make_got_sigint = caught_before and not _catches_sigint(parent)
        if make_got_sigint or os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _catches_sigint(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
