"""Shares of the cache: who loses blocks first, at a cost that does not grow with the blocks."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.block_owners import CacheOwner
from baton.engine.core.blocks import BlockPool
from baton.types.block_hashes import block_hashes, tag_in
from tests.engine.core.test_scheduler import make_core, request, run
from tests.soak import examples


def filled(pool: BlockPool, count: int, owner: CacheOwner, seed: int) -> list[int]:
    """Take ``count`` blocks with hashes of their own."""
    blocks = pool.allocate(count)
    assert blocks is not None
    digests = block_hashes(seed.to_bytes(16), list(range(count * 16)))
    for block, digest in zip(blocks, digests, strict=True):
        pool.set_hash(block, digest, owner)
    return blocks


def cached(pool: BlockPool, count: int, owner: CacheOwner, seed: int) -> list[int]:
    blocks = filled(pool, count, owner, seed)
    pool.release(blocks)
    return blocks


def is_held(pool: BlockPool, block: int) -> bool:
    return pool._hash_of[block] is not None


def all_held(pool: BlockPool, blocks: list[int]) -> bool:
    return all(is_held(pool, block) for block in blocks)


A, B, NONE = CacheOwner("a", 0.3), CacheOwner("b", 0.5), CacheOwner("c")


def test_a_tenant_above_its_share_loses_its_own_blocks_before_older_ones_of_others() -> None:
    pool = BlockPool(10)
    others = cached(pool, 4, NONE, 1)
    own = cached(pool, 6, A, 2)
    assert pool.allocate(4) is not None
    assert all_held(pool, others), "the oldest blocks are of others"
    assert [is_held(pool, block) for block in own] == [True, True, *[False] * 4], "its tail is gone"
    pool.check_integrity([[b for b in range(10) if pool._references[b]]])


def test_a_tenant_within_its_share_loses_blocks_by_age() -> None:
    pool = BlockPool(10)
    own = cached(pool, 2, A, 1)
    others = cached(pool, 8, NONE, 2)
    pool.allocate(2)
    assert not any(is_held(pool, block) for block in own)
    assert all_held(pool, others)


def test_several_tenants_lose_down_to_their_shares_and_then_by_age() -> None:
    pool = BlockPool(20)
    free = cached(pool, 2, NONE, 1)
    a = cached(pool, 9, A, 2)
    b = cached(pool, 9, B, 3)
    pool.allocate(10)
    left = Counter(is_held(pool, block) for block in a)[True]
    assert left == 3, "0.3 of the 10 that stay cached"
    assert Counter(is_held(pool, block) for block in b)[True] == 5
    assert all_held(pool, free), "nothing was left to take by age"


def test_pinned_blocks_stay_and_free_blocks_come_first() -> None:
    pool = BlockPool(12)
    pinned = filled(pool, 5, A, 1)
    cached(pool, 5, NONE, 2)
    assert pool.allocate(2) is not None and pool.evictions == 0, "free blocks were left"
    pool.allocate(4)
    assert all_held(pool, pinned)
    assert pool.counts().cached == 1


def test_a_new_share_counts_at_once_and_a_removed_one_no_longer() -> None:
    pool = BlockPool(10)
    others = cached(pool, 3, NONE, 1)
    cached(pool, 6, CacheOwner("a", 0.1), 2)
    cached(pool, 1, CacheOwner("a", 0.0), 3)
    pool.allocate(1)
    assert not all_held(pool, others), "without a share it is one of all"
    cached(pool, 1, CacheOwner("a", 0.1), 4)
    left = [block for block in others if is_held(pool, block)]
    pool.allocate(3)
    assert all_held(pool, left)


class Counted(set):
    """A set that counts how often it is asked."""

    asked = 0

    def __contains__(self, block: object) -> bool:
        self.asked += 1
        return super().__contains__(block)


@pytest.mark.parametrize("total", [100, 100_000])
def test_the_cost_of_an_eviction_does_not_grow_with_the_number_of_blocks(total) -> None:
    pool = BlockPool(total)
    cached(pool, total // 2, NONE, 1)
    cached(pool, total - total // 2, A, 2)
    pool.guarded = Counted()
    for _ in range(20):
        assert pool._evict(1)
    assert pool.guarded.asked <= 20 * 2


OWNERS = [CacheOwner("a", 0.2), CacheOwner("a", 0.0), CacheOwner("b", 0.6), NONE]


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.sampled_from(OWNERS)), max_size=60)
)
def test_the_pool_stays_whole_and_shares_decide_whatever_happens(script) -> None:
    pool, tables, draining = BlockPool(12), [], []
    for number, (what, count, owner) in enumerate(script):
        if what == 0:
            before = pool.counts()
            blocks = pool.allocate(count)
            assert (blocks is None) == (count > before.free + before.cached)
            if blocks is not None:
                tables.append(blocks)
                digests = block_hashes(bytes([number % 7]) * 16, list(range(count * 16)))
                for block, digest in zip(blocks, digests, strict=True):
                    pool.set_hash(block, digest, owner)
        elif what == 1 and tables:
            pool.release(tables.pop(count % len(tables)))
        elif what == 2 and tables:
            table = tables[count % len(tables)]
            pool.pin(table)
            tables.append(list(table))
        elif what == 3:
            found = pool.match(block_hashes(bytes([number % 7]) * 16, list(range(count * 16))))
            pool.pin(found)
            tables.append(found)
        elif what == 4 and tables:
            table = tables.pop(count % len(tables))
            if any(pool.shared(block) for block in table):
                pool.release(table)
            else:
                pool.quarantine(table)
                draining += table
        elif what == 5:
            pool.forget(frozenset({tag_in(bytes([count]) * 16)}))
        pool.check_integrity(tables, draining)


def test_a_forgotten_block_is_free_and_no_longer_of_its_tenant() -> None:
    """The tenant has other blocks too, of a newer salt."""
    pool = BlockPool(10)
    cached(pool, 4, A, 1)
    newer = cached(pool, 4, A, 2)
    cached(pool, 2, NONE, 3)
    assert pool.forget(frozenset({tag_in((1).to_bytes(16))})) == 4
    pool.check_integrity([])
    assert pool.allocate(5) is not None
    assert pool.counts().cached == 5
    assert sum(is_held(pool, block) for block in newer) == 3


def test_random_evictions_take_nothing_of_tenants_within_their_shares() -> None:
    """While another one is above its own."""
    draw = random.Random(3)
    for round_ in range(100):
        pool = BlockPool(60)
        sizes = [draw.randrange(1, 20) for _ in range(3)]
        held = {
            owner: cached(pool, size, owner, 10 * round_ + place)
            for place, (owner, size) in enumerate(zip((A, B, NONE), sizes, strict=True))
        }
        cached(pool, 60 - sum(sizes), CacheOwner("big", 0.01), 10 * round_ + 9)
        count = draw.randrange(1, 4)
        pool.allocate(count)
        after = 60 - count
        for owner, blocks in held.items():
            left = sum(is_held(pool, block) for block in blocks)
            allowed = int(owner.share * after) if owner.share else len(blocks)
            assert left >= min(len(blocks), allowed)


def asked(core, name: str, first: int, owner: CacheOwner, tokens: int = 160) -> int:
    """Run one prompt of ten blocks, and return how many of its tokens were cached."""
    made = request(name, list(range(first, first + tokens)), max_tokens=1)
    made.spec = msgspec.structs.replace(made.spec, tenant=owner.tenant, kv_share=owner.share)
    core.scheduler.submit(made, 0)
    run(core)
    return made.cached_tokens


@pytest.mark.parametrize(("share", "kept"), [(0.25, True), (0.0, False)])
def test_a_tenant_with_a_share_does_not_push_the_prefix_of_another_out(share, kept) -> None:
    core = make_core(blocks=64)
    assert asked(core, "calm", 0, CacheOwner("calm", 0.5)) == 0
    for number in range(1, 12):
        asked(core, f"big{number}", 1000 * number, CacheOwner("big", share))
    assert (asked(core, "calm again", 0, CacheOwner("calm", 0.5)) == 144) is kept
