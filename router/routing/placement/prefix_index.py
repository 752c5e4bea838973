"""The prefix index of one router: which incarnation holds which blocks, by hash. Sans-IO.

    batch 1 ── 2 ── 3 ──╳── 5 ── 6        a hole: 4 is lost, a snapshot is needed
                            └────┴─ kept until the snapshot comes, then applied where newer

What the index says is a hint: a worker that no longer has a block recomputes it. So a set that
waits for its snapshot stays in use; only a dead incarnation is dropped at once.

An incarnation's blocks stand in one table under a small number. Forgetting it takes the number off
the list of those that count; the table is swept a little with every further item, and the number is
used again when it is nowhere any more. A snapshot is read under a new number.
"""

from collections import deque
from collections.abc import Generator
from enum import Enum

from baton.registry.types import EventBatch, FeedItem, Forget, Heartbeat, Snapshot
from router.routing.placement.block_table import (
    HASH_BYTES,
    PARTS,
    BlockTable,
    Hashes,
    LiveWorkers,
    block_table,
    packed,
)

_MAX_KEPT_BATCHES = 1024
_EXPECTED_TABLES = 3
_EXPECTED_STEP_NS = 1_000_000_000
_MAX_EXPECTED_BLOCKS = 262_144  # in each of the tables
_SLICE_HASHES = 1024  # of a snapshot, between two looks at the clock: less than a millisecond
_SWEEP_BLOCKS = 4096  # of the table, about, with each item
_SWEEP_BLOCKS_OF_BEAT = 256  # less with those that come from every worker each second


class Applied(Enum):
    """What came of a feed item."""

    DONE = "done"
    OLD = "old"
    SNAPSHOT_NEEDED = "snapshot needed"


class _HeldBlocks:
    """What is known of one incarnation's blocks."""

    __slots__ = ("blocks", "checksum", "kept", "number", "sequence", "waiting")

    def __init__(self, number: int) -> None:
        self.number = number
        self.blocks = 0
        self.sequence = 0
        self.checksum = 0
        self.waiting = False
        self.kept: deque[EventBatch] = deque(maxlen=_MAX_KEPT_BATCHES)


class _Numbers:
    """Hands out small numbers; one that was given back is free when all parts were swept."""

    def __init__(self) -> None:
        self._next = 0
        self._free: list[int] = []
        self.retired: dict[int, int] = {}  # number: parts that are left to sweep

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def retire(self, number: int) -> None:
        self.retired[number] = PARTS

    def swept(self, parts: int) -> None:
        left = {number: left - parts for number, left in self.retired.items()}
        self._free += [number for number, parts_left in left.items() if parts_left <= 0]
        self.retired = {number: parts_left for number, parts_left in left.items() if parts_left > 0}


class _Expected:
    """Blocks that are about to be stored, for two to three seconds: a table for each second."""

    def __init__(self) -> None:
        self.tables: list[BlockTable] = [block_table() for _ in range(_EXPECTED_TABLES)]
        self._step = 0

    def at(self, now_ns: int) -> list[BlockTable]:
        """The tables, the newest first, as they are now."""
        step = now_ns // _EXPECTED_STEP_NS
        for _ in range(min(max(step - self._step, 0), _EXPECTED_TABLES)):
            oldest = self.tables.pop()
            oldest.clear()
            self.tables.insert(0, oldest)
        self._step = max(step, self._step)
        return self.tables

    def rename(self, before: int, after: int) -> None:
        """The worker ``before`` has another number now."""
        for table in self.tables:
            if hashes := table.hashes_of(before):
                table.add(after, b"".join(hashes), len(hashes))


class PrefixIndex:
    """The blocks of all incarnations.

    Args:
        max_hashes: Per incarnation; further ones are dropped (no pool holds so many blocks).
        max_incarnations: Beyond it the one that was added first is dropped.
        table: Where they stand; None: the best that this machine can have.
    """

    def __init__(
        self,
        max_hashes: int = 4_000_000,
        max_incarnations: int = 4096,
        table: BlockTable | None = None,
    ) -> None:
        self._max_hashes = max_hashes
        self._max_incarnations = max_incarnations
        self._table = table if table is not None else block_table()
        self._expected = _Expected()
        self._held: dict[bytes, _HeldBlocks] = {}
        self._incarnations: dict[int, bytes] = {}  # by number
        self._numbers = _Numbers()
        self._live = LiveWorkers()
        self._part = 0  # that is swept next
        self._sweep_due = 0  # blocks to look at
        self.gaps = 0
        self.snapshots = 0

    # ---------------------------------------------------------------- what is said of workers

    def apply(self, item: FeedItem) -> Applied:
        """Take an item of the feed.

        Returns:
            ``SNAPSHOT_NEEDED`` asks the caller to fetch one for ``item.incarnation``. It is said
            again for every further item until the snapshot has come, so a lost answer heals.
        """
        self._sweep(_SWEEP_BLOCKS_OF_BEAT if isinstance(item, Heartbeat) else _SWEEP_BLOCKS)
        match item:
            case Forget():
                self.forget(item.incarnation)
                return Applied.DONE
            case Snapshot():
                return _finished(self.take_in(item))
            case EventBatch():
                return self._apply_batch(item)
            case Heartbeat():
                return self._apply_heartbeat(item)

    def take_in(self, snapshot: Snapshot) -> Generator[None, None, Applied]:
        """Take a snapshot a slice at a time; until the last one the index answers as before."""
        self._sweep(_SWEEP_BLOCKS)
        entry = self._entry(snapshot.incarnation)
        if not entry.waiting and snapshot.sequence < entry.sequence:
            return Applied.OLD
        fresh = _HeldBlocks(self._numbers.take())
        held = snapshot.packed
        for begin in range(0, len(held), _SLICE_HASHES * HASH_BYTES):
            self._store(fresh, held[begin : begin + _SLICE_HASHES * HASH_BYTES])
            yield
        if self._held.get(snapshot.incarnation) is not entry:  # it died meanwhile
            self._numbers.retire(fresh.number)
            return Applied.DONE
        self.snapshots += 1
        fresh.sequence = snapshot.sequence
        self._expected.rename(entry.number, fresh.number)
        self._retire(entry)
        self._held[snapshot.incarnation] = fresh
        self._count(snapshot.incarnation, fresh)
        result = Applied.DONE
        for batch in entry.kept:
            if batch.sequence > snapshot.sequence:
                result = self._apply_batch(batch)
        return result

    def forget(self, incarnation: bytes) -> None:
        """Drop a dead incarnation, at once, however many blocks it held."""
        entry = self._held.pop(incarnation, None)
        if entry is not None:
            self._retire(entry)

    def expect(self, incarnation: bytes, hashes: Hashes, now_ns: int) -> None:
        """A request was placed on ``incarnation`` that will store blocks of these hashes.

        No event says so yet. They count for two seconds and more, so that the same prompt, asked
        again at once, goes where it was computed.
        """
        newest = self._expected.at(now_ns)[0]
        number = self._entry(incarnation).number
        room = _MAX_EXPECTED_BLOCKS - newest.blocks
        newest.add(number, packed(hashes), room)

    def _entry(self, incarnation: bytes) -> _HeldBlocks:
        entry = self._held.get(incarnation)
        if entry is None:
            if len(self._held) >= self._max_incarnations:
                self.forget(next(iter(self._held)))
            entry = self._held[incarnation] = _HeldBlocks(self._numbers.take())
            self._count(incarnation, entry)
        return entry

    def _count(self, incarnation: bytes, entry: _HeldBlocks) -> None:
        self._live.add(entry.number)
        self._incarnations[entry.number] = incarnation

    def _retire(self, entry: _HeldBlocks) -> None:
        self._live.discard(entry.number)
        self._incarnations.pop(entry.number, None)
        self._numbers.retire(entry.number)

    def _sweep(self, blocks: int) -> None:
        """Take numbers that count no longer out of a few parts of the tables.

        Args:
            blocks: To look at; what is less than a part is looked at with a later item.
        """
        gone = self._numbers.retired
        if not gone:
            return
        self._sweep_due += blocks
        parts = self._sweep_due * PARTS // (self._table.blocks + 1)
        if parts == 0:
            return
        self._sweep_due = 0
        parts = min(parts, PARTS - self._part)
        for table in (self._table, *self._expected.tables):
            table.sweep(self._part, parts, gone)
        self._part = (self._part + parts) % PARTS
        self._numbers.swept(parts)

    def _store(self, entry: _HeldBlocks, hashes: bytes) -> None:
        added = self._table.add(entry.number, hashes, self._max_hashes - entry.blocks)
        entry.blocks += added.blocks
        entry.checksum ^= added.checksum

    def _apply_batch(self, batch: EventBatch) -> Applied:
        entry = self._entry(batch.incarnation)
        if entry.waiting:
            self._keep(entry, batch)
            return Applied.SNAPSHOT_NEEDED
        if batch.sequence <= entry.sequence:
            return Applied.OLD
        if batch.sequence != entry.sequence + 1:
            self._lost(entry)
            self._keep(entry, batch)
            return Applied.SNAPSHOT_NEEDED
        if batch.cleared:
            before = entry.number
            self._retire(entry)
            entry.number = self._numbers.take()
            entry.blocks = 0
            entry.checksum = 0
            self._expected.rename(before, entry.number)
            self._count(batch.incarnation, entry)
        removed = self._table.remove(entry.number, b"".join(batch.removed))
        entry.blocks -= removed.blocks
        entry.checksum ^= removed.checksum
        self._store(entry, b"".join(batch.stored))
        entry.sequence = batch.sequence
        return Applied.DONE

    def _apply_heartbeat(self, beat: Heartbeat) -> Applied:
        entry = self._entry(beat.incarnation)
        if entry.waiting:
            return Applied.SNAPSHOT_NEEDED
        if beat.sequence < entry.sequence:
            return Applied.OLD
        if beat.sequence == entry.sequence and beat.checksum == entry.checksum:
            return Applied.DONE
        self._lost(entry)
        return Applied.SNAPSHOT_NEEDED

    def _lost(self, entry: _HeldBlocks) -> None:
        self.gaps += 1
        entry.waiting = True

    def _keep(self, entry: _HeldBlocks, batch: EventBatch) -> None:
        if not entry.kept or batch.sequence > entry.kept[-1].sequence:
            entry.kept.append(batch)

    # ---------------------------------------------------------------- what is asked

    def prefixes(self, hashes: Hashes, now_ns: int | None = None) -> dict[bytes, int]:
        """How many of ``hashes``, from the first on, each incarnation holds that has the first.

        With ``now_ns`` those count too that it is expected to hold soon.
        """
        expected = self._expected.at(now_ns) if now_ns is not None else ()
        found = self._table.match(packed(hashes), self._live, expected)
        named = self._incarnations
        return {named[number]: length for number, length in found}

    def prefix_blocks(self, incarnation: bytes, hashes: Hashes, now_ns: int | None = None) -> int:
        """The same of one incarnation."""
        return self.prefixes(hashes, now_ns).get(incarnation, 0)

    def hashes_of(self, incarnation: bytes) -> frozenset[bytes]:
        """The hashes of all blocks that the incarnation holds, as far as events told."""
        entry = self._held.get(incarnation)
        return frozenset(self._table.hashes_of(entry.number) if entry is not None else ())

    @property
    def total_hashes(self) -> int:
        """Hashes over all incarnations."""
        return sum(entry.blocks for entry in self._held.values())


def _finished(steps: Generator[None, None, Applied]) -> Applied:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return Applied(done.value)
