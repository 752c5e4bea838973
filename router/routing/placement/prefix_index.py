"""Prefix index of one router: blocks of each incarnation, by hash. Sans-IO.

    batch 1 ── 2 ── 3 ──╳── 5 ── 6        a hole: 4 is lost, a snapshot is needed
                            └────┴─ kept until the snapshot comes, then applied where newer

The index is a hint: a worker that no longer has a block recomputes it. So an entry that waits for
its snapshot stays in use; only a dead incarnation is dropped at once.

An incarnation's blocks are in one table under a small number. Forgetting it removes the number from
the live ones; each further item sweeps a small part of the table, and the number is reused when it
is nowhere in it. A snapshot is read under a new number.
"""

from collections import deque
from collections.abc import Generator
from enum import Enum

from baton.registry.types import EventBatch, FeedItem, Forget, Heartbeat, Snapshot
from baton.types.events import CacheChanged
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
_SLICE_HASHES = 1024  # of a snapshot, between two yields: less than a millisecond
_SWEEP_BLOCKS = 4096  # of the table, approximately, per item
_SWEEP_BLOCKS_OF_BEAT = 256  # per heartbeat, which every worker sends each second


class Applied(Enum):
    """Result of applying a feed item."""

    DONE = "done"
    OLD = "old"
    SNAPSHOT_NEEDED = "snapshot needed"


class _HeldBlocks:
    __slots__ = ("blocks", "checksum", "kept", "number", "sequence", "waiting")

    def __init__(self, number: int) -> None:
        self.number = number
        self.blocks = 0
        self.sequence = 0
        self.checksum = 0
        self.waiting = False
        self.kept: deque[EventBatch] = deque(maxlen=_MAX_KEPT_BATCHES)


class _Numbers:
    """Allocator of small numbers; a retired one is free when all parts were swept."""

    def __init__(self) -> None:
        self._next = 0
        self._free: list[int] = []
        self.retired: dict[int, int] = {}  # number: parts left to sweep

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
    """Blocks that will be stored soon, kept for two to three seconds: a table per second.

    Those that were observed past the worker are kept until they are removed.
    """

    def __init__(self) -> None:
        self.tables: list[BlockTable] = [block_table() for _ in range(_EXPECTED_TABLES)]
        self.observed = block_table()
        self._step = 0

    def at(self, now_ns: int) -> list[BlockTable]:
        step = now_ns // _EXPECTED_STEP_NS
        for _ in range(min(max(step - self._step, 0), _EXPECTED_TABLES)):
            oldest = self.tables.pop()
            oldest.clear()
            self.tables.insert(0, oldest)
        self._step = max(step, self._step)
        return self.all

    @property
    def all(self) -> list[BlockTable]:
        return [*self.tables, self.observed]

    def remove(self, number: int, hashes: bytes) -> None:
        """Forget blocks that were evicted: they were stored, or there when they were expected."""
        for table in self.tables:
            if table.blocks:
                table.remove(number, hashes)

    def rename(self, before: int, after: int) -> None:
        for table in self.all:
            if hashes := table.hashes_of(before):
                table.add(after, b"".join(hashes), len(hashes))


class PrefixIndex:
    """Blocks of all incarnations.

    Args:
        max_hashes: Limit per incarnation; more are dropped (no pool holds so many blocks).
        max_incarnations: Limit beyond which the oldest incarnation is dropped.
        table: Block table; None for the best one of this machine.
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
        self._part = 0  # swept next
        self._sweep_due = 0  # number of blocks
        self.gaps = 0
        self.snapshots = 0

    # ---------------------------------------------------------------- updates

    def apply(self, item: FeedItem) -> Applied:
        """Apply an item of the feed.

        Returns:
            ``SNAPSHOT_NEEDED`` requests a snapshot of ``item.incarnation``. It is returned for each
            further item until the snapshot has come, so a lost one is requested again.
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
        """Apply a snapshot in slices; the old entries stay valid until the last one."""
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
        """Drop a dead incarnation, at once and in constant time."""
        entry = self._held.pop(incarnation, None)
        if entry is not None:
            self._retire(entry)

    def expect(self, incarnation: bytes, hashes: Hashes, now_ns: int) -> None:
        """Note that a request placed on ``incarnation`` will store blocks of these hashes.

        They count for at least two seconds before events confirm them, so that the same prompt,
        repeated at once, goes to the same worker.
        """
        newest = self._expected.at(now_ns)[0]
        number = self._entry(incarnation).number
        room = _MAX_EXPECTED_BLOCKS - newest.blocks
        newest.add(number, packed(hashes), room)

    def observe(self, incarnation: bytes, change: CacheChanged) -> None:
        """Note what requests past a worker have changed in its cache, while it is alive."""
        if (entry := self._held.get(incarnation)) is not None:
            observed = self._expected.observed
            observed.remove(entry.number, packed(change.removed))
            observed.add(entry.number, packed(change.stored), self._max_hashes)

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
        """Remove retired numbers from parts of about so many blocks, or accumulate the rest."""
        gone = self._numbers.retired
        if not gone:
            return
        self._sweep_due += blocks
        parts = self._sweep_due * PARTS // (self._table.blocks + 1)
        if parts == 0:
            return
        self._sweep_due = 0
        parts = min(parts, PARTS - self._part)
        for table in (self._table, *self._expected.all):
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
        gone = b"".join(batch.removed)
        removed = self._table.remove(entry.number, gone)
        if gone:
            self._expected.remove(entry.number, gone)
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

    # ---------------------------------------------------------------- queries

    def prefixes(self, hashes: Hashes, now_ns: int | None = None) -> dict[bytes, int]:
        """Return how many leading ``hashes`` each incarnation holds that has the first one.

        With ``now_ns``, expected and observed blocks count, too.
        """
        expected = self._expected.at(now_ns) if now_ns is not None else ()
        lengths = self._table.match(packed(hashes), self._live, expected)
        named = self._incarnations
        return {named[number]: length for number, length in lengths}

    def hashes_of(self, incarnation: bytes) -> frozenset[bytes]:
        """Return the hashes of all blocks of the incarnation, as far as events report them."""
        entry = self._held.get(incarnation)
        return frozenset(self._table.hashes_of(entry.number) if entry is not None else ())

    @property
    def total_hashes(self) -> int:
        """Number of hashes over all incarnations."""
        return sum(entry.blocks for entry in self._held.values())


def _finished(steps: Generator[None, None, Applied]) -> Applied:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return Applied(done.value)
