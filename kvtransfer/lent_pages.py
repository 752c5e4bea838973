"""KV read directly from the sender's pages: pages to pages, one copy, one digest of the copy.

Both pools have one layout, so nothing is brought into wire order. The digest covers the slice in
the order (layer, K|V, token, head, dim), whatever pages hold it. Its seed covers KV transfer,
incarnation and slice. The reader computes it over its own copy, so bytes that the sender has
overwritten meanwhile fail like any others. So the sender need not wait for a late, frozen or dead
reader: it cannot write into the sender's pool, and it rejects what it reads too late.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash
from batonpb import prefill_pb2 as pb

from kvtransfer.chunk import ChunkError, GoneError, PoolView, Words, check_binding
from kvtransfer.kv_slice import KvSlice
from kvtransfer.native.moves import DIGEST_BYTES

TILE_BYTES = 256 << 10  # hashed while still in the cache; above 64 KiB xxhash releases the GIL


class _Stretch(NamedTuple):
    """Blocks whose pages are consecutive in every table."""

    first_pages: tuple[int, ...]
    blocks: int
    tokens: int  # of each block


def page_digest(pool: PoolView, pages: Sequence[int], kv_slice: KvSlice, bound: bytes) -> bytes:
    """Return the digest (8 bytes) of a slice that lies in these pages."""
    if pool.native is not None:
        return struct.pack("<Q", pool.native.digest(pages, kv_slice, _seed(kv_slice, bound)))
    digest = hasher(kv_slice, bound)
    for (tile,) in _tiles(kv_slice, (pool, pages)):
        digest.update(np.ascontiguousarray(tile).data)
    return struct.pack("<Q", digest.intdigest())


@dataclass(frozen=True, slots=True)
class LentFrame:
    """Pages of a peer; see ``transport.Frame``."""

    header: pb.ChunkHeader
    source: PoolView

    def store(self, pool: PoolView, blocks: Sequence[int], kv_slice: KvSlice, bound: bytes) -> None:
        """Copy into our pages, which are not read before the commit, and verify the copy."""
        header = self.header
        if header.HasField("error"):
            raise GoneError(header.error.message)
        pages = list(header.pages)
        if len(pages) != kv_slice.block_count:
            raise ChunkError(f"{len(pages)} pages for {kv_slice}", "size")
        check_binding(header, kv_slice, bound)
        if max(pages) >= self.source.geometry.num_blocks:
            raise ChunkError(f"page {max(pages)} is outside the pool", "torn")
        ours = kv_slice.pages(blocks)
        if not self._copy(pool, pages, ours, kv_slice, bound):
            raise ChunkError(f"digest mismatch at {kv_slice}", "digest")

    def _copy(
        self,
        pool: PoolView,
        pages: Sequence[int],
        ours: Sequence[int],
        kv_slice: KvSlice,
        bound: bytes,
    ) -> bool:
        """Copy, and return whether the digest matches; if not, nothing of the copy stays."""
        source = self.source
        expected = self.header.digests
        if pool.native is not None and source.native is not None:
            if len(expected) != DIGEST_BYTES:
                return False
            seed = _seed(kv_slice, bound)
            digest_wanted = int.from_bytes(expected, "little")
            return pool.native.copy(source.native, pages, ours, kv_slice, seed, digest_wanted)
        digest = hasher(kv_slice, bound)
        for target, lent in _tiles(kv_slice, (pool, ours), (source, pages)):
            target[...] = lent
            digest.update(np.ascontiguousarray(target).data)
        if struct.pack("<Q", digest.intdigest()) == expected:
            return True
        for (target,) in _tiles(kv_slice, (pool, ours)):
            target[...] = 0  # a masked NaN would still be NaN
        return False


def hasher(kv_slice: KvSlice, bound: bytes) -> xxhash.xxh3_64:
    """Return the digest object of a slice, before any byte of it."""
    return xxhash.xxh3_64(seed=_seed(kv_slice, bound))


def _seed(kv_slice: KvSlice, bound: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(b"pages" + bound + kv_slice.packed()))


def _tiles(kv_slice: KvSlice, *places: tuple[PoolView, Sequence[int]]) -> Iterator[list[Words]]:
    """Yield the slice in order, in tiles that are contiguous in each of the pools."""
    geometry = places[0][0].geometry
    row_bytes = geometry.block_tokens * kv_slice.head_count * geometry.head_bytes
    longest = max(1, TILE_BYTES // row_bytes)
    tables = [table for _, table in places]
    stretches = list(_stretches(kv_slice, geometry.block_tokens, longest, tables))
    for layer in range(kv_slice.layer_begin, kv_slice.layer_begin + kv_slice.layer_count):
        for kv in (0, 1):
            rows = [pool.row(layer, kv, kv_slice) for pool, _ in places]
            for firsts, blocks, tokens in stretches:
                yield [
                    row[first : first + blocks, :tokens]
                    for row, first in zip(rows, firsts, strict=True)
                ]


def _stretches(
    kv_slice: KvSlice, block_tokens: int, longest: int, tables: Sequence[Sequence[int]]
) -> Iterator[_Stretch]:
    full, tail = divmod(kv_slice.valid_tokens, block_tokens)
    pages = np.asarray([table[:full] for table in tables])
    # a run begins at each block whose page does not follow the one before in all tables
    broken = np.flatnonzero((np.diff(pages, axis=1) != 1).any(axis=0)) + 1
    edges = [0, *broken.tolist(), full] if full else []
    for run_begin, run_end in pairwise(edges):
        for begin in range(run_begin, run_end, longest):
            first_pages = tuple(table[begin] for table in tables)
            yield _Stretch(first_pages, min(longest, run_end - begin), block_tokens)
    if tail:
        yield _Stretch(tuple(table[full] for table in tables), 1, tail)
