"""KV of one replica: one pool, or one for each rank.

    ranks share      heads 0..2  [ one pool, all heads ]
    own pools        heads 0     [ rank 0 ]      heads 1..2  [ rank 1 ]
    more than heads  head 0      [ rank 0 ]  [ rank 1 ]  [ rank 2 ]     (each needs a copy)

Pages have the same numbers in all of them. A slice lies within the heads of one rank, and must be
written into every pool that has these heads.
"""

from collections.abc import Sequence

from baton.engine.core.split import owned_heads, rank_geometries
from baton.types.geometry import KvGeometry
from kvtransfer.chunk import PoolView
from kvtransfer.kv_slice import KvSlice


class RankPools:
    """The pools of all ranks of a replica.

    Attributes:
        geometry: Geometry of the whole replica, with all heads of the model.
        parts: Heads that lie together, in order; no slice extends beyond one of them.

    Args:
        memory: One pool with all heads, or one for each rank, the leader's first.
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
        """Return the pools with these heads; once written, their bytes are equal."""
        return [view for own, view in self._views if _has(own, kv_slice)]


def _has(own: range, kv_slice: KvSlice) -> bool:
    end = kv_slice.head_begin + kv_slice.head_count
    return own.start <= kv_slice.head_begin and end <= own.stop
