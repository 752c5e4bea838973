"""The prefix index of one router: which incarnation holds which blocks, by hash. Sans-IO.

    batch 1 ── 2 ── 3 ──╳── 5 ── 6        a hole: 4 is lost, a snapshot is needed
                            └────┴─ kept until the snapshot comes, then applied where newer

What the index says is a hint: a worker that no longer has a block recomputes it. So a set that
waits for its snapshot stays in use; only a dead incarnation is dropped at once.
"""

from collections import deque
from collections.abc import Container, Sequence
from enum import Enum

from registry.types import (
    EventBatch,
    FeedItem,
    Forget,
    Heartbeat,
    Snapshot,
    hashes_checksum,
)

_MAX_KEPT_BATCHES = 1024
_EXPECTED_FOR_NS = 2_000_000_000
_MAX_EXPECTED = 65_536


class Applied(Enum):
    """What came of a feed item."""

    DONE = "done"
    OLD = "old"
    SNAPSHOT_NEEDED = "snapshot needed"


class _HeldBlocks:
    """The block hashes of one incarnation."""

    __slots__ = ("checksum", "hashes", "kept", "sequence", "waiting")

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.sequence = 0
        self.checksum = 0
        self.waiting = False
        self.kept: deque[EventBatch] = deque(maxlen=_MAX_KEPT_BATCHES)

    def change(self, batch: EventBatch) -> None:
        if batch.cleared:
            self.hashes, self.checksum = set(), 0
        for block_hash in batch.removed:
            if block_hash in self.hashes:
                self.hashes.discard(block_hash)
                self.checksum = hashes_checksum((block_hash,), self.checksum)
        for block_hash in batch.stored:
            if block_hash not in self.hashes:
                self.hashes.add(block_hash)
                self.checksum = hashes_checksum((block_hash,), self.checksum)
        self.sequence = batch.sequence


class PrefixIndex:
    """Sets of block hashes by incarnation.

    Args:
        max_hashes: Per incarnation; further ones are dropped (no pool holds so many blocks).
        max_incarnations: Beyond it the one that was added first is dropped.
    """

    def __init__(self, max_hashes: int = 4_000_000, max_incarnations: int = 4096) -> None:
        self._max_hashes = max_hashes
        self._max_incarnations = max_incarnations
        self._held: dict[bytes, _HeldBlocks] = {}
        self._expected: dict[tuple[bytes, bytes], int] = {}  # until when, oldest first
        self.gaps = 0
        self.snapshots = 0

    def apply(self, item: FeedItem) -> Applied:
        """Take an item of the feed.

        Returns:
            ``SNAPSHOT_NEEDED`` asks the caller to fetch one for ``item.incarnation``. It is said
            again for every further item until the snapshot has come, so a lost answer heals.
        """
        match item:
            case Forget():
                self.forget(item.incarnation)
                return Applied.DONE
            case Snapshot():
                return self._apply_snapshot(item)
            case EventBatch():
                return self._apply_batch(item)
            case Heartbeat():
                return self._apply_heartbeat(item)

    def forget(self, incarnation: bytes) -> None:
        """Drop a dead incarnation: one dictionary entry, however many blocks it held."""
        self._held.pop(incarnation, None)

    def expect(self, incarnation: bytes, hashes: Sequence[bytes], now_ns: int) -> None:
        """A request was placed on ``incarnation`` that will store blocks of these hashes.

        No event says so yet. They count for two seconds, so that the same prompt, asked again at
        once, goes where it was computed.
        """
        for block_hash in hashes:
            key = (incarnation, block_hash)
            self._expected.pop(key, None)
            self._expected[key] = now_ns + _EXPECTED_FOR_NS
        while self._expected:
            oldest = next(iter(self._expected))
            if self._expected[oldest] > now_ns and len(self._expected) <= _MAX_EXPECTED:
                break
            del self._expected[oldest]

    def _entry(self, incarnation: bytes) -> _HeldBlocks:
        entry = self._held.get(incarnation)
        if entry is None:
            if len(self._held) >= self._max_incarnations:
                del self._held[next(iter(self._held))]
            entry = self._held[incarnation] = _HeldBlocks()
        return entry

    def _apply_snapshot(self, snapshot: Snapshot) -> Applied:
        entry = self._entry(snapshot.incarnation)
        if not entry.waiting and snapshot.sequence < entry.sequence:
            return Applied.OLD
        self.snapshots += 1
        later = [batch for batch in entry.kept if batch.sequence > snapshot.sequence]
        fresh = _HeldBlocks()
        fresh.hashes = set(snapshot.hashes)
        fresh.checksum = hashes_checksum(fresh.hashes)
        fresh.sequence = snapshot.sequence
        self._held[snapshot.incarnation] = fresh
        result = self._bounded(fresh)
        for batch in later:
            result = self._apply_batch(batch)
        return result

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
        entry.change(batch)
        return self._bounded(entry)

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

    def _bounded(self, entry: _HeldBlocks) -> Applied:
        while len(entry.hashes) > self._max_hashes:
            block_hash = entry.hashes.pop()
            entry.checksum = hashes_checksum((block_hash,), entry.checksum)
        return Applied.DONE

    def prefix_blocks(
        self, incarnation: bytes, hashes: Sequence[bytes], now_ns: int | None = None
    ) -> int:
        """How many of ``hashes``, from the first on, the incarnation holds.

        With ``now_ns`` those count too that it is expected to hold soon.
        """
        entry = self._held.get(incarnation)
        held: Container[bytes] = entry.hashes if entry is not None else ()
        expected = self._expected if now_ns is not None else None
        for count, block_hash in enumerate(hashes):
            if block_hash in held:
                continue
            if not expected or expected.get((incarnation, block_hash), 0) <= (now_ns or 0):
                return count
        return len(hashes)

    def hashes_of(self, incarnation: bytes) -> frozenset[bytes]:
        """The hashes of all blocks that the incarnation holds, as far as events told."""
        entry = self._held.get(incarnation)
        return frozenset(entry.hashes) if entry is not None else frozenset()

    def waits_for_snapshot(self, incarnation: bytes) -> bool:
        """Whether a hole was found and not healed yet."""
        entry = self._held.get(incarnation)
        return entry is not None and entry.waiting

    @property
    def total_hashes(self) -> int:
        """Hashes over all incarnations."""
        return sum(len(entry.hashes) for entry in self._held.values())
