"""The cores of a host, shared by its workers: one that computes nothing lends its own.

    claims   one number per place: cores of a worker that computes now, else 0   shared memory
    locks    one byte per place, held by the worker while it lives               the kernel's

A worker claims its cores for the time of each step. What nobody claims is shared out among those
that compute, anew for each job of a native team (``native/cores.h``), so that an owner has its core
back within a job and waits for nobody. Jobs have the same bits with any number of threads. The
kernel takes the lock of a process that has died, however it died, and its claim is struck out by
the next that begins a step.

All workers of a user on a host share one table, also those of other fleets; a container with its
own ``/dev/shm`` has its own.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from baton.engine.cpu.native.library import load

PLACES = 64
_CLAIM_BYTES = 2
_TABLE_BYTES = PLACES * _CLAIM_BYTES


def host_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_file() -> Path:
    """The table of this user on this host."""
    memory = Path("/dev/shm")  # noqa: S108 - owner and mode are checked when it is opened
    folder = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"baton-cores-{os.getuid()}"


class SharedCores:
    """This worker's place in the table; a context that claims its cores while it computes.

    Its cores count as claimed from the start, so that nobody borrows them while a model is loaded;
    ``lend`` ends that.

    Args:
        own: Cores that are always this worker's.
        most: Threads of its team, borrowed ones included.
        cores: Of the host.
        path: The table.
    """

    def __init__(self, own: int, most: int, cores: int, path: Path) -> None:
        self._own = own
        self._library = load()
        self._table = _opened(path)
        memory = mmap.mmap(self._table, _TABLE_BYTES)
        self._claims = np.frombuffer(memory, dtype=np.uint16)
        self._place = self._take_place()
        if self._place is None or self._library is None:
            return
        at = ctypes.c_void_p(self._claims.ctypes.data)
        self._library.baton_cores_join(at, self._place, own, cores, most)
        self._library.baton_cores_claim(1)

    def __enter__(self) -> Self:
        if self._library is not None and self._place is not None:
            self._strike_out_the_dead()
            self._library.baton_cores_claim(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lend()

    def lend(self) -> None:
        """Let others have the cores until the next step."""
        if self._library is not None and self._place is not None:
            self._library.baton_cores_claim(0)

    def _take_place(self) -> int | None:
        """The first place whose lock is free; ``None`` if there are more workers than places."""
        for place in range(PLACES):
            if self._lock(place):
                return place
        return None

    def _strike_out_the_dead(self) -> None:
        for place in np.flatnonzero(self._claims).tolist():
            if place != self._place and self._lock(place):
                self._claims[place] = 0
                fcntl.lockf(self._table, fcntl.LOCK_UN, 1, place)

    def _lock(self, place: int) -> bool:
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self._table, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            return True
        return False


def _opened(path: Path) -> int:
    """The table's file, made if there is none.

    Raises:
        PermissionError: It is not this user's alone.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        os.close(file)
        raise PermissionError(f"{path}: must be a file of this user alone; remove it")
    if found.st_size < _TABLE_BYTES:
        os.ftruncate(file, _TABLE_BYTES)
    return file
