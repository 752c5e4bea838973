"""The logs of a fleet's processes: bounded, and apart from what the terminal shows."""

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from fleet.private_logs import open_log

LOG_LIMIT_BYTES = 16 * 2**20
# The folder may be shared with others, whose logs are theirs.
_OURS = (
    *("router.log", "router-*.log", "redis.log", "controller.log", "ray.log"),
    *("prefill-*.log", "decode-*.log"),
)


def rotate(folder: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
    """Bound the logs of a fleet while their processes write on; one older file of each is kept.

    A file stays the same, as its writer has it open for appending: it is copied, then emptied.
    """
    for file in (found for pattern in _OURS for found in folder.glob(pattern)):
        with contextlib.suppress(OSError):  # a full disk must not end the fleet
            if file.stat().st_size > limit_bytes:
                older = file.with_suffix(".log.1")
                older.unlink(missing_ok=True)
                with file.open("rb") as source, open_log(older) as copy:
                    shutil.copyfileobj(source, copy)
                    shutil.copyfileobj(source, copy)  # what came meanwhile
                shutil.copymode(file, older)
                os.truncate(file, 0)


def tail(folder: Path, name: str, lines: int = 12) -> str:
    """The last lines of a process's log, for a message."""
    try:
        text = (folder / f"{name}.log").read_text(errors="replace")
    except OSError:
        return f"(its log is on its node: `baton logs {name}`)"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


def terminal() -> TextIO:
    """A stream to where standard output leads now, whatever becomes of that."""
    try:
        return os.fdopen(os.dup(sys.stdout.fileno()), "w")
    except (OSError, ValueError):  # not a file: it has been replaced
        return sys.stdout


class LastingConsole(Console):
    """A console that outlives its terminal: a line that cannot be written is lost, nothing else.

    A pipe whose reader ended, a terminal that was closed, or a full disk must not end a fleet.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, as far as that is possible."""
        with contextlib.suppress(OSError, ValueError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Write nothing from now on; Rich would end the process."""
        self.quiet = True


class OwnOutput:
    """While it is held, what libraries print goes to a log: only a `terminal` shows our lines.

    Ray's native code writes to the descriptors, its threads to ``sys.stdout``: coloured paragraphs
    between the lines of `baton up`.
    """

    def __init__(self, log: Path) -> None:
        self._terminal = (os.dup(1), os.dup(2))
        self._streams = (sys.stdout, sys.stderr)
        self._flush()
        with open_log(log) as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)

    def release(self) -> None:
        """Print as before."""
        self._flush()
        for stream, kept in zip((1, 2), self._terminal, strict=True):
            os.dup2(kept, stream)
            os.close(kept)

    def _flush(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):  # its terminal is gone, or its disk is full
                stream.flush()
