"""Log files that only their owner reads: they may hold prompts, and paths of secrets."""

import os
from pathlib import Path
from typing import BinaryIO


def open_log(file: Path) -> BinaryIO:
    """Open a log for appending; a new one is readable by its owner alone.

    One that is there keeps its mode: an operator may have opened it to a program that ships logs.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "ab")
