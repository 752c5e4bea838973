"""Turns at a folder that hosts may share: what one makes there, the others then find.

The lock is the kernel's (`flock`): it ends with its holder, however that ends. Network file systems
pass it on to other hosts (NFS from version 4); one that does not makes everybody do the work, which
is as right and takes longer.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_LOOK_EVERY_S = 0.2
LIMIT_S = 900.0  # then one goes on without its turn


@contextlib.contextmanager
def turn(
    file: Path,
    waiting: Callable[[float], None] = lambda waited_s: None,
    limit_s: float = LIMIT_S,
) -> Iterator[bool]:
    """Take one's turn at something; whether others had theirs before.

    Args:
        file: Stands for it; is made if need be, stays, and is empty.
        waiting: Called now and then with the seconds so far.
        limit_s: How long to wait at most.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # read-only, or full: whoever can write there will
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
            time.sleep(_LOOK_EVERY_S)
        except OSError:  # this file system has no locks
            return False
        else:
            return time.monotonic() - began_s > _LOOK_EVERY_S
