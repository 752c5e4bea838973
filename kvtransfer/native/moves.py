"""KV copies of one pool by ``library.py``: one call for each frame, without the GIL.

C++ checks no bounds; they are checked here.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.types.geometry import KvGeometry
from kvtransfer.kv_slice import KvSlice
from kvtransfer.native import library

DIGEST_BYTES = 8


class _Pool(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
        ("first_head", ctypes.c_int64),
    )


def native_pool(
    data: npt.NDArray[Any], geometry: KvGeometry, first_head: int
) -> "NativePool | None":
    """Return the pool for C++, or None without the library."""
    loaded = library.load()
    return None if loaded is None else NativePool(loaded, data, geometry, first_head)


class NativePool:
    """A pool whose copies run in C++."""

    def __init__(
        self, loaded: ctypes.CDLL, data: npt.NDArray[Any], geometry: KvGeometry, first_head: int
    ) -> None:
        self._library = loaded
        self._data = data  # keeps the memory alive
        self._geometry = geometry
        self._first_head = first_head
        self._pool = _Pool(
            _address(data),
            geometry.num_blocks,
            geometry.block_tokens,
            geometry.num_kv_heads,
            geometry.head_bytes,
            first_head,
        )

    def gather(self, pages: Sequence[int], kv_slice: KvSlice, seed: int, into: memoryview) -> bytes:
        """Copy a slice in wire order into a buffer; return the digests of its (block, head)s."""
        if len(into) != kv_slice.payload_bytes(self._geometry):
            raise ValueError(f"buffer of {len(into)} bytes does not fit {kv_slice}")
        digests = ctypes.create_string_buffer(digests_bytes(kv_slice))
        self._library.baton_kv_gather(
            *self._place(pages, kv_slice), kv_slice.packed(), seed, _address(into), digests
        )
        return digests.raw

    def scatter(
        self,
        pages: Sequence[int],
        kv_slice: KvSlice,
        seed: int,
        payload: memoryview | bytes,
        digests: bytes,
    ) -> bool:
        """Store a payload if all of it matches the digests; if not, nothing of it stays."""
        if len(payload) != kv_slice.payload_bytes(self._geometry):
            raise ValueError(f"payload of {len(payload)} bytes does not fit {kv_slice}")
        if len(digests) != digests_bytes(kv_slice):
            return False
        place = self._place(pages, kv_slice)
        matched = self._library.baton_kv_scatter(
            *place, kv_slice.packed(), seed, _address(payload), digests
        )
        return bool(matched)

    def digest(self, pages: Sequence[int], kv_slice: KvSlice, seed: int) -> int:
        """Return the digest of a slice in the order of the pool (``kvtransfer/lent_pages.py``)."""
        place = self._place(pages, kv_slice)
        return int(self._library.baton_kv_digest(*place, kv_slice.packed(), seed))

    def copy(
        self,
        source: "NativePool",
        lent: Sequence[int],
        ours: Sequence[int],
        kv_slice: KvSlice,
        seed: int,
        expected: int,
    ) -> bool:
        """Copy lent pages into ours; if the digest differs, clear ours and return False."""
        theirs = source._place(lent, kv_slice)  # noqa: SLF001 - the same class
        place = self._place(ours, kv_slice)
        packed = kv_slice.packed()
        return bool(self._library.baton_kv_copy(*theirs, *place, packed, seed, expected))

    def _place(self, pages: Sequence[int], kv_slice: KvSlice) -> tuple[Any, bytes]:
        """Return pool and pages for a call; raise IndexError if the slice lies outside the pool."""
        numbers = np.asarray(pages, dtype=np.int64)
        if (
            not kv_slice.fits(self._geometry, self._first_head)
            or len(numbers) != kv_slice.block_count
            or numbers.min() < 0
            or numbers.max() >= self._geometry.num_blocks
        ):
            raise IndexError(f"{kv_slice} with {len(numbers)} pages is outside the pool")
        return ctypes.byref(self._pool), numbers.astype(np.uint32).tobytes()


def digests_bytes(kv_slice: KvSlice) -> int:
    """Return the size of a frame's digests: one for each (block, head)."""
    return DIGEST_BYTES * kv_slice.block_count * kv_slice.head_count


def _address(buffer: memoryview | bytes | npt.NDArray[Any]) -> int:
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    return int(array.__array_interface__["data"][0])  # `array.ctypes` would make a reference cycle
