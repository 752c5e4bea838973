"""The block table in C++ and the plain one give the same answers; what a look costs is counted."""

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.routing.placement.block_table import (
    PARTS,
    LiveWorkers,
    NativeBlockTable,
    PlainBlockTable,
    block_table,
)
from router.routing.placement.native.library import load
from tests.soak import examples

LIBRARY = load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C++ compiler")


def name(number: int) -> bytes:
    """Many share a slot and a part."""
    return (number % 3).to_bytes(8, "little") + number.to_bytes(7, "little") + bytes([number % 5])


NAMES = st.lists(st.integers(0, 60), max_size=12)
WORKERS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 255, 256, 700])


class SameAnswers(RuleBasedStateMachine):
    """Whatever is done to both."""

    def __init__(self) -> None:
        super().__init__()
        self.native = [NativeBlockTable(LIBRARY), NativeBlockTable(LIBRARY)]
        self.plain = [PlainBlockTable(), PlainBlockTable()]
        self.live = LiveWorkers()
        self.known = set()

    def both(self, which):
        return self.native[which], self.plain[which]

    @rule(which=st.integers(0, 1), worker=WORKERS, names=NAMES, most=st.sampled_from([1, 3, 99]))
    def add(self, which, worker, names, most):
        hashes = b"".join(map(name, names))
        native, plain = (table.add(worker, hashes, most) for table in self.both(which))
        assert native == plain
        self.known.add(worker)

    @rule(names=NAMES)
    def add_to_many(self, names):
        for worker in range(12):
            self.add(0, worker, names, 99)

    @rule(which=st.integers(0, 1), workers=st.sets(WORKERS), end=st.integers(0, 60))
    def add_a_prompt(self, which, workers, end):
        for worker in sorted(workers):
            self.add(which, worker, range(end), 99)

    @rule(which=st.integers(0, 1), worker=WORKERS, names=NAMES)
    def remove(self, which, worker, names):
        hashes = b"".join(map(name, names))
        native, plain = (table.remove(worker, hashes) for table in self.both(which))
        assert native == plain

    @rule(which=st.integers(0, 1), gone=st.sets(WORKERS), first=st.integers(0, PARTS))
    def sweep(self, which, gone, first):
        for table in self.both(which):
            table.sweep(first, PARTS, gone)
            table.sweep(0, first, gone)

    @rule(worker=WORKERS, alive=st.booleans())
    def lives(self, worker, alive):
        if alive:
            self.live.add(worker)
        elif worker in self.live.numbers:
            self.live.discard(worker)

    @rule(which=st.integers(0, 1))
    def clear(self, which):
        for table in self.both(which):
            table.clear()

    @rule(begin=st.integers(0, 50), length=st.integers(0, 60), with_other=st.booleans())
    def match(self, begin, length, with_other):
        hashes = b"".join(name(number) for number in range(begin, begin + length))
        answers = [
            sorted(tables[0].match(hashes, self.live, tables[1:] if with_other else ()))
            for tables in (self.native, self.plain)
        ]
        assert answers[0] == answers[1]

    @invariant()
    def they_hold_the_same(self):
        for which in (0, 1):
            native, plain = self.both(which)
            assert native.blocks == plain.blocks
            for worker in self.known:
                assert sorted(native.hashes_of(worker)) == sorted(plain.hashes_of(worker))


SameAnswers.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestSameAnswers = SameAnswers.TestCase


def test_a_block_takes_some_fifty_bytes_and_growing_moves_little_at_a_time():
    table, draw = NativeBlockTable(LIBRARY), random.Random(5)
    longest_s = 0.0
    for worker in range(50):
        hashes = draw.randbytes(16 * 4096)
        began_s = time.thread_time()
        table.add(worker, hashes, 4096)
        longest_s = max(longest_s, time.thread_time() - began_s)
    assert table.blocks == 50 * 4096
    assert table.memory_bytes < 110 * table.blocks
    assert longest_s < 0.1, "a slice of 4,096 blocks"


def test_a_block_that_a_thousand_workers_hold_costs_a_bit_for_each():
    table, live, hot = NativeBlockTable(LIBRARY), LiveWorkers(), random.Random(1).randbytes(16 * 64)
    for worker in range(1000):
        live.add(worker)
        table.add(worker, hot, 64)
    assert table.blocks == 64
    assert table.memory_bytes < 300_000
    assert sorted(table.match(hot, live)) == [(worker, 64) for worker in range(1000)]
    table.sweep(0, PARTS, range(3, 1000))
    assert sorted(table.match(hot, live)) == [(0, 64), (1, 64), (2, 64)]


def test_without_the_library_the_plain_table_is_taken(monkeypatch):
    monkeypatch.setattr("router.routing.placement.block_table.load", lambda: None)
    assert isinstance(block_table(), PlainBlockTable)
