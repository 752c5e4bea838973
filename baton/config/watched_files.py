"""Files that change while they are in use, such as certificates, tokens and keys.

Each access checks them, and reads them again when one has changed. If they cannot be read or do not
match, the last good value stays in use and one error is logged: a certificate and its key are
seldom replaced in one instant.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_LOG = logging.getLogger(__name__)
_Look = tuple[tuple[int, ...] | None, ...]

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """Current value of some files. Can be used from any thread.

    A change of times, size, inode or rights is noticed. The first exception of ``read`` propagates.
    """

    def __init__(self, files: Sequence[str | Path], read: Callable[[], T]) -> None:
        self._files = tuple(Path(file) for file in files)
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._look()
        self._value = read()
        self.changes = 0  # number of values read after the first
        self.is_stale = False  # the files are wrong, and their last good value is in use

    @property
    def current(self) -> T:
        """Current value; read again first if a file has changed."""
        if self._look() != self._seen:
            with self._lock:
                self._read_again()
        return self._value

    def _read_again(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return  # another thread has read them
        self._seen = seen  # before reading, so that a change in between is noticed the next time
        try:
            self._value = self._read()
        except (OSError, ValueError) as error:
            self.is_stale = True
            _LOG.error("%s; the previous value stays in use", error)
        else:
            self.is_stale = False
            self.changes += 1
            _LOG.info("reloaded %s", ", ".join(map(str, self._files)))

    def _look(self) -> _Look:
        return tuple(map(_fingerprint, self._files))


def _fingerprint(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
