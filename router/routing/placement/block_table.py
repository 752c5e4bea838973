"""Table of the workers that have each block, by block hash, for all workers. Sans-IO.

Workers are small numbers. Hashes are 16 bytes each, concatenated. Two tables give the same answers:
one in C++ (``native/``) with some 50 bytes a block and tens of nanoseconds a lookup, and a plain
one for machines without a compiler.
"""

import ctypes
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from router.routing.placement.native.library import load

HASH_BYTES = 16
Hashes = bytes | Sequence[bytes]
"""Block hashes, concatenated or as a sequence."""
PARTS = 256
"""Number of parts of about equal size that a table is swept in."""
_FIRST_WORKERS = 256


class Changed(NamedTuple):
    """Number of added or removed blocks, and xor of their hashes' first 8 bytes."""

    blocks: int
    checksum: int


class LiveWorkers:
    """Set of the workers whose blocks count."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.bits = bytearray(_FIRST_WORKERS // 8)

    def add(self, worker: int) -> None:
        """Count the blocks of a worker from now on."""
        self.numbers.add(worker)
        while worker >= len(self.bits) * 8:
            self.bits += bytes(len(self.bits))
        self.bits[worker // 8] |= 1 << worker % 8

    def discard(self, worker: int) -> None:
        """Stop counting the blocks of a worker."""
        self.numbers.discard(worker)
        self.bits[worker // 8] &= ~(1 << worker % 8) & 0xFF


def packed(hashes: Hashes) -> bytes:
    """Return the hashes concatenated."""
    return hashes if isinstance(hashes, bytes) else b"".join(hashes)


def each_hash(hashes: bytes) -> Iterator[bytes]:
    """Return an iterator over concatenated hashes."""
    return (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))


class PlainBlockTable:
    """Workers by block hash, in dictionaries. Numbers of workers are below 65,535."""

    def __init__(self) -> None:
        self.parts: list[dict[bytes, set[int]]] = [{} for _ in range(PARTS)]

    @property
    def blocks(self) -> int:
        """Number of different blocks."""
        return sum(map(len, self.parts))

    @property
    def memory_bytes(self) -> int:
        """Approximate size of the table, in bytes."""
        return 400 * self.blocks

    def add(self, worker: int, hashes: bytes, most: int) -> Changed:
        """Add blocks of a worker, at most ``most`` that it does not have yet."""
        blocks = checksum = 0
        for block_hash in each_hash(hashes):
            if blocks == most:
                break
            workers = self.parts[block_hash[-1]].setdefault(block_hash, set())
            if worker not in workers:
                workers.add(worker)
                blocks += 1
                checksum ^= int.from_bytes(block_hash[:8], "little")
        return Changed(blocks, checksum)

    def remove(self, worker: int, hashes: bytes) -> Changed:
        """Remove blocks of a worker."""
        blocks = checksum = 0
        for block_hash in each_hash(hashes):
            part = self.parts[block_hash[-1]]
            workers = part.get(block_hash)
            if workers is None or worker not in workers:
                continue
            workers.remove(worker)
            if not workers:
                del part[block_hash]
            blocks += 1
            checksum ^= int.from_bytes(block_hash[:8], "little")
        return Changed(blocks, checksum)

    def match(
        self, hashes: bytes, live: LiveWorkers, others: Sequence["BlockTable"] = ()
    ) -> list[tuple[int, int]]:
        """Return how many leading blocks each live worker has that has the first one.

        ``others`` are tables of the same kind whose blocks count, too.
        """
        tables = [self, *(other for other in others if isinstance(other, PlainBlockTable))]
        alive = live.numbers
        lengths = []
        count = 0
        for count, block_hash in enumerate(each_hash(hashes)):
            having: set[int] = set()
            for table in tables:
                having |= table.parts[block_hash[-1]].get(block_hash, having)
            if count:
                lengths += [(worker, count) for worker in alive - having]
            alive = alive & having
            if not alive:
                return lengths
        return lengths + [(worker, count + 1) for worker in alive] if hashes else []

    def sweep(self, first_part: int, parts: int, gone: Collection[int]) -> None:
        """Remove workers from some of the ``PARTS``."""
        for part in self.parts[first_part : first_part + parts]:
            for block_hash, workers in list(part.items()):
                workers.difference_update(gone)
                if not workers:
                    del part[block_hash]

    def hashes_of(self, worker: int) -> list[bytes]:
        """Return all blocks of a worker."""
        return [name for part in self.parts for name, workers in part.items() if worker in workers]

    def clear(self) -> None:
        """Remove all blocks of all workers."""
        self.parts = [{} for _ in range(PARTS)]


class NativeBlockTable:
    """Block table in C++, with the library of ``router.routing.placement.native.library``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.room = _FIRST_WORKERS
        self.handle = ctypes.c_void_p(library.baton_blocks_new(self.room))
        if not self.handle:
            raise MemoryError("the block table")
        self.packed_handle = (self.handle.value or 0).to_bytes(8, sys.byteorder)
        self._workers = np.zeros(0, np.uint16)
        self._lengths = np.zeros(0, np.uint32)
        self._found_at = 0, 0

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.baton_blocks_delete(self.handle)

    @property
    def blocks(self) -> int:
        """Number of different blocks."""
        return int(self._library.baton_blocks_count(self.handle))

    @property
    def memory_bytes(self) -> int:
        """Approximate size of the table, in bytes."""
        return int(self._library.baton_blocks_bytes(self.handle))

    def widen(self, workers: int) -> None:
        """Make room for more workers."""
        if workers > self.room:
            self.room = max(workers, 2 * self.room)
            self._library.baton_blocks_widen(self.handle, self.room)

    def add(self, worker: int, hashes: bytes, most: int) -> Changed:
        """Add blocks of a worker; see ``PlainBlockTable``."""
        self.widen(worker + 1)
        checksum = ctypes.c_uint64(0)
        blocks = self._library.baton_blocks_add(
            self.handle,
            hashes,
            len(hashes) // HASH_BYTES,
            worker,
            max(most, 0),
            ctypes.byref(checksum),
        )
        return Changed(blocks, checksum.value)

    def remove(self, worker: int, hashes: bytes) -> Changed:
        """Remove blocks of a worker; see ``PlainBlockTable``."""
        self.widen(worker + 1)
        checksum = ctypes.c_uint64(0)
        blocks = self._library.baton_blocks_remove(
            self.handle, hashes, len(hashes) // HASH_BYTES, worker, ctypes.byref(checksum)
        )
        return Changed(blocks, checksum.value)

    def match(
        self, hashes: bytes, live: LiveWorkers, others: Sequence["BlockTable"] = ()
    ) -> list[tuple[int, int]]:
        """Match a prompt; see ``PlainBlockTable``."""
        tables = [self]
        tables += [other for other in others if isinstance(other, NativeBlockTable)]
        most = max(len(live.bits) * 8, max([table.room for table in tables]))
        live.bits += bytes(most // 8 - len(live.bits))
        for table in tables:
            if most > table.room:
                table.widen(most)
        if most > len(self._workers):
            self._workers = np.zeros(most, np.uint16)
            self._lengths = np.zeros(most, np.uint32)
            self._found_at = self._workers.ctypes.data, self._lengths.ctypes.data
        # Not a ctypes array: each length is a new type, which takes longer to create than this.
        count = self._library.baton_blocks_match(
            b"".join([table.packed_handle for table in tables]),
            len(tables),
            hashes,
            len(hashes) // HASH_BYTES,
            bytes(live.bits),
            len(live.bits) // 8,
            *self._found_at,
        )
        workers = self._workers[:count].tolist()
        lengths = self._lengths[:count].tolist()
        return list(zip(workers, lengths, strict=True))

    def sweep(self, first_part: int, parts: int, gone: Collection[int]) -> None:
        """Remove workers from some parts; see ``PlainBlockTable``."""
        if not gone or not self.blocks:
            return
        self.widen(max(gone) + 1)
        bits = bytearray(-(-self.room // 64) * 8)
        for worker in gone:
            bits[worker >> 3] |= 1 << (worker & 7)
        self._library.baton_blocks_sweep(self.handle, bytes(bits), first_part, parts)

    def hashes_of(self, worker: int) -> list[bytes]:
        """Return all blocks of a worker."""
        self.widen(worker + 1)
        count = self._library.baton_blocks_list(self.handle, worker, None, 0)
        buffer = ctypes.create_string_buffer(max(count, 1) * HASH_BYTES)
        self._library.baton_blocks_list(self.handle, worker, buffer, count)
        return list(each_hash(buffer.raw[: count * HASH_BYTES]))

    def clear(self) -> None:
        """Remove all blocks of all workers."""
        self._library.baton_blocks_clear(self.handle)


BlockTable = PlainBlockTable | NativeBlockTable


def block_table() -> BlockTable:
    """Return a native table, or a plain one without a compiler."""
    library = load()
    return PlainBlockTable() if library is None else NativeBlockTable(library)
