"""The KV of one replica, in whose memory it may be: one pool, or one for each rank.

    ranks share      heads 0..2  [ one pool, all heads ]
    own pools        heads 0     [ rank 0 ]      heads 1..2  [ rank 1 ]
    more than heads  head 0      [ rank 0 ]  [ rank 1 ]  [ rank 2 ]     (each needs a copy)

Pages have the same numbers in all of them. A slice lies within the heads of one rank, and is to be
written into every pool that has these heads.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.core.geometry import KvGeometry
from engine.core.split import owned_heads, rank_geometries
from kvtransfer.chunk import PoolView
from kvtransfer.kv_slice import KvSlice


class KvPools(Protocol):
    """What holds a replica's KV."""

    @property
    def geometry(self) -> KvGeometry:
        """Of the whole: with all heads of the model."""

    @property
    def parts(self) -> Sequence[range]:
        """Heads that lie together, in order; no slice reaches beyond one of them."""

    def holding(self, kv_slice: KvSlice) -> Sequence[PoolView]:
        """The pools with these heads; they hold the same bytes, once they are written.

        Raises:
            IndexError: No pool has all of them.
        """


class RankPools:
    """The pools of all ranks of a replica on this host.

    Args:
        memory: One pool with all heads, or one for each rank.
        geometry: Of the whole.
    """

    def __init__(self, memory: Sequence[memoryview | bytearray], geometry: KvGeometry) -> None:
        ranks = len(memory)
        heads = [owned_heads(rank, ranks, geometry.num_kv_heads) for rank in range(ranks)]
        shapes = rank_geometries(geometry, ranks)
        self.geometry = geometry
        self.parts: tuple[range, ...] = tuple(dict.fromkeys(heads))
        self._views = [
            (own, PoolView(pool, shape, own.start))
            for own, pool, shape in zip(heads, memory, shapes, strict=True)
        ]

    def holding(self, kv_slice: KvSlice) -> Sequence[PoolView]:
        """See ``KvPools``."""
        begin, end = kv_slice.head_begin, kv_slice.head_begin + kv_slice.head_count
        found = [view for own, view in self._views if own.start <= begin and end <= own.stop]
        if not found:
            raise IndexError(f"no pool has all heads of {kv_slice}")
        return found
