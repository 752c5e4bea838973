"""Memory of packed weights, in huge pages where the kernel has them.

A step reads all weights once, in order. With pages of 4 KiB the processor translates an address
every 64 lines, and its prefetchers stop there; with pages of 2 MiB they continue.
"""

import contextlib
import ctypes
import mmap

_ALIGNED_BYTES = 64
_PIECE_BYTES = 16 << 20  # weights smaller than this share a piece
_left: list[tuple[mmap.mmap, int]] = []  # the shared piece, and the offset of its free part


def memory_for(size_bytes: int) -> tuple[object, int]:
    """Return zeroed memory: its owner object, and its address, aligned to 64 bytes."""
    if size_bytes >= _PIECE_BYTES:
        piece = _map(size_bytes)
        begin = 0
    else:
        piece, begin = _left.pop() if _left else (_map(_PIECE_BYTES), 0)
        if begin + size_bytes > len(piece):
            piece = _map(_PIECE_BYTES)
            begin = 0
        _left.append((piece, begin + -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES))
    return piece, ctypes.addressof(ctypes.c_char.from_buffer(piece)) + begin


def _map(size_bytes: int) -> mmap.mmap:
    piece = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece
