"""Communication between the processes of one engine: frames on a socket, and shared KV memory.

A frame is a 4-byte little-endian length and a msgpack list of messages. It never contains KV: the
processes map the same memory.
"""

import mmap
import os
import socket
import struct
from typing import Generic, TypeVar

import msgspec

from baton.types.geometry import KvGeometry

LENGTH = struct.Struct("<I")

M = TypeVar("M")


class FrameReader(Generic[M]):
    """Incremental parser that cuts a byte stream into messages."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[list[M]]") -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Add received bytes and return the complete messages, in order."""
        self._buffer += data
        messages: list[M] = []
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < LENGTH.size + length:
                break
            body = bytes(self._buffer[LENGTH.size : LENGTH.size + length])
            del self._buffer[: LENGTH.size + length]
            messages += self._decoder.decode(body)
        return messages


def give_back(pool: memoryview) -> None:
    """Free the memory of a pool, which stays mapped everywhere and reads as zeros."""
    mapped = pool.obj
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_REMOVE)


def map_pool(pool_fd: int, geometry: KvGeometry) -> memoryview:
    """Size the memory file for ``geometry`` and map it writable and shared."""
    os.ftruncate(pool_fd, geometry.pool_bytes)
    return memoryview(mmap.mmap(pool_fd, geometry.pool_bytes))


def own_pool(geometry: KvGeometry) -> memoryview:
    """Return zeroed memory of a pool for this process, aligned as ``map_pool`` does.

    The kernels read a vector of K or V by cache lines: one that begins inside a line has one more.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a fork has a pool of its own
    return memoryview(mmap.mmap(-1, geometry.pool_bytes, flags=flags))


def pool_file() -> int:
    """Create a pool's memory file, which the kernel frees after its last user."""
    return os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """Return the shell's and the step loop's end of their connection."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    return ours, theirs
