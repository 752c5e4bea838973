"""Locks on a folder that hosts may share, so that only one process does the same work.

The lock is the kernel's (`flock`) and ends with its process. Network file systems share it between
hosts (NFS from version 4). On others every process does the work, which is correct but slower.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_RETRY_S = 0.2
LIMIT_S = 900.0  # then the caller continues without the lock


@contextlib.contextmanager
def exclusively(file: Path, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Lock a file, created if needed, during the block; wait at most ``limit_s`` for others."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # read-only or full: processes that can write do the work
        yield
        return
    try:
        _wait(descriptor, time.monotonic() + limit_s)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, until_s: float) -> None:
    while time.monotonic() < until_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_RETRY_S)
        except OSError:  # this file system has no locks
            return
        else:
            return
