"""The prefix index follows the truth, whatever the feed loses, repeats, or delays."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.registry.types import EventBatch, Forget, Heartbeat, Snapshot, hashes_checksum
from baton.types.block_hashes import block_hashes, hash_seed
from baton.types.events import CacheChanged
from router.routing.placement.block_table import PlainBlockTable
from router.routing.placement.prefix_index import Applied, PrefixIndex
from tests.soak import examples

A, B = b"a" * 16, b"b" * 16


def prefix_blocks(index: PrefixIndex, incarnation: bytes, hashes, now_ns=None) -> int:
    """Return the number of first ``hashes`` that an incarnation holds."""
    return index.prefixes(hashes, now_ns).get(incarnation, 0)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def batch(sequence: int, stored=(), removed=(), incarnation=A) -> EventBatch:
    return EventBatch(
        incarnation=incarnation,
        sequence=sequence,
        stored=tuple(map(name, stored)),
        removed=tuple(map(name, removed)),
    )


def snapshot(sequence: int, hashes, incarnation=A) -> Snapshot:
    return Snapshot(
        incarnation=incarnation, sequence=sequence, packed=b"".join(set(map(name, hashes)))
    )


def test_batches_in_order_are_applied():
    prefix_index = PrefixIndex()
    assert prefix_index.apply(batch(1, stored=[1, 2, 3])) is Applied.DONE
    assert prefix_index.apply(batch(2, stored=[4], removed=[2])) is Applied.DONE
    assert prefix_index.hashes_of(A) == {name(1), name(3), name(4)}
    assert prefix_index.apply(batch(2, stored=[50])) is Applied.OLD


def test_a_hole_asks_for_a_snapshot_and_what_came_meanwhile_is_not_lost():
    prefix_index = PrefixIndex()
    prefix_index.apply(batch(1, stored=[1]))
    assert prefix_index.apply(batch(3, stored=[3])) is Applied.SNAPSHOT_NEEDED
    assert prefix_index.apply(batch(4, stored=[4])) is Applied.SNAPSHOT_NEEDED
    assert prefix_index.apply(snapshot(3, [1, 2, 3])) is Applied.DONE
    assert prefix_index.hashes_of(A) == {name(1), name(2), name(3), name(4)}
    assert prefix_index.apply(batch(5, stored=[5])) is Applied.DONE


def test_a_lost_tail_is_noticed_by_the_heartbeat():
    prefix_index = PrefixIndex()
    prefix_index.apply(batch(1, stored=[1]))
    good = Heartbeat(incarnation=A, sequence=1, checksum=hashes_checksum([name(1)]))
    assert prefix_index.apply(good) is Applied.DONE
    later = Heartbeat(incarnation=A, sequence=2, checksum=0)
    assert prefix_index.apply(later) is Applied.SNAPSHOT_NEEDED
    prefix_index.apply(snapshot(2, []))
    wrong = Heartbeat(incarnation=A, sequence=2, checksum=77)
    assert prefix_index.apply(wrong) is Applied.SNAPSHOT_NEEDED
    assert prefix_index.gaps == 2


def test_an_old_snapshot_is_not_believed():
    prefix_index = PrefixIndex()
    for sequence in range(1, 6):
        prefix_index.apply(batch(sequence, stored=[sequence]))
    assert prefix_index.apply(snapshot(2, [99])) is Applied.OLD
    assert name(99) not in prefix_index.hashes_of(A)


def test_forgetting_is_one_step_however_much_was_held():
    prefix_index = PrefixIndex()
    prefix_index.apply(snapshot(1, range(200_000)))
    prefix_index.apply(batch(1, stored=[1], incarnation=B))
    hashes = [name(1)]
    assert prefix_blocks(prefix_index, A, hashes) == prefix_blocks(prefix_index, B, hashes) == 1
    began_s = time.perf_counter()
    prefix_index.apply(Forget(incarnation=A))
    assert time.perf_counter() - began_s < 0.2
    assert prefix_blocks(prefix_index, A, hashes) == 0
    assert prefix_blocks(prefix_index, B, hashes) == 1
    assert prefix_index.total_hashes == 1


def test_it_is_bounded():
    prefix_index = PrefixIndex(max_hashes=10, max_incarnations=3)
    prefix_index.apply(batch(1, stored=range(50)))
    assert prefix_index.total_hashes == 10
    for number in range(20):
        prefix_index.apply(batch(1, stored=[1], incarnation=name(number)))
    assert prefix_index.total_hashes <= 12


def test_the_prefix_counts_from_the_first_block_to_the_first_hole():
    seed = hash_seed(b"w" * 16, "bf16/30x3x64/16", "exact", "", "tenant")
    hashes = block_hashes(seed, list(range(100)))
    prefix_index = PrefixIndex()
    prefix_index.apply(EventBatch(incarnation=A, sequence=1, stored=(*hashes[:3], hashes[4])))
    assert prefix_blocks(prefix_index, A, hashes) == 3
    assert prefix_blocks(prefix_index, B, hashes) == 0


NAMES = st.lists(st.integers(0, 15), max_size=4)


@settings(max_examples=examples(150), deadline=None)
@given(
    changes=st.lists(st.tuples(NAMES, NAMES), max_size=25),
    fates=st.lists(st.sampled_from(["pass", "lose", "twice", "late"]), min_size=25, max_size=25),
    snapshot_delay=st.integers(0, 5),
)
def test_after_a_heartbeat_and_its_snapshot_the_mirror_is_the_truth(changes, fates, snapshot_delay):
    prefix_index, truth = PrefixIndex(), set()
    late: list[EventBatch] = []
    due: list[tuple[int, Snapshot]] = []
    for step, ((stored, removed), fate) in enumerate(zip(changes, fates, strict=False), start=1):
        truth -= set(map(name, removed))
        truth |= set(map(name, stored))
        item = batch(step, stored, removed)
        told = []
        if fate == "late":
            late.append(item)
        elif fate != "lose":
            told = [prefix_index.apply(item)] * 1
        if fate == "twice":
            prefix_index.apply(item)
        if Applied.SNAPSHOT_NEEDED in told:
            whole = Snapshot(incarnation=A, sequence=step, packed=b"".join(truth))
            due.append((step + snapshot_delay, whole))
        for when, whole in list(due):
            if when <= step:
                prefix_index.apply(whole)
                due.remove((when, whole))
        if late and step % 3 == 0:
            prefix_index.apply(late.pop())
    last = len(changes)
    beat = Heartbeat(incarnation=A, sequence=last, checksum=hashes_checksum(truth))
    if prefix_index.apply(beat) is Applied.SNAPSHOT_NEEDED:
        prefix_index.apply(Snapshot(incarnation=A, sequence=last, packed=b"".join(truth)))
    assert prefix_index.hashes_of(A) == truth
    assert prefix_index.apply(beat) is Applied.DONE


def test_what_was_just_placed_counts_until_it_should_have_come():
    prefix_index = PrefixIndex()
    hashes = [name(1), name(2)]
    prefix_index.expect(A, hashes, now_ns=0)
    assert prefix_blocks(prefix_index, A, hashes, now_ns=1) == 2
    assert prefix_blocks(prefix_index, B, hashes, now_ns=1) == 0
    assert prefix_blocks(prefix_index, A, hashes) == 0  # nothing was told yet
    assert prefix_blocks(prefix_index, A, hashes, now_ns=3_000_000_000) == 0


def test_an_evicted_block_is_no_longer_expected():
    prefix_index = PrefixIndex()
    hashes = [name(1), name(2), name(3)]
    prefix_index.apply(batch(1, stored=[1, 2, 3]))
    prefix_index.expect(A, hashes, now_ns=0)
    prefix_index.apply(batch(2, removed=[2, 3]))
    assert prefix_blocks(prefix_index, A, hashes, now_ns=1) == 1


def test_expectations_are_bounded_and_old_ones_leave():
    prefix_index = PrefixIndex()
    for second in range(20):
        many = [name(second * 1_000_000 + i) for i in range(100_000)]
        for part in range(4):
            prefix_index.expect(A, many[part * 25_000 :][:25_000], now_ns=second * 1_000_000_000)
    tables = prefix_index._expected.tables
    assert [table.blocks for table in tables] == [100_000] * 3
    many = [name(50_000_000 + i) for i in range(300_000)]
    prefix_index.expect(A, many, now_ns=20 * 1_000_000_000)
    assert tables[0].blocks == 262_144


def test_of_many_workers_each_has_its_own_prefix():
    prefix_index = PrefixIndex()
    hashes = [name(number) for number in range(1, 41)]
    for number in range(40):
        incarnation = name(1000 + number)
        batch_of = EventBatch(incarnation=incarnation, sequence=1, stored=tuple(hashes[:number]))
        prefix_index.apply(batch_of)
    assert prefix_index.prefixes(hashes) == {name(1000 + n): n for n in range(1, 40)}


def test_a_snapshot_in_slices_shows_only_when_it_is_whole():
    prefix_index = PrefixIndex()
    prefix_index.apply(batch(1, stored=[1]))
    steps = prefix_index.take_in(snapshot(2, range(2, 20_000)))
    assert sum(1 for _ in zip(steps, range(3), strict=False)) == 3
    assert prefix_index.prefixes([name(1)]) == {A: 1}
    assert prefix_index.prefixes([name(2)]) == {}
    for _ in steps:
        pass
    assert prefix_index.prefixes([name(1)]) == {}
    assert prefix_index.prefixes([name(2), name(3)]) == {A: 2}
    assert prefix_index.total_hashes == 19_998


def test_a_worker_that_dies_while_its_snapshot_is_read_stays_forgotten():
    prefix_index = PrefixIndex()
    prefix_index.apply(batch(1, stored=[1]))
    steps = prefix_index.take_in(snapshot(2, range(20_000)))
    next(steps)
    prefix_index.forget(A)
    for _ in steps:
        pass
    assert prefix_index.hashes_of(A) == frozenset()
    assert prefix_index.total_hashes == 0


def test_numbers_are_used_again_only_when_nothing_is_left_of_them():
    """Lives come and go; no block of a life that is gone is taken for one of a later life."""
    prefix_index = PrefixIndex()
    for life in range(300):
        incarnation = name(5000 + life)
        stored = range(life * 50, life * 50 + 60)
        prefix_index.apply(batch(1, stored=stored, incarnation=incarnation))
        assert prefix_index.hashes_of(incarnation) == set(map(name, stored))
        assert prefix_index.prefixes([name(life * 50)]) == {incarnation: 1}
        prefix_index.apply(Forget(incarnation=incarnation))
    assert prefix_index._numbers._next < 300
    assert prefix_index._table.blocks < 5000


def test_what_was_just_placed_outlives_a_snapshot():
    """At a fleet's start the first request may come before the first word of its worker."""
    prefix_index = PrefixIndex()
    hashes = [name(1), name(2)]
    prefix_index.expect(A, hashes, now_ns=0)
    prefix_index.apply(snapshot(1, [7]))
    assert prefix_index.prefixes(hashes, now_ns=1) == {A: 2}
    prefix_index.apply(batch(2, stored=[8]))
    assert prefix_index.prefixes(hashes, now_ns=1) == {A: 2}


class _Swept(PlainBlockTable):
    """Counts the parts that are looked at."""

    parts_swept = 0

    def sweep(self, first_part, parts, gone):
        self.parts_swept += parts
        super().sweep(first_part, parts, gone)


def test_heartbeats_of_many_workers_sweep_little_each():
    """A thousand of them come at once, each second: they held the loop for a third of one."""
    table = _Swept()
    prefix_index = PrefixIndex(table=table)
    prefix_index.apply(snapshot(1, range(50_000)))
    prefix_index.apply(snapshot(1, [1], incarnation=B))
    prefix_index.apply(Forget(incarnation=A))
    beat, beats = Heartbeat(incarnation=B, sequence=1, checksum=hashes_checksum([name(1)])), 0
    table.parts_swept = 0
    while table.blocks > 1:
        assert prefix_index.apply(beat) is Applied.DONE
        beats += 1
        assert table.parts_swept * 50_000 / 256 <= 256 * beats + 256, "parts of 195 blocks"
        assert beats < 1000, "and in the end everything is swept"


def test_blocks_observed_past_a_worker_count_until_they_are_removed_or_it_dies():
    """They join those of events, outlive snapshots and expectations, and need no event."""
    prefix_index = PrefixIndex()
    prefix_index.apply(batch(1, stored=[1]))
    prefix_index.observe(A, CacheChanged((name(2), name(3)), ()))
    first = [name(1), name(2), name(3)]
    assert prefix_blocks(prefix_index, A, first, now_ns=0) == 3
    assert prefix_blocks(prefix_index, A, first) == 1
    prefix_index.apply(Heartbeat(incarnation=A, sequence=1, checksum=7))  # a snapshot is needed
    assert prefix_index.apply(snapshot(4, [1])) is Applied.DONE
    assert prefix_blocks(prefix_index, A, first, now_ns=10**12) == 3
    prefix_index.observe(A, CacheChanged((), (name(3),)))
    assert prefix_blocks(prefix_index, A, first, now_ns=10**12) == 2
    prefix_index.apply(Forget(incarnation=A))
    prefix_index.observe(A, CacheChanged((name(1),), ()))  # by a response that came late
    assert prefix_index.prefixes(first, 10**12) == {}
