"""Blocks that clients have asked to keep: evicted last, within a budget, until the pin ends."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.block_owners import CacheOwner
from baton.engine.core.blocks import BlockPool
from baton.engine.core.pinned_blocks import PinnedBlocks, Retention
from tests.engine.core.test_block_owners import all_held, cached, filled, is_held
from tests.engine.core.test_scheduler import make_core, request, run

NO_OWNER = CacheOwner()
MINUTE = Retention(60, 0.5)
SECOND_NS = 1_000_000_000


def pinned(pool: BlockPool, count: int, seed: int, *, tenant="a", retention=MINUTE) -> list[int]:
    blocks = filled(pool, count, NO_OWNER, seed)
    pool.keep(blocks, tenant, retention)
    pool.release(blocks)
    return blocks


def check(pool: BlockPool) -> None:
    pool.check_integrity([[b for b in range(pool.total) if pool._references[b]]])


def test_pinned_blocks_outlive_newer_ones_until_their_time_ends() -> None:
    pool = BlockPool(10)
    kept = pinned(pool, 4, 1)
    newer = cached(pool, 6, NO_OWNER, 2)
    pool.release(pool.allocate(3))
    assert all_held(pool, kept) and sum(is_held(pool, block) for block in newer) == 3
    pool.pins.now_ns = 60 * SECOND_NS
    pool.allocate(6)
    assert not any(is_held(pool, block) for block in newer)
    assert all_held(pool, kept), "they became the newest when they were passed over"
    pool.allocate(1)
    assert not all_held(pool, kept)
    check(pool)


def test_they_are_evicted_when_nothing_else_is_left() -> None:
    pool = BlockPool(10)
    kept = pinned(pool, 5, 1)
    pool.allocate(8)
    assert [is_held(pool, block) for block in kept] == [True, True, False, False, False]
    check(pool)


def test_above_the_budget_the_oldest_pins_of_the_tenant_end() -> None:
    """The first blocks of a long sequence stay: the later ones cannot be used without them."""
    pool = BlockPool(20)
    quarter = Retention(60, 0.25)
    old = pinned(pool, 3, 1, retention=quarter)
    other = pinned(pool, 5, 2, tenant="b", retention=quarter)
    new = pinned(pool, 8, 3, retention=quarter)
    cached(pool, 4, NO_OWNER, 4)
    pool.allocate(10)
    assert not any(is_held(pool, block) for block in old)
    assert all_held(pool, other) and all_held(pool, new[:5])
    assert not any(is_held(pool, block) for block in new[5:])
    check(pool)


def test_pins_whose_time_is_over_take_nothing_of_the_budget() -> None:
    pool = BlockPool(20)
    kept = pinned(pool, 3, 1)
    pinned(pool, 6, 2, retention=Retention(1, 0.5))
    pool.pins.now_ns = 2 * SECOND_NS
    new = pinned(pool, 6, 3)
    assert all(pool.pins.holds(block) for block in kept + new)
    check(pool)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "forget", "time"]),
        st.sampled_from("ab"),
        st.sets(st.integers(0, 19), min_size=1, max_size=8),
        st.sampled_from([0, 1, 5, 60]),
    ),
    max_size=40,
)


@given(_STEPS)
def test_a_tenant_has_at_most_its_budget_whatever_is_pinned_and_ended(steps) -> None:
    """Pins are set, removed, set again and end by time; a live one ends only by its own tenant."""
    pins = PinnedBlocks(20)
    for action, tenant, blocks, seconds in steps:
        before = {block for block in range(20) if pins.holds(block)}
        if action == "time":
            pins.now_ns += seconds * SECOND_NS
        elif action == "forget":
            for block in blocks:
                pins.forget(block)
        else:
            rivals = {block for block in before if pins._tenant_of[block] != tenant}
            pins.keep(sorted(blocks), tenant, Retention(seconds, 0.25))
            assert rivals - blocks <= {block for block in range(20) if pins.holds(block)}
            fits = len((before - rivals) | blocks) <= 5
            if seconds and fits:
                assert before | blocks <= {block for block in range(20) if pins.holds(block)}
        pins.check(range(20))
        assert all(count <= 5 for count in Counter(pins._tenant_of.values()).values())


def test_the_end_of_a_session_ends_its_pins_and_nobody_elses() -> None:
    pool = BlockPool(10)
    ended = pinned(pool, 2, 1)
    other = pinned(pool, 2, 2, tenant="b")
    for blocks in ended, other:
        pool.pin(blocks)
        pool.keep(blocks, "a", Retention(0, 0.5))
        pool.release(blocks)
    cached(pool, 6, NO_OWNER, 3)
    pool.allocate(2)
    assert not any(is_held(pool, block) for block in ended) and all_held(pool, other)
    check(pool)


def test_a_shared_prefix_keeps_the_later_end() -> None:
    pool = BlockPool(10)
    blocks = pinned(pool, 2, 1, retention=Retention(3600, 0.5))
    for tenant in "a", "b":
        pool.keep(blocks, tenant, MINUTE)
    pool.pins.now_ns = 100 * SECOND_NS
    assert all(map(pool.pins.holds, blocks))


def test_a_tenant_above_its_share_keeps_what_it_has_pinned() -> None:
    pool = BlockPool(10)
    owner = CacheOwner("a", 0.3)
    kept = filled(pool, 2, owner, 1)
    pool.keep(kept, "a", Retention(60, 0.3))
    pool.release(kept)
    rest = cached(pool, 4, owner, 2)
    others = cached(pool, 4, NO_OWNER, 3)
    pool.allocate(3)
    assert all_held(pool, kept) and all_held(pool, others)
    assert sum(is_held(pool, block) for block in rest) == 1
    check(pool)


@pytest.mark.parametrize("retention", [None, Retention(60, 0.5), Retention(0, 0.5)])
def test_the_end_of_a_request_pins_what_it_has_computed(retention) -> None:
    core = make_core(blocks=12)
    session = request("s", prompt=list(range(64)), max_tokens=2)
    session.spec = msgspec.structs.replace(session.spec, retention=retention)
    core.scheduler.submit(session, 0)
    run(core)
    for number in range(3):
        prompt = list(range(1000 * number + 1000, 1000 * number + 1064))
        core.scheduler.submit(request(f"r{number}", prompt=prompt, max_tokens=2), 0)
        run(core)
    again = request("t", prompt=list(range(64)), max_tokens=2)
    core.scheduler.submit(again, 0)
    run(core)
    assert again.cached_tokens == (48 if retention and retention.keep_s else 0)
