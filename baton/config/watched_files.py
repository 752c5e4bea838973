"""Files that change while they are in use, such as certificates, tokens and keys.

They are looked at whenever their value is asked for, and read again when one of them has changed.
What cannot be read or does not fit together leaves the last good value in place, and is said once:
the files of a pair are seldom replaced in one instant.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_LOG = logging.getLogger(__name__)
_Look = tuple[tuple[int, int, int] | None, ...]

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """What some files say, as of now. May be asked from any thread.

    Args:
        files: A change of one of them is noticed by its time, size and inode.
        read: Makes the value of their contents; whatever it raises, the first time, is raised here.
    """

    def __init__(self, files: Sequence[str | Path], read: Callable[[], T]) -> None:
        self._files = tuple(Path(file) for file in files)
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._look()
        self._value = read()
        self.changes = 0  # how often another value was read

    @property
    def current(self) -> T:
        """The value; read again first if a file has changed."""
        if self._look() != self._seen:
            with self._lock:
                self._read_again()
        return self._value

    def _read_again(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return  # another thread was faster
        self._seen = seen  # before reading: a change in between is then seen the next time
        try:
            self._value = self._read()
        except (OSError, ValueError) as error:
            _LOG.error("%s; what was read before stays in use", error)
        else:
            self.changes += 1
            _LOG.info("read again: %s", ", ".join(map(str, self._files)))

    def _look(self) -> _Look:
        return tuple(map(_fingerprint, self._files))


def _fingerprint(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
