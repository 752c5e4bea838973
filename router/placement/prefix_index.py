"""The router's copy of the prefix index: which incarnation holds which blocks. Sans-IO.

    batch 1 ── 2 ── 3 ──╳── 5 ── 6        a hole: 4 is lost, a snapshot is needed
                            └────┴─ kept until the snapshot comes, then applied where newer

What the mirror says is a hint: a worker that no longer has a block recomputes it. So a set that
waits for its snapshot stays in use; only a dead incarnation is forgotten at once.
"""

from collections import deque
from collections.abc import Sequence
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


class _Held:
    """One incarnation's set."""

    __slots__ = ("checksum", "kept", "names", "sequence", "waiting")

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.sequence = 0
        self.checksum = 0
        self.waiting = False
        self.kept: deque[EventBatch] = deque(maxlen=_MAX_KEPT_BATCHES)

    def change(self, batch: EventBatch) -> None:
        if batch.cleared:
            self.names, self.checksum = set(), 0
        for name in batch.removed:
            if name in self.names:
                self.names.discard(name)
                self.checksum = hashes_checksum((name,), self.checksum)
        for name in batch.stored:
            if name not in self.names:
                self.names.add(name)
                self.checksum = hashes_checksum((name,), self.checksum)
        self.sequence = batch.sequence


class PrefixIndex:
    """Sets of block names by incarnation.

    Args:
        max_names: Per incarnation; a worker that claims more is cut off (its pool cannot hold it).
        max_incarnations: The one that was heard of longest ago is forgotten beyond it.
    """

    def __init__(self, max_names: int = 4_000_000, max_incarnations: int = 4096) -> None:
        self._max_names = max_names
        self._max_incarnations = max_incarnations
        self._held: dict[bytes, _Held] = {}
        self._expected: dict[tuple[bytes, bytes], int] = {}  # until when, oldest first
        self.gaps = 0
        self.snapshots = 0

    def apply(self, item: FeedItem) -> Applied:
        """Take an item of the feed.

        Returns:
            ``SNAPSHOT_NEEDED`` asks the caller to fetch one for ``item.incarnation``. It is said
            again for every further item until the snapshot is here, so a lost answer heals.
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
        """The incarnation is dead: one dictionary entry goes, however much it held."""
        self._held.pop(incarnation, None)

    def expect(self, incarnation: bytes, names: Sequence[bytes], now_ns: int) -> None:
        """A request was sent there that will store these blocks; its events are not here yet.

        So the same prompt, asked again at once, goes where it was computed. What does not come
        true within two seconds is forgotten.
        """
        for name in names:
            key = (incarnation, name)
            self._expected.pop(key, None)
            self._expected[key] = now_ns + _EXPECTED_FOR_NS
        while self._expected:
            oldest = next(iter(self._expected))
            if self._expected[oldest] > now_ns and len(self._expected) <= _MAX_EXPECTED:
                break
            del self._expected[oldest]

    def _entry(self, incarnation: bytes) -> _Held:
        entry = self._held.get(incarnation)
        if entry is None:
            if len(self._held) >= self._max_incarnations:
                del self._held[next(iter(self._held))]
            entry = self._held[incarnation] = _Held()
        return entry

    def _apply_snapshot(self, snapshot: Snapshot) -> Applied:
        entry = self._entry(snapshot.incarnation)
        if not entry.waiting and snapshot.sequence < entry.sequence:
            return Applied.OLD
        self.snapshots += 1
        later = [batch for batch in entry.kept if batch.sequence > snapshot.sequence]
        fresh = _Held()
        fresh.names = set(snapshot.names)
        fresh.checksum = hashes_checksum(fresh.names)
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

    def _lost(self, entry: _Held) -> None:
        self.gaps += 1
        entry.waiting = True

    def _keep(self, entry: _Held, batch: EventBatch) -> None:
        if not entry.kept or batch.sequence > entry.kept[-1].sequence:
            entry.kept.append(batch)

    def _bounded(self, entry: _Held) -> Applied:
        while len(entry.names) > self._max_names:
            name = entry.names.pop()
            entry.checksum = hashes_checksum((name,), entry.checksum)
        return Applied.DONE

    def prefix_blocks(
        self, incarnation: bytes, names: Sequence[bytes], now_ns: int | None = None
    ) -> int:
        """How many of ``names``, from the first on, the incarnation holds.

        With ``now_ns`` those count too that it is expected to hold soon.
        """
        entry = self._held.get(incarnation)
        held = entry.names if entry is not None else ()
        for count, name in enumerate(names):
            if name in held:
                continue
            if now_ns is None or self._expected.get((incarnation, name), 0) <= now_ns:
                return count
        return len(names)

    def names_of(self, incarnation: bytes) -> frozenset[bytes]:
        """Everything that the incarnation is thought to hold."""
        entry = self._held.get(incarnation)
        return frozenset(entry.names) if entry is not None else frozenset()

    def waits_for_snapshot(self, incarnation: bytes) -> bool:
        """Whether a hole was found and not healed yet."""
        entry = self._held.get(incarnation)
        return entry is not None and entry.waiting

    @property
    def total_names(self) -> int:
        """Names over all incarnations."""
        return sum(len(entry.names) for entry in self._held.values())
