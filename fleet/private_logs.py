"""Log files that only their owner can read: they may contain prompts and paths of secrets."""

import os
from pathlib import Path
from typing import BinaryIO


def open_log(file: Path) -> BinaryIO:
    """Open a log for appending; a new file gets mode 0600.

    An existing file keeps its mode, which an operator may have changed for a log shipper.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "ab")


def logs_of(name: str, folder: Path) -> list[Path]:
    """Return the log files of a process, or of all, sorted. ``worker-1`` excludes ``worker-10``."""
    files = (path for path in folder.glob("*.log") if path.name.startswith(name))
    return sorted(path for path in files if not path.name[len(name) :][:1].isdigit())
