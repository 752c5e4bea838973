"""Output files of a running batch: responses and errors.

They are the only record of completed lines. After a crash, a torn last line is removed, and lines
that are in neither file run again.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from router.frontend.batch.lines import number_of
from router.frontend.batch.store import OWN_FILE

_PIECE_BYTES = 256 * 1024


class AnswerFiles:
    """Both output files, opened for appending up to ``room_bytes``."""

    def __init__(self, output: Path, errors: Path, room_bytes: int) -> None:
        self.done: set[int] = set()
        self.completed = self._resume(output)
        self.failed = self._resume(errors)
        self._room_bytes = room_bytes
        for path in (output, errors):
            path.touch(mode=OWN_FILE)
        self._output = output.open("ab")
        self._errors = errors.open("ab")

    def _resume(self, path: Path) -> int:
        """Record the lines of a file, remove a torn one, and return their number."""
        if not path.exists():
            return 0
        whole = lines = 0
        with path.open("rb+") as file:
            for line in file:
                number = number_of(line)
                if number is None:
                    break
                self.done.add(number)
                whole = whole + len(line)
                lines = lines + 1
            file.truncate(whole)
        return lines

    def write(self, number: int, line: bytes, *, ok: bool) -> bool:
        """Append the output of line ``number``; return False if there is no space."""
        if len(line) > self._room_bytes:
            return False
        self._room_bytes -= len(line)
        file: IO[bytes] = self._output if ok else self._errors
        file.write(line)
        file.flush()
        self.done.add(number)
        if ok:
            self.completed += 1
        else:
            self.failed += 1
        return True

    def close(self) -> None:
        """Close both output files."""
        try:
            self._output.close()
        finally:
            self._errors.close()


def has_more_lines(path: Path, limit: int) -> bool:
    """Return whether a file has more than ``limit`` line ends, also of empty lines."""
    count = 0
    with path.open("rb") as file:
        while count <= limit and (piece := file.read(_PIECE_BYTES)):
            count += piece.count(b"\n")
    return count > limit


def lines_of(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, with their numbers from 1, without line ends.

    A line that is longer than ``max_bytes`` is cut to one byte more.
    """
    number = 0
    with path.open("rb") as file:
        while line := file.readline(max_bytes + 2):
            number += 1
            end = line
            while not end.endswith(b"\n") and (end := file.readline(64 * 1024)):
                pass
            line = line.rstrip(b"\r\n")[: max_bytes + 1]
            if line.strip():
                yield number, line
