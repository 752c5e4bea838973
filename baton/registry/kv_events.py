"""Publisher of a worker's KV events. `event_feed.py` reads them.

The state machine (`HashLedger`) does no I/O. Its shell (`KvEventPublisher`) talks to Redis and
handles all errors of Redis.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from baton.registry.connection import next_beat_s
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import EventBatch, Snapshot, hashes_checksum
from baton.registry.worker_blocks import BATCH_HASHES, CHUNK_HASHES
from baton.telemetry.tasks import BackgroundTasks

REFRESH_S = 1.0
MAX_LOG_BATCHES = 512
MIN_LOG_HASHES = 16_384
MAX_PENDING_HASHES = 65_536  # above it a snapshot is cheaper than batches
_COALESCE_S = 0.02
_RETRY_S = 0.5


class HashLedger:
    """Turns a worker's stores and removals into numbered net changes of its set of block hashes.

    Storing a hash twice, or removing an absent one, is no change. Batches therefore change the
    checksum by exactly their hashes, and readers can follow it without the set.
    """

    def __init__(self, incarnation: bytes) -> None:
        self.incarnation = incarnation
        self.hashes: set[bytes] = set()  # of the worker's blocks
        self.sequence = 0  # of the last batch or snapshot taken
        self.checksum = 0  # of the set at that sequence
        self.taken_hashes = 0  # size of that set
        self.values = 0  # values of the set in Redis
        self.batches = 0  # batches in the log in Redis
        self._logged_hashes = 0
        self.needs_snapshot = False
        self._stored: dict[bytes, None] = {}  # ordered
        self._removed: dict[bytes, None] = {}

    @property
    def pending(self) -> bool:
        """True if anything is left to publish."""
        return bool(self.needs_snapshot or self._stored or self._removed)

    def change(self, stored: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> None:
        """Record changes, in the order ``removed``, ``stored``."""
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
        """Publish the whole set next, because Redis may lack what was taken."""
        self.needs_snapshot = True
        self._stored.clear()
        self._removed.clear()

    def take_batch(self) -> EventBatch:
        """Take the next batch of at most ``BATCH_HASHES`` hashes."""
        removed = _take(self._removed, BATCH_HASHES)
        stored = _take(self._stored, BATCH_HASHES - len(removed))
        self.sequence += 1
        if stored or removed:
            self.batches += 1
            self._logged_hashes += len(stored) + len(removed)
        self.checksum = hashes_checksum((*removed, *stored), self.checksum)
        self.taken_hashes += len(stored) - len(removed)
        return EventBatch(
            incarnation=self.incarnation,
            sequence=self.sequence,
            stored=stored,
            removed=removed,
        )

    def take_snapshot(self) -> Snapshot:
        """Take the whole set, under the next number."""
        self.lost()
        self.needs_snapshot = False
        self.sequence += 1
        snapshot = self._whole()
        self.checksum = snapshot.checksum
        self.taken_hashes = len(self.hashes)
        return snapshot

    def take_fold(self) -> Snapshot | None:
        """Take the set under its current number, if its log has become long."""
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

    ``publish`` never blocks and never fails. Without Redis, changes are merged (bounded by the
    pool's size). When Redis is back, possibly empty or old, the whole set is published again.
    ``count_failure`` receives the name of a background task that raised.
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
        self.snapshots = 0

    @property
    def sequence(self) -> int:
        """Number of the last batch or snapshot sent to Redis."""
        return self._ledger.sequence

    def start(self) -> None:
        """Start publishing. Needs a running event loop."""
        self._tasks.keep(self._run, "kv events")

    def publish(self, stored: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> None:
        """Publish that blocks were stored and removed. From the loop's thread only."""
        self._ledger.change(stored, removed)
        if self._ledger.pending:
            self._wake.set()

    async def stop(self) -> None:
        """Stop publishing; keys in Redis expire, or ``deregister`` removes them."""
        await self._tasks.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_refresh_s = 0.0
        while True:
            try:
                if loop.time() >= next_refresh_s:
                    await self._refresh()
                    next_refresh_s = next_beat_s(REFRESH_S)
                await self._flush()
            except RegistryUnavailableError:
                # The last batch may or may not have taken effect; a snapshot is right either way.
                self._ledger.lost()
                await asyncio.sleep(_RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_refresh_s):
                    await self._wake.wait()
                await asyncio.sleep(_COALESCE_S)

    async def _refresh(self) -> None:
        """Refresh the keys; publish everything if Redis has something else."""
        ledger = self._ledger
        in_redis = await self._registry.blocks.refresh(ledger.incarnation)
        if in_redis != (ledger.sequence, ledger.checksum, ledger.values, ledger.batches):
            ledger.lost()

    async def _flush(self) -> None:
        self._wake.clear()
        while self._ledger.pending:
            if self._ledger.needs_snapshot:
                snapshot = self._ledger.take_snapshot()
                await self._registry.blocks.publish_snapshot(snapshot, self._ledger.checksum)
                self.snapshots += 1
            else:
                batch = self._ledger.take_batch()
                await self._registry.blocks.publish(batch, self._ledger.checksum)
        if (fold := self._ledger.take_fold()) is not None:
            await self._registry.blocks.replace(fold)
