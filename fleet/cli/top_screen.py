"""A live view that may be longer than the terminal: keys scroll it."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

_LINES = {b"\x1b[A": -1, b"k": -1, b"\x1b[B": 1, b"j": 1}
_PAGES = {b"\x1b[5~": -1, b"b": -1, b"\x1b[6~": 1, b" ": 1}
_ENDS = {b"\x1b[H": 0, b"g": 0, b"\x1b[F": sys.maxsize, b"G": sys.maxsize}
_QUIT = (b"q", b"\x03")


class Scrolled:
    """Part of a content that fits into the terminal. ``first`` is its first line."""

    def __init__(self) -> None:
        self.content: RenderableType = ""
        self.first = 0
        self._height = 1
        self._lines = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines from ``first`` on, and a last line if there are more."""
        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        self._height = max(options.size.height - 1, 1)
        self._lines = len(lines)
        self.first = max(min(self.first, self._lines - self._height), 0)
        shown = lines[self.first : self.first + self._height]
        for line in shown:
            yield from line
            yield Segment.line()
        if len(shown) < self._lines:
            last = self.first + len(shown)
            yield Segment(
                f"lines {self.first + 1} to {last} of {self._lines}: arrows, page keys, g, G, q"
            )

    def press(self, key: bytes) -> bool:
        """Scroll by a key; return False if it ends the view."""
        if key in _LINES:
            self.first += _LINES[key]
        elif key in _PAGES:
            self.first += _PAGES[key] * self._height
        elif key in _ENDS:
            self.first = _ENDS[key]
        self.first = max(min(self.first, self._lines - self._height), 0)
        return key not in _QUIT


@contextlib.contextmanager
def keys() -> Iterator[int | None]:
    """Yield the descriptor of a terminal that gives each key at once; None without a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def next_key(terminal: int | None, wait_s: float) -> bytes:
    """Return the next key, or nothing after ``wait_s`` seconds."""
    if terminal is None:
        time.sleep(wait_s)
        return b""
    readable, _, _ = select.select([terminal], [], [], max(wait_s, 0.0))
    return os.read(terminal, 16) if readable else b""
