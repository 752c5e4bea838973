"""Progress of a command on its terminal: lines, and what the command waits for."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_SILENT_S = 5.0


class Progress:
    """Lines of a command. After 5 s without a line it prints what the command waits for.

    Attributes:
        awaited: What the command waits for.
        until_s: Time on the monotonic clock at which the wait ends; None: unknown.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.awaited = ""
        self.until_s: float | None = None
        self._say = say
        self._said_s = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line, and wait 5 s again."""
        self._said_s = time.monotonic()
        self._say(line)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Print what is awaited, from a thread: the command may be blocked."""
        over = threading.Event()
        thread = threading.Thread(target=self._show, args=(over,), daemon=True)
        self._said_s = time.monotonic()
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _show(self, over: threading.Event) -> None:
        while not over.wait(max(self._said_s + _SILENT_S - time.monotonic(), 0.01)):
            if time.monotonic() - self._said_s >= _SILENT_S:
                left_s = 0.0 if self.until_s is None else self.until_s - time.monotonic()
                left = f", {left_s:.0f} s left" if left_s > 0 else ""
                self.say(f"waiting for {self.awaited}{left}")
