"""Who owns what: every head and every column once, in order, however uneven."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.split import columns, splits


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 12), st.integers(1, 700))
def test_pieces_in_rank_order_are_the_whole_model(
    kv_heads: int, group: int, ranks: int, width: int
) -> None:
    heads = kv_heads * group
    sizes = {"heads": heads, "kv_heads": kv_heads, "feed": width, "hidden": 64, "vocab": 640}
    try:
        parts = splits(ranks, **sizes)
    except ValueError:
        assert ranks > min(heads, width) or ranks > kv_heads
        return
    for name, size in (("heads", heads), ("feed", width), ("hidden", 64), ("vocab", 640)):
        pieces = [list(getattr(part, name)) for part in parts]
        assert all(pieces), f"a rank without {name}"
        assert list(itertools.chain(*pieces)) == list(range(size))
    for part in parts:
        # the KV heads of its queries, and as many queries for each
        assert {head // group for head in part.heads} == set(part.kv_heads)
        assert len(part.heads) % len(part.kv_heads) == 0


def test_uneven_and_replicated_heads() -> None:
    smollm2 = {"heads": 9, "kv_heads": 3, "feed": 1536, "hidden": 576, "vocab": 49_152}
    two = splits(2, **smollm2)
    assert [part.kv_heads for part in two] == [range(1), range(1, 3)]
    assert [part.heads for part in two] == [range(3), range(3, 9)]
    gemma = {"heads": 4, "kv_heads": 1, "feed": 2048, "hidden": 640, "vocab": 262_144}
    three = splits(3, **gemma)
    assert [part.kv_heads for part in three] == [range(1)] * 3
    assert [part.heads for part in three] == [range(1), range(1, 2), range(2, 4)]
    assert [part.hidden for part in three] == [range(208), range(208, 416), range(416, 640)]


def test_columns_are_cut_at_multiples_of_a_vector_where_there_are_enough() -> None:
    assert [columns(rank, 3, 100) for rank in range(3)] == [
        range(32),
        range(32, 64),
        range(64, 100),
    ]
    assert [columns(rank, 2, 7) for rank in range(2)] == [range(3), range(3, 7)]


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (10, {}, "only 9 query heads for 10 ranks"),
        (4, {"feed": 3}, "only 3 columns of the feed-forward for 4 ranks"),
        (4, {"hidden": 2}, "2 hidden columns"),
        (4, {"vocab": 2}, "2 rows of the LM head"),
        (8, {"heads": 8, "kv_heads": 7}, "7 KV heads"),
    ],
)
def test_a_width_that_leaves_a_rank_without_work_is_refused_by_name(
    ranks: int, changes: dict[str, int], message: str
) -> None:
    sizes = {"heads": 9, "kv_heads": 3, "feed": 64, "hidden": 64, "vocab": 64} | changes
    with pytest.raises(ValueError, match=message):
        splits(ranks, **sizes)
