"""Log files of a fleet's processes: their size limit, separation from the terminal."""

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from fleet.private_logs import open_log

LOG_LIMIT_BYTES = 16 * 2**20
_TAIL_LINES = 12
# The folder may also have logs of other programs.
_OURS = (
    *("router.log", "router-*.log", "redis.log", "controller.log", "ray.log", "attached.log"),
    *("worker-*.log", "prefill-*.log", "decode-*.log"),
)


def rotate(folder: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
    """Limit the size of a fleet's logs; one older file of each is kept.

    Writers keep the files open for appending, so a large file is copied, then truncated.
    """
    for file in (path for pattern in _OURS for path in folder.glob(pattern)):
        with contextlib.suppress(OSError):  # a full disk must not end the fleet
            if file.stat().st_size > limit_bytes:
                older = file.with_suffix(".log.1")
                older.unlink(missing_ok=True)
                with file.open("rb") as source, open_log(older) as copy:
                    shutil.copyfileobj(source, copy)
                    shutil.copyfileobj(source, copy)  # lines written meanwhile
                shutil.copymode(file, older)
                os.truncate(file, 0)


def tail(folder: Path, name: str) -> str:
    """Return the last lines of a process's log, for a message."""
    try:
        text = (folder / f"{name}.log").read_text(errors="replace")
    except OSError:
        return f"(its log is on its node: `baton logs {name}`)"
    return "\n".join(f"  {line}" for line in text.splitlines()[-_TAIL_LINES:])


def terminal() -> TextIO:
    """Return a stream to the present target of standard output, unaffected by redirection."""
    try:
        return os.fdopen(os.dup(sys.stdout.fileno()), "w")
    except (OSError, ValueError):  # not a file: sys.stdout was replaced
        return sys.stdout


class LastingConsole(Console):
    """Console that drops lines that cannot be written.

    A closed pipe or terminal, or a full disk, must not end a fleet.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, and ignore errors of the terminal."""
        with contextlib.suppress(OSError, ValueError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Stop printing; by default Rich exits the process."""
        self.quiet = True


class OwnOutput:
    """Redirection of standard output and error to a log, except for a `terminal`, until `release`.

    Ray's native code and threads print to them, between the lines of `baton up`.
    """

    def __init__(self, log: Path) -> None:
        self._terminal = (os.dup(1), os.dup(2))
        self._streams = (sys.stdout, sys.stderr)
        self._flush()
        with open_log(log) as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)

    def release(self) -> None:
        """Restore standard output and error."""
        self._flush()
        for stream, kept in zip((1, 2), self._terminal, strict=True):
            os.dup2(kept, stream)
            os.close(kept)

    def _flush(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):  # the terminal is gone, or the disk is full
                stream.flush()
