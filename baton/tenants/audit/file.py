"""File of the audit log, to which several processes of one host append. All functions block.

Appending locks the file, so that the chain is one. A line is complete if it ends with a newline; an
incomplete one was left by a process that was killed, and is removed before the next is written.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.tenants.audit.chain import ChainHead, Entry, head_of, sealed

NAME = "audit.jsonl"
_CHUNK_BYTES = 64 * 1024
_RECENT_BYTES = 1024 * 1024  # in which an entry that arrives again is found


def append(path: Path, entries: Sequence[Entry]) -> list[bytes]:
    """Append entries that are not among the last ones, and return their lines.

    Raises:
        OSError: They cannot be written; the file is unchanged.
        ValueError: The last line is no line of an audit log.
    """
    lines: list[bytes] = []
    with _locked(path) as file:
        end, recent = _complete(file, _RECENT_BYTES)
        head = head_of(recent[-1]) if recent else ChainHead()
        for entry in entries:
            if not any(f'"id":"{entry.id}"'.encode() in line for line in recent):
                line, head = sealed(entry, head)
                lines.append(line)
        try:
            written = b"".join(lines)
            while written:
                written = written[os.write(file, written) :]
            os.fsync(file)
        except OSError:
            os.ftruncate(file, end)
            raise
    return lines


def last(path: Path) -> ChainHead:
    """Return the head of a file; that of an empty chain if there is no file.

    Raises:
        OSError, ValueError: As `append` does.
    """
    if not path.exists():
        return ChainHead()
    with _locked(path) as file:
        recent = _complete(file)[1]
        return head_of(recent[-1]) if recent else ChainHead()


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _complete(file: int, least_bytes: int = _CHUNK_BYTES) -> tuple[int, list[bytes]]:
    """Remove an incomplete last line; return the file's end and its last lines, at least one."""
    end = os.fstat(file).st_size
    tail = b""
    begin = end
    while begin and (end - begin < least_bytes or tail.count(b"\n") < 2):
        size = min(_CHUNK_BYTES, begin)
        begin -= size
        tail = os.pread(file, size, begin) + tail
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        end -= torn
        os.ftruncate(file, end)
        tail = tail[:-torn]
    lines = tail.splitlines()
    return end, lines if begin == 0 else lines[1:]
