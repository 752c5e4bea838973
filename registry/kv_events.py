"""KV events: what a worker publishes of its blocks, and how a reader notices what it missed.

The two state machines (`HashLedger`, `FeedMachine`) do no I/O. The shells (`KvEventPublisher`,
`EventFeed`) talk to Redis, and no error of Redis leaves them.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from registry.redis_store import (
    BATCH_HASHES,
    CHUNK_HASHES,
    Registry,
    RegistryUnavailableError,
)
from registry.stream_entries import StreamEntry, StreamMark
from registry.types import (
    EventBatch,
    FeedItem,
    Forget,
    Heartbeat,
    Snapshot,
    hashes_checksum,
)
from telemetry.tasks import BackgroundTasks

_LOG = logging.getLogger(__name__)

REFRESH_S = 1.0
MAX_LOG_BATCHES = 512
MIN_LOG_HASHES = 16_384
MAX_PENDING_HASHES = 65_536  # beyond it a snapshot is cheaper than the batches
_COALESCE_S = 0.02
_RETRY_S = 0.5
_POLL_S = 0.1
_STREAM_READ = 256
FORGET_AFTER_S = 10.0  # of absence from Redis
REFILL_S = 60.0  # an emptied Redis gets this long to be filled again by the workers


class HashLedger:
    """Turns a worker's stores and removals into numbered net changes of its set of block hashes.

    Args:
        incarnation: The worker's.

    A hash that is stored twice, or removed when absent, is no change. Batches therefore change the
    checksum exactly by the hashes in them, and readers can follow it without holding the set.
    """

    def __init__(self, incarnation: bytes) -> None:
        self.incarnation = incarnation
        self.hashes: set[bytes] = set()  # of the blocks that the worker holds
        self.sequence = 0  # of the last batch or snapshot taken
        self.checksum = 0  # of what was taken
        self.taken_hashes = 0  # how many hashes that set has
        self.values = 0  # of the set as Redis has it; then the batches in the log, and their hashes
        self.batches = self._logged_hashes = 0
        self.needs_snapshot = False
        self._stored: dict[bytes, None] = {}  # ordered
        self._removed: dict[bytes, None] = {}
        self._cleared = False

    @property
    def pending(self) -> bool:
        """Whether anything is left to publish."""
        return bool(self.needs_snapshot or self._cleared or self._stored or self._removed)

    def change(
        self, stored: Iterable[bytes] = (), removed: Iterable[bytes] = (), cleared: bool = False
    ) -> None:
        """Note changes, in the order ``cleared``, ``removed``, ``stored``."""
        if cleared and (self.hashes or self._removed):
            self.hashes.clear()
            self._stored.clear()
            self._removed.clear()
            self._cleared = True
        for block_hash in removed:
            if block_hash in self.hashes:
                self.hashes.remove(block_hash)
                if self._stored.pop(block_hash, self) is self:
                    self._removed[block_hash] = None
        for block_hash in stored:
            if block_hash not in self.hashes:
                self.hashes.add(block_hash)
                if self._removed.pop(block_hash, self) is self:
                    self._stored[block_hash] = None
        if len(self._stored) + len(self._removed) > MAX_PENDING_HASHES:
            self.lost()

    def lost(self) -> None:
        """Redis may not have what was taken: the next thing to publish is the whole set."""
        self.needs_snapshot = True
        self._stored.clear()
        self._removed.clear()
        self._cleared = False

    def take_batch(self) -> EventBatch:
        """The next batch of at most ``BATCH_HASHES`` hashes."""
        removed = _take(self._removed, BATCH_HASHES)
        stored = _take(self._stored, BATCH_HASHES - len(removed))
        self.sequence += 1
        if self._cleared:
            self.checksum = self.taken_hashes = 0
            self.values = self.batches = self._logged_hashes = 0
        if stored or removed:
            self.batches += 1
            self._logged_hashes += len(stored) + len(removed)
        self.checksum = hashes_checksum((*removed, *stored), self.checksum)
        self.taken_hashes += len(stored) - len(removed)
        batch = EventBatch(
            incarnation=self.incarnation,
            sequence=self.sequence,
            stored=stored,
            removed=removed,
            cleared=self._cleared,
        )
        self._cleared = False
        return batch

    def take_snapshot(self) -> Snapshot:
        """The whole set, under the next number."""
        self.lost()
        self.needs_snapshot = False
        self.sequence += 1
        snapshot = self._whole()
        self.checksum = snapshot.checksum
        self.taken_hashes = len(self.hashes)
        return snapshot

    def take_fold(self) -> Snapshot | None:
        """The set under its present number, if its log has become long beside it."""
        few = self.batches <= MAX_LOG_BATCHES
        if self.pending or (few and self._logged_hashes <= max(self.taken_hashes, MIN_LOG_HASHES)):
            return None
        return self._whole()

    def _whole(self) -> Snapshot:
        self.values = -(-len(self.hashes) // CHUNK_HASHES)
        self.batches = self._logged_hashes = 0
        packed = b"".join(self.hashes)
        return Snapshot(incarnation=self.incarnation, sequence=self.sequence, packed=packed)


def _take(pending: dict[bytes, None], limit: int) -> tuple[bytes, ...]:
    taken = tuple(block_hash for block_hash, _ in zip(pending, range(limit), strict=False))
    for block_hash in taken:
        del pending[block_hash]
    return taken


class KvEventPublisher:
    """Publishes the hashes of one worker's blocks, in the background.

    ``publish`` never blocks and never fails. While Redis is away changes are folded together
    (bounded by the pool's own size); when it is back, or came back empty or old, the whole set is
    published again.

    Args:
        registry: Of the fleet.
        incarnation: The worker's.
        count_failure: Told of the background task's name when it raised.
    """

    def __init__(
        self,
        registry: Registry,
        incarnation: bytes,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._tasks = BackgroundTasks("kv events", count_failure)
        self._ledger = HashLedger(incarnation)
        self._ledger.needs_snapshot = True  # announces the incarnation, even when it is empty
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.connected = False
        self.snapshots = 0

    @property
    def sequence(self) -> int:
        """Number of the last batch or snapshot handed to Redis."""
        return self._ledger.sequence

    @property
    def checksum(self) -> int:
        """Checksum of the set after that batch."""
        return self._ledger.checksum

    def start(self) -> None:
        """Start publishing. Needs a running event loop."""
        if self._task is None:
            self._task = self._tasks.keep(self._run, "kv events")

    def publish(
        self, stored: Sequence[bytes] = (), removed: Sequence[bytes] = (), cleared: bool = False
    ) -> None:
        """Note that blocks were stored, removed, or all cleared. From the loop's thread only."""
        self._ledger.change(stored, removed, cleared)
        if self._ledger.pending:
            self._wake.set()

    async def stop(self) -> None:
        """Stop publishing; what is in Redis expires, or is removed by ``deregister``."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        next_refresh_s = 0.0
        while True:
            try:
                if time.monotonic() >= next_refresh_s:
                    await self._refresh()
                    next_refresh_s = time.monotonic() + REFRESH_S
                await self._flush()
                self.connected = True
            except RegistryUnavailableError:
                # Whether the last batch took effect is not known; a snapshot is right either way.
                self._ledger.lost()
                self.connected = False
                await asyncio.sleep(_RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_refresh_s - time.monotonic())):
                    await self._wake.wait()
                await asyncio.sleep(_COALESCE_S)

    async def _refresh(self) -> None:
        """Renew the keys' life; publish everything when Redis has something else."""
        ledger = self._ledger
        in_redis = await self._registry.refresh(ledger.incarnation)
        if in_redis != (ledger.sequence, ledger.checksum, ledger.values, ledger.batches):
            ledger.lost()

    async def _flush(self) -> None:
        self._wake.clear()
        while self._ledger.pending:
            if self._ledger.needs_snapshot:
                snapshot = self._ledger.take_snapshot()
                await self._registry.publish_snapshot(snapshot, self._ledger.checksum)
                self.snapshots += 1
            else:
                batch = self._ledger.take_batch()
                await self._registry.publish(batch, self._ledger.checksum)
        if (fold := self._ledger.take_fold()) is not None:
            await self._registry.fold(fold)


@dataclass(slots=True)
class _Track:
    """How far a reader has followed one incarnation."""

    sequence: int
    checksum: int
    missing_since_s: float | None = None


@dataclass(slots=True)
class FeedMachine:
    """Follows every incarnation's events and says of which a snapshot must be read.

    ``wants`` is filled when something is new or was missed: a hole in the sequence, a lost tail
    (a heartbeat with a higher sequence after the stream was read to its end), another checksum, or
    another life of Redis. What it returns can be applied as it comes, without further checks.
    """

    wants: set[bytes] = field(default_factory=set)
    gaps: int = 0
    _tracks: dict[bytes, _Track] = field(default_factory=dict)
    _unknown_since_s: dict[bytes, float] = field(default_factory=dict)  # in wants, without track
    _refilled_s: float = 0.0  # until then absence says nothing

    def resync(self, now_s: float = 0.0) -> None:
        """Redis has another life: keep what is known, and read every snapshot again."""
        self.wants |= set(self._tracks)
        self._refilled_s = now_s + REFILL_S if self._tracks else 0.0

    def on_entry(self, entry: StreamEntry) -> list[FeedItem]:
        """One entry of the stream, in order."""
        track = self._tracks.get(entry.incarnation)
        if isinstance(entry, StreamMark):
            if entry.kind == "forget":
                return self._forget(entry.incarnation)
            if track is None or entry.sequence > track.sequence:
                self.wants.add(entry.incarnation)
            return []
        if entry.incarnation in self.wants:
            return []  # the snapshot will be read after this entry, and hold it
        if track is None:
            self.wants.add(entry.incarnation)
            return []
        if entry.sequence <= track.sequence:
            return []
        if entry.sequence > track.sequence + 1:
            self._missed(entry.incarnation)
            return []
        track.sequence = entry.sequence
        if entry.cleared:
            track.checksum = 0
        track.checksum = hashes_checksum((*entry.removed, *entry.stored), track.checksum)
        return [entry]

    def on_snapshot(self, snapshot: Snapshot, checksum: int) -> list[FeedItem]:
        """A snapshot that was asked for. One that is damaged or outdated is read again."""
        track = self._tracks.get(snapshot.incarnation)
        outdated = track is not None and snapshot.sequence < track.sequence
        if outdated or snapshot.checksum != checksum:
            return []
        self.wants.discard(snapshot.incarnation)
        self._tracks[snapshot.incarnation] = _Track(snapshot.sequence, checksum)
        return [snapshot]

    def on_live(self, live: Mapping[bytes, tuple[int, int]], now_s: float) -> list[FeedItem]:
        """All heartbeats, read before the stream was last read to its end."""
        items: list[FeedItem] = []
        for incarnation, (sequence, checksum) in live.items():
            track = self._tracks.get(incarnation)
            if track is None:
                self.wants.add(incarnation)
                continue
            track.missing_since_s = None
            if incarnation in self.wants or track.sequence > sequence:
                continue
            if (track.sequence, track.checksum) != (sequence, checksum):
                self._missed(incarnation)
            else:
                items.append(
                    Heartbeat(incarnation=incarnation, sequence=sequence, checksum=checksum)
                )
        for incarnation in [known for known in self._tracks if known not in live]:
            track = self._tracks[incarnation]
            if track.missing_since_s is None:
                track.missing_since_s = now_s
            elif now_s >= max(track.missing_since_s + FORGET_AFTER_S, self._refilled_s):
                items += self._forget(incarnation)
        self._drop_unknown(live, now_s)
        return items

    def _drop_unknown(self, live: Mapping[bytes, tuple[int, int]], now_s: float) -> None:
        """Stop asking for snapshots of incarnations that do not appear in Redis."""
        unknown = self.wants - live.keys() - self._tracks.keys()
        self._unknown_since_s = {
            incarnation: self._unknown_since_s.get(incarnation, now_s) for incarnation in unknown
        }
        for incarnation, since_s in self._unknown_since_s.items():
            if now_s - since_s >= FORGET_AFTER_S:
                self.wants.discard(incarnation)

    def _missed(self, incarnation: bytes) -> None:
        self.gaps += 1
        self.wants.add(incarnation)

    def _forget(self, incarnation: bytes) -> list[FeedItem]:
        self.wants.discard(incarnation)
        if self._tracks.pop(incarnation, None) is None:
            return []
        return [Forget(incarnation=incarnation)]


class EventFeed:
    """All workers' KV events for one reader: ``async for item in feed``.

    Never ends and never raises because of Redis; while Redis is away nothing comes.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._machine = FeedMachine()
        self._position = b"0-0"
        self._birth: bytes | None = None
        self._present: set[bytes] = set()  # in Redis: of the others there is nothing to read
        self.connected = False

    @property
    def gaps(self) -> int:
        """How often something was missed and read again."""
        return self._machine.gaps

    def want(self, incarnation: bytes) -> None:
        """Ask for the incarnation's snapshot: the reader has lost what it was told."""
        self._machine.wants.add(incarnation)

    async def __aiter__(self) -> AsyncIterator[FeedItem]:
        next_beat_s = 0.0
        while True:
            try:
                now_s = time.monotonic()
                beat = now_s >= next_beat_s
                async for item in self._round(beat, now_s):
                    yield item
                if beat:
                    next_beat_s = now_s + REFRESH_S
                self.connected = True
                await asyncio.sleep(_POLL_S)
            except RegistryUnavailableError:
                self.connected = False
                next_beat_s = 0.0
                await asyncio.sleep(_RETRY_S)

    async def _round(self, beat: bool, now_s: float) -> AsyncIterator[FeedItem]:
        live: Mapping[bytes, tuple[int, int]] | None = None
        if beat:
            await self._notice_another_life(now_s)
            live = await self._registry.live()
        while True:
            after, entries = await self._registry.read_stream(self._position, _STREAM_READ)
            if after == self._position:
                break
            self._position = after
            for entry in entries:
                self._present.add(entry.incarnation)
                for item in self._machine.on_entry(entry):
                    yield item
        if live is not None:
            self._present = set(live)
            for item in self._machine.on_live(live, now_s):
                yield item
        for incarnation in sorted(self._machine.wants & self._present):
            for item in await self._read_snapshot(incarnation):
                yield item

    async def _notice_another_life(self, now_s: float) -> None:
        birth = await self._registry.birth()
        top = await self._registry.stream_top()
        came_back_old = _stream_order(top) < _stream_order(self._position)
        if birth != self._birth or came_back_old:
            self._position = top
            self._machine.resync(now_s)
            self._birth = birth

    async def _read_snapshot(self, incarnation: bytes) -> list[FeedItem]:
        answer = await self._registry.snapshot(incarnation)
        if answer is None:
            return []  # the worker will publish it, or its incarnation will be dropped
        snapshot, checksum = answer
        return self._machine.on_snapshot(snapshot, checksum)


def _stream_order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, counter = entry_id.partition(b"-")
    return int(milliseconds), int(counter or 0)
