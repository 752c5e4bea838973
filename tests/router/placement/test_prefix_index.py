"""The mirror follows the truth, whatever the feed loses, repeats, or delays."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.block_hashes import block_names, name_seed
from registry.types import EventBatch, Forget, Heartbeat, Snapshot, names_checksum
from router.placement.prefix_index import Applied, Mirror

A, B = b"a" * 16, b"b" * 16


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def batch(sequence: int, stored=(), removed=(), cleared=False, incarnation=A) -> EventBatch:
    return EventBatch(
        incarnation=incarnation,
        sequence=sequence,
        stored=tuple(map(name, stored)),
        removed=tuple(map(name, removed)),
        cleared=cleared,
    )


def snapshot(sequence: int, names, incarnation=A) -> Snapshot:
    return Snapshot(incarnation=incarnation, sequence=sequence, names=frozenset(map(name, names)))


def test_batches_in_order_are_applied():
    mirror = Mirror()
    assert mirror.apply(batch(1, stored=[1, 2, 3])) is Applied.DONE
    assert mirror.apply(batch(2, stored=[4], removed=[2])) is Applied.DONE
    assert mirror.names_of(A) == {name(1), name(3), name(4)}
    mirror.apply(batch(3, stored=[9], cleared=True))
    assert mirror.names_of(A) == {name(9)}
    assert mirror.apply(batch(2, stored=[50])) is Applied.OLD


def test_a_hole_asks_for_a_snapshot_and_what_came_meanwhile_is_not_lost():
    mirror = Mirror()
    mirror.apply(batch(1, stored=[1]))
    assert mirror.apply(batch(3, stored=[3])) is Applied.SNAPSHOT_NEEDED
    assert mirror.apply(batch(4, stored=[4])) is Applied.SNAPSHOT_NEEDED
    assert mirror.waits_for_snapshot(A)
    assert mirror.apply(snapshot(3, [1, 2, 3])) is Applied.DONE
    assert mirror.names_of(A) == {name(1), name(2), name(3), name(4)}
    assert not mirror.waits_for_snapshot(A)


def test_a_lost_tail_is_noticed_by_the_heartbeat():
    mirror = Mirror()
    mirror.apply(batch(1, stored=[1]))
    good = Heartbeat(incarnation=A, sequence=1, checksum=names_checksum([name(1)]))
    assert mirror.apply(good) is Applied.DONE
    later = Heartbeat(incarnation=A, sequence=2, checksum=0)
    assert mirror.apply(later) is Applied.SNAPSHOT_NEEDED
    mirror.apply(snapshot(2, []))
    wrong = Heartbeat(incarnation=A, sequence=2, checksum=77)
    assert mirror.apply(wrong) is Applied.SNAPSHOT_NEEDED
    assert mirror.gaps == 2


def test_an_old_snapshot_is_not_believed():
    mirror = Mirror()
    for sequence in range(1, 6):
        mirror.apply(batch(sequence, stored=[sequence]))
    assert mirror.apply(snapshot(2, [99])) is Applied.OLD
    assert name(99) not in mirror.names_of(A)


def test_forgetting_is_one_step_however_much_was_held():
    mirror = Mirror()
    mirror.apply(snapshot(1, range(200_000)))
    mirror.apply(batch(1, stored=[1], incarnation=B))
    names = [name(1)]
    assert mirror.prefix_blocks(A, names) == mirror.prefix_blocks(B, names) == 1
    began_s = time.perf_counter()
    mirror.apply(Forget(incarnation=A))
    assert time.perf_counter() - began_s < 0.2
    assert mirror.prefix_blocks(A, names) == 0
    assert mirror.prefix_blocks(B, names) == 1
    assert mirror.total_names == 1


def test_it_is_bounded():
    mirror = Mirror(max_names=10, max_incarnations=3)
    mirror.apply(batch(1, stored=range(50)))
    assert mirror.total_names == 10
    for number in range(20):
        mirror.apply(batch(1, stored=[1], incarnation=name(number)))
    assert mirror.total_names <= 12


def test_the_prefix_counts_from_the_first_block_to_the_first_hole():
    seed = name_seed(b"w" * 16, "bf16/30x3x64/16", "exact", "", "tenant")
    names = block_names(seed, list(range(100)))
    mirror = Mirror()
    mirror.apply(EventBatch(incarnation=A, sequence=1, stored=(*names[:3], names[4])))
    assert mirror.prefix_blocks(A, names) == 3
    assert mirror.prefix_blocks(B, names) == 0


NAMES = st.lists(st.integers(0, 15), max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(st.tuples(NAMES, NAMES, st.booleans()), max_size=25),
    fates=st.lists(st.sampled_from(["pass", "lose", "twice", "late"]), min_size=25, max_size=25),
    snapshot_delay=st.integers(0, 5),
)
def test_after_a_heartbeat_and_its_snapshot_the_mirror_is_the_truth(changes, fates, snapshot_delay):
    mirror, truth = Mirror(), set()
    late: list[EventBatch] = []
    due: list[tuple[int, Snapshot]] = []
    for step, ((stored, removed, cleared), fate) in enumerate(
        zip(changes, fates, strict=False), start=1
    ):
        if cleared:
            truth.clear()
        truth -= set(map(name, removed))
        truth |= set(map(name, stored))
        item = batch(step, stored, removed, cleared)
        told = []
        if fate == "late":
            late.append(item)
        elif fate != "lose":
            told = [mirror.apply(item)] * 1
        if fate == "twice":
            mirror.apply(item)
        if Applied.SNAPSHOT_NEEDED in told:
            whole = Snapshot(incarnation=A, sequence=step, names=frozenset(truth))
            due.append((step + snapshot_delay, whole))
        for when, whole in list(due):
            if when <= step:
                mirror.apply(whole)
                due.remove((when, whole))
        if late and step % 3 == 0:
            mirror.apply(late.pop())
    last = len(changes)
    beat = Heartbeat(incarnation=A, sequence=last, checksum=names_checksum(truth))
    if mirror.apply(beat) is Applied.SNAPSHOT_NEEDED:
        mirror.apply(Snapshot(incarnation=A, sequence=last, names=frozenset(truth)))
    assert mirror.names_of(A) == truth
    assert mirror.apply(beat) is Applied.DONE


def test_what_was_just_placed_counts_until_it_should_have_come():
    mirror = Mirror()
    names = [b"a", b"b"]
    mirror.expect(A, names, now_ns=0)
    assert mirror.prefix_blocks(A, names, now_ns=1) == 2
    assert mirror.prefix_blocks(B, names, now_ns=1) == 0
    assert mirror.prefix_blocks(A, names) == 0  # nothing was told yet
    assert mirror.prefix_blocks(A, names, now_ns=3_000_000_000) == 0


def test_expectations_are_bounded_and_old_ones_leave():
    mirror = Mirror()
    for second in range(5):
        many = [f"{second}/{i}".encode() for i in range(30_000)]
        mirror.expect(A, many, now_ns=second * 1_000_000_000)
    assert len(mirror._expected) <= 65_536
