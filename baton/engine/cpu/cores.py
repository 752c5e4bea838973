"""Cores of a host that its workers share: an idle worker lends its own.

    in use   one number per slot: cores of a worker that computes now, else 0    shared memory
    locks    one byte per slot, held by the worker while its process exists      the kernel's

A worker marks its cores as in use for the time of each step. The other cores are divided among the
workers that compute, anew for each job of a native team (``native/cores.h``). So an owner has its
core back within a job, without waiting. Jobs have the same bits with any number of threads. The
kernel releases the lock of a dead process, and the next worker that begins a step clears its entry.

All workers of a user on a host share one table, also those of other fleets. A container with its
own ``/dev/shm`` has its own table.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import tempfile
from pathlib import Path
from typing import Self

import numpy as np

from baton.engine.cpu.native.library import load

PLACES = 64
_ENTRY_BYTES = 2
_TABLE_BYTES = PLACES * _ENTRY_BYTES


def cores_file() -> Path:
    """Return the path of this user's table on this host."""
    memory = Path("/dev/shm")  # noqa: S108 - owner and mode are checked when it is opened
    folder = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"baton-cores-{os.getuid()}"


class SharedCores:
    """Entry of a worker in the table; a context that marks its cores as in use.

    Its cores count as in use from the start, so that they are not borrowed while a model is loaded;
    ``lend`` ends that.

    Args:
        own: Number of cores that always belong to this worker.
        most: Threads of its team, with borrowed cores.
    """

    def __init__(self, own: int, most: int, cores: int, path: Path) -> None:
        self._library = load()
        self._table = _opened(path)
        memory = mmap.mmap(self._table, _TABLE_BYTES)
        self._in_use = np.frombuffer(memory, dtype=np.uint16)
        # None: more workers than entries
        self._place = next((place for place in range(PLACES) if self._lock(place)), None)
        if self._place is None or self._library is None:
            return
        at = ctypes.c_void_p(self._in_use.ctypes.data)
        self._library.baton_cores_join(at, self._place, own, cores, most)
        self._library.baton_cores_claim(1)

    def __enter__(self) -> Self:
        if self._library is not None and self._place is not None:
            self._clear_dead_entries()
            self._library.baton_cores_claim(1)
        return self

    def __exit__(self, *exception: object) -> None:
        self.lend()

    def lend(self) -> None:
        """Lend the cores to other workers until the next step."""
        if self._library is not None and self._place is not None:
            self._library.baton_cores_claim(0)

    def _clear_dead_entries(self) -> None:
        for place in np.flatnonzero(self._in_use).tolist():
            if place != self._place and self._lock(place):
                self._in_use[place] = 0
                fcntl.lockf(self._table, fcntl.LOCK_UN, 1, place)

    def _lock(self, place: int) -> bool:
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self._table, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            return True
        return False


def _opened(path: Path) -> int:
    """Open the table's file, which must belong to this user alone; create it if it is missing."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        os.close(file)
        raise PermissionError(f"{path} must be a file of this user with mode 0600; remove it")
    if status.st_size < _TABLE_BYTES:
        os.ftruncate(file, _TABLE_BYTES)
    return file
