"""The block pool: every block in one state, hashes outlive owners, tails go before roots."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.blocks import BlockPool
from baton.registry.types import hashes_checksum
from baton.types.block_hashes import block_hash, block_hashes, hash_seed


def hashes(count: int, seed: bytes = b"s" * 16) -> list[bytes]:
    return block_hashes(seed, list(range(count * 16)))


def allocate_hashed(pool: BlockPool, count: int, seed: bytes = b"s" * 16) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    for block, digest in zip(blocks, hashes(count, seed), strict=True):
        pool.set_hash(block, digest)
    return blocks


def test_a_released_block_keeps_its_hash_until_it_is_taken():
    pool = BlockPool(4)
    pool.release(allocate_hashed(pool, 3))
    assert pool.counts().cached == 3
    assert len(pool.match(hashes(3))) == 3
    assert pool.allocate(2) is not None  # one free, one evicted
    assert len(pool.match(hashes(3))) == 2, "the tail went first"


def test_allocation_is_contiguous_where_it_can_be():
    pool = BlockPool(16)
    first = pool.allocate(4)
    second = pool.allocate(3)
    assert first == [0, 1, 2, 3]
    pool.release(first)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(2, after=second[-1]) == [7, 8]


def test_evicted_blocks_of_one_sequence_come_back_as_a_run():
    pool = BlockPool(6)
    pool.release(allocate_hashed(pool, 6))
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_too_much_takes_nothing():
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.counts().free == 3


def test_quarantined_blocks_lose_hash_and_come_back_only_when_absolved():
    pool = BlockPool(3)
    blocks = allocate_hashed(pool, 2)
    pool.quarantine(blocks)
    assert pool.counts().quarantined == 2
    assert pool.match(hashes(2)) == []
    assert pool.allocate(2) is None
    pool.absolve(blocks)
    assert pool.counts().free == 3


def test_events_tell_what_came_and_went_once():
    pool = BlockPool(2)
    pool.release(allocate_hashed(pool, 2))
    stored, removed = pool.take_events()
    assert (stored, removed) == (hashes(2), [])
    pool.allocate(2)
    stored, removed = pool.take_events()
    assert (stored, sorted(removed)) == ([], sorted(hashes(2)))


def _twice_in_a_table(pool, table):
    pool._references[table[0]] += 1
    table.append(table[0])


def _free_and_in_use(pool, table):
    pool._free.add(table[0])


def _free_with_a_hash(pool, table):
    pool.release([table.pop()])
    pool._free.add(pool._cached.popitem()[0])


def _lost(pool, table):
    pool._free.take([7])


def _one_hash_for_two(pool, table):
    pool._hash_of[table[0]] = pool._hash_of[table[1]]


def _quarantined_by_nobody(pool, table):
    pool._quarantined.update(pool._free.take([7]))


@pytest.mark.parametrize(
    "damage",
    [
        _twice_in_a_table,
        _free_and_in_use,
        _free_with_a_hash,
        _lost,
        _one_hash_for_two,
        _quarantined_by_nobody,
    ],
)
def test_check_integrity_finds_every_kind_of_damage(damage):
    pool = BlockPool(8)
    table = allocate_hashed(pool, 3)
    pool.check_integrity([table], [])
    damage(pool, table)
    with pytest.raises(RuntimeError):
        pool.check_integrity([table], [])


def test_free_blocks_are_found_as_a_set_of_numbers_would_find_them():
    """The first run that is long enough; behind a sequence, its next ones; else the lowest."""
    draw = random.Random(4)
    for _ in range(200):
        pool = BlockPool(12)
        used = draw.sample(range(12), draw.randrange(12))
        pool._free.take(used)
        free = sorted(set(range(12)) - set(used))
        assert list(pool._free) == free
        assert len(pool._free) == len(free)
        count, after = draw.randrange(1, 6), draw.choice([None, draw.randrange(12)])
        taken = pool.allocate(count, after)
        if count > len(free):
            assert taken is None
            continue
        runs = [free[i : i + count] for i in range(len(free) - count + 1)]
        runs = [run for run in runs if run[-1] - run[0] == count - 1]
        expected = runs[0] if count > 1 and runs else free[:count]
        if after is not None:
            following = [after + 1 + i for i in range(count)]
            begin = [b for i, b in enumerate(following) if set(following[: i + 1]) <= set(free)]
            others = [block for block in free if block not in begin]
            expected = sorted(begin + others[: count - len(begin)])
        assert taken == expected


def test_check_integrity_finds_a_lost_reference():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.check_integrity([blocks])
    with pytest.raises(RuntimeError, match="reference counts differ"):
        pool.check_integrity([])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=60))
def test_the_block_equation_holds_whatever_happens(script):
    pool, tables, published = BlockPool(12), [], set()
    for number, (what, count) in enumerate(script):
        if what == 0:
            blocks = pool.allocate(count)
            if blocks is not None:
                tables.append(blocks)
                for block, digest in zip(
                    blocks, hashes(count, bytes([number % 7]) * 16), strict=True
                ):
                    pool.set_hash(block, digest)
        elif what == 1 and tables:
            pool.release(tables.pop(count % len(tables)))
        elif what == 2 and tables:
            table = tables[count % len(tables)]
            pool.pin(table)
            tables.append(list(table))
        elif what == 3:
            found = pool.match(hashes(count, bytes([number % 7]) * 16))
            pool.pin(found)
            tables.append(found)
        pool.check_integrity(tables)
        counts = pool.counts()
        assert counts.free + counts.cached + counts.in_use + counts.quarantined == counts.total
        stored, removed = pool.take_events()
        published = (published - set(removed)) | set(stored)
        assert published == set(pool.hashes()), "the index could be rebuilt from the events"


def test_hashes_cover_everything_before_them():
    seed = hash_seed(b"weights", "bf16/30x3x64/16", "exact", "", "tenant")
    one = block_hashes(seed, list(range(40)))
    other = block_hashes(seed, [99, *range(1, 40)])
    assert len(one) == 2, "a partial tail has no hash"
    assert one[0] != other[0]
    assert one[1] != other[1], "the second block's hash covers the first"
    assert block_hash(one[0], range(16, 32)) == one[1]


def test_tenants_and_formats_never_share_a_hash():
    base = (b"w", "bf16/30x3x64/16", "exact", "", "a")
    changed = [
        hash_seed(
            *(
                f + (b"!" if isinstance(f, bytes) else "!") if i == j else f
                for j, f in enumerate(base)
            )
        )
        for i in range(5)
    ]
    assert len({hash_seed(*base), *changed}) == 6
    assert hash_seed(b"w", "ab", "c") != hash_seed(b"w", "a", "bc"), "fields stay apart"


def test_golden_hash():
    """Hashes must be equal across processes and releases: this one is frozen."""
    seed = hash_seed(b"\x01" * 16, "bf16/30x3x64/16", "exact/test", "", "default")
    assert block_hashes(seed, list(range(16)))[0].hex() == GOLDEN


def test_the_checksum_is_order_free_and_undoes_itself():
    some = hashes(5)
    assert hashes_checksum(some) == hashes_checksum(some[::-1])
    assert hashes_checksum(some + some) == 0


GOLDEN = "155f3ded05732d932854448055df1495"
