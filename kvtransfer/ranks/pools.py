"""The KV of one replica, in whose memory it may be: one pool, or one for each rank.

    ranks share      heads 0..2  [ one pool, all heads ]
    own pools        heads 0     [ rank 0 ]      heads 1..2  [ rank 1 ]
    more than heads  head 0      [ rank 0 ]  [ rank 1 ]  [ rank 2 ]     (each needs a copy)

Pages have the same numbers in all of them. A slice lies within the heads of one rank, and is to be
written into every pool that has these heads. The pools of ranks on other hosts are reached by words
to these ranks (``link.py``).
"""

from collections.abc import Sequence
from typing import Protocol

from baton.engine.core.split import owned_heads, rank_geometries
from baton.types.geometry import KvGeometry
from kvtransfer.chunk import PoolView
from kvtransfer.kv_slice import KvSlice
from kvtransfer.ranks.link import RankLink


class KvPools(Protocol):
    """What holds a replica's KV."""

    @property
    def geometry(self) -> KvGeometry:
        """Of the whole: with all heads of the model."""

    @property
    def parts(self) -> Sequence[range]:
        """Heads that lie together, in order; no slice reaches beyond one of them."""

    def holding(self, kv_slice: KvSlice) -> Sequence[PoolView]:
        """The pools here with these heads; they hold the same bytes, once they are written."""

    def elsewhere(self, kv_slice: KvSlice) -> Sequence[RankLink]:
        """The ranks on other hosts with these heads."""

    @property
    def links(self) -> Sequence[RankLink]:
        """To all ranks on other hosts."""


class RankPools:
    """The pools of all ranks of a replica.

    Args:
        memory: One pool with all heads, or one for each rank on this host, the leader's first.
        geometry: Of the whole.
        links: To the ranks elsewhere, behind those.
    """

    def __init__(
        self,
        memory: Sequence[memoryview | bytearray],
        geometry: KvGeometry,
        links: Sequence[RankLink] = (),
    ) -> None:
        ranks = len(memory) + len(links)
        heads = [owned_heads(rank, ranks, geometry.num_kv_heads) for rank in range(ranks)]
        shapes = rank_geometries(geometry, ranks)
        self.geometry = geometry
        self.parts: tuple[range, ...] = tuple(dict.fromkeys(heads))
        self._views = [
            (own, PoolView(pool, shape, own.start))
            for own, pool, shape in zip(heads, memory, shapes, strict=False)
        ]
        self._links = list(zip(heads[len(memory) :], links, strict=True))

    def holding(self, kv_slice: KvSlice) -> Sequence[PoolView]:
        """See ``KvPools``."""
        return [view for own, view in self._views if _has(own, kv_slice)]

    def elsewhere(self, kv_slice: KvSlice) -> Sequence[RankLink]:
        """See ``KvPools``."""
        return [link for own, link in self._links if _has(own, kv_slice)]

    @property
    def links(self) -> Sequence[RankLink]:
        """To all ranks elsewhere."""
        return [link for _, link in self._links]

    @property
    def served_elsewhere(self) -> Sequence[tuple[range, str]]:
        """Heads that no pool here has, and the address at which each can be had."""
        here = {own for own, _ in self._views}
        found: dict[range, str] = {}
        for own, link in self._links:
            if own not in here:
                found.setdefault(own, link.address)
        return list(found.items())


def _has(own: range, kv_slice: KvSlice) -> bool:
    end = kv_slice.head_begin + kv_slice.head_count
    return own.start <= kv_slice.head_begin and end <= own.stop
