"""Limits of a process that works on clients' text, and its messages on stdin and stdout.

A frame is a 4-byte little-endian length and msgpack. The process ends with its stdin.
"""

import os
import resource
import signal
import struct
import sys

import msgspec

LENGTH = struct.Struct("<I")


def frame(message: object) -> bytes:
    """Return one message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame() -> bytes:
    """Return the next message of stdin; empty at its end."""
    head = sys.stdin.buffer.read(LENGTH.size)
    return sys.stdin.buffer.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def write_frame(message: object) -> None:
    """Write one message to stdout."""
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()


def limit_process(memory_bytes: int) -> None:
    """Limit the memory of this process, let workers go first, and leave Ctrl-C to the router."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)


def forbid_files() -> None:
    """Let this process open no file and no socket from now on; those that are open stay usable."""
    _limit(resource.RLIMIT_NOFILE, 0)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed))
