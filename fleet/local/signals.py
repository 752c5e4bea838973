"""How a foreground fleet learns that it should stop, also when the signal goes to ``make`` only.

GNU make 4.3 passes a SIGTERM on to its child but keeps a SIGINT that was sent to it alone: it puts
the signal's default action back and waits for the child. That shows in the ``SigCgt`` line of
``/proc/<make>/status``, and is what `_watch_make` looks for. It also notices that make is gone.
"""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

CHANGE_SIGNAL = signal.SIGUSR1  # to `baton up`: read the fleet file again
_POLL_S = 0.2


class StopRequestedError(BaseException):
    """Raised in the main thread while the fleet starts; like KeyboardInterrupt, not an error."""


class StopSignal:
    """SIGINT, SIGTERM, SIGHUP, or make's end, as one event; SIGUSR1, as another.

    Until `starting_done` a signal raises `StopRequestedError` in the main thread, so that nothing
    waits for a start that is no longer wanted. After `stopping` signals are ignored.

    SIGUSR2 asks for new routers (`baton restart routers`), and is kept until `take_new_routers`.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._change = threading.Event()
        self._raise = True
        self._new_routers = False

    def install(self) -> None:
        """Take the signals. Ray replaces the handlers: call again after it has started.

        A SIGHUP that this process has inherited as ignored stays so: `nohup baton up` outlives its
        terminal.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR2, self._on_new_routers)
        signal.signal(CHANGE_SIGNAL, lambda number, frame: self._change.set())

    def watch_make(self) -> None:
        """Start watching the parent, if it is make."""
        parent = os.getppid()
        if _command(parent) in ("make", "gmake"):
            threading.Thread(target=_watch_make, args=(parent,), daemon=True).start()

    def starting_done(self) -> None:
        """From now on a signal only sets the event."""
        self._raise = False

    def wait(self, timeout_s: float) -> bool:
        """Wait; whether a stop was asked for."""
        return self._event.wait(timeout_s)

    @property
    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self._event.is_set()

    def take_new_routers(self) -> bool:
        """Whether new routers were asked for since the last call."""
        asked = self._new_routers
        self._new_routers = False
        return asked

    def _on_new_routers(self, number: int, frame: FrameType | None) -> None:
        self._new_routers = True

    def take_change(self) -> bool:
        """Whether somebody said, since the last call, that the file has changed."""
        asked = self._change.is_set()
        self._change.clear()
        return asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._event.is_set():
            self._event.set()
            if self._raise:
                raise StopRequestedError


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
