"""Division of a model over tensor-parallel ranks: heads, and columns of every product.

    heads 0..8, KV heads 0..2, two ranks      rank 0: KV 0, q 0..2       rank 1: KV 1..2, q 3..8
    heads 0..3, KV head 0, three ranks        rank 0: q 0   rank 1: q 1   rank 2: q 2..3

Rank r of T owns KV heads ``floor(r*H/T)`` up to ``max(floor(r*H/T) + 1, floor((r+1)*H/T))``. Query
heads follow their KV head. With more ranks than KV heads, ranks with the same KV head divide its
query heads. Columns are cut as evenly as multiples of 16 allow.
"""

from dataclasses import dataclass

import msgspec

from baton.types.geometry import KvGeometry

_COLUMNS = 16  # the width of the kernels' vectors


def owned_heads(rank: int, ranks: int, heads: int) -> range:
    """Return the KV heads of a rank."""
    begin = rank * heads // ranks
    return range(begin, max(begin + 1, (rank + 1) * heads // ranks))


def rank_geometries(geometry: KvGeometry, ranks: int) -> list[KvGeometry]:
    """Return each rank's pool geometry if every rank has its own pool."""
    heads = [len(owned_heads(rank, ranks, geometry.num_kv_heads)) for rank in range(ranks)]
    return [msgspec.structs.replace(geometry, num_kv_heads=count) for count in heads]


def columns(rank: int, ranks: int, width: int) -> range:
    """Return a rank's part of ``width`` columns."""
    unit = _COLUMNS if width >= _COLUMNS * ranks else 1
    begin = rank * (width // unit) // ranks * unit
    last = rank == ranks - 1
    return range(begin, width if last else (rank + 1) * (width // unit) // ranks * unit)


@dataclass(frozen=True, slots=True)
class Split:
    """Part of a model on one rank.

    Attributes:
        heads: Query heads.
        kv_heads: KV heads of these query heads; other ranks may hold the same one.
        feed: Columns of the gate and up projections.
        hidden: Columns of the attention output and down projections, added to the residual.
        vocab: Rows of the LM head.
    """

    rank: int
    ranks: int
    heads: range
    kv_heads: range
    feed: range
    hidden: range
    vocab: range


def splits(
    ranks: int, *, heads: int, kv_heads: int, feed: int, hidden: int, vocab: int
) -> list[Split]:
    """Return every rank's part, in rank order.

    Raises ``ValueError`` with the dimension that is too small for so many ranks.
    """
    sizes = {
        "query heads": heads,
        "columns of the feed-forward": feed,
        "hidden columns": hidden,
        "rows of the LM head": vocab,
    }
    for name, size in sizes.items():
        if ranks > size:
            raise ValueError(f"the model has only {size} {name} for {ranks} ranks")
    owned = [owned_heads(rank, ranks, kv_heads) for rank in range(ranks)]
    if ranks > kv_heads and max(owned.count(head) for head in owned) > heads // kv_heads:
        raise ValueError(
            f"{ranks} ranks share {kv_heads} KV heads, and the model has only "
            f"{heads // kv_heads} query heads for each"
        )
    return [
        Split(
            rank,
            ranks,
            _query_heads(rank, owned, heads // kv_heads),
            owned[rank],
            columns(rank, ranks, feed),
            columns(rank, ranks, hidden),
            columns(rank, ranks, vocab),
        )
        for rank in range(ranks)
    ]


def _query_heads(rank: int, owned: list[range], group: int) -> range:
    """Return the query heads of a rank; ``group`` query heads share a KV head."""
    mine = owned[rank]
    sharers = [other for other, heads in enumerate(owned) if heads == mine]
    place = sharers.index(rank)
    count = len(sharers)
    if count == 1:
        return range(mine.start * group, mine.stop * group)
    base = mine.start * group
    return range(base + place * group // count, base + (place + 1) * group // count)
