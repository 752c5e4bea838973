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
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.awaited = ""
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
                self.say(f"waiting for {self.awaited}")
