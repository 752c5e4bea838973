"""Locks on a folder that hosts may share, so that only one process does the same work.

The lock is the kernel's (`flock`) and ends with its process. Network file systems share it between
hosts (NFS from version 4). On others every process does the work, which is correct but slower.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_RETRY_S = 0.2
LIMIT_S = 900.0  # then the caller continues without the lock


@contextlib.contextmanager
def exclusively(
    file: Path,
    waiting: Callable[[float], None] = lambda waited_s: None,
    limit_s: float = LIMIT_S,
) -> Iterator[bool]:
    """Lock a file, created if needed; yield whether another process held the lock before.

    ``waiting`` is called periodically with the seconds waited so far, at most ``limit_s``.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # read-only or full: processes that can write do the work
        yield False
        return
    try:
        yield _wait(descriptor, waiting, limit_s)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, waiting: Callable[[float], None], limit_s: float) -> bool:
    began_s = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - began_s
            if waited_s > limit_s:
                return True
            waiting(waited_s)
            time.sleep(_RETRY_S)
        except OSError:  # this file system has no locks
            return False
        else:
            return time.monotonic() - began_s > _RETRY_S
