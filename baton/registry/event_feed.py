"""Reader of the KV events of all workers, which notices lost events.

The state machine (`FeedMachine`) does no I/O. Its shell (`EventFeed`) reads Redis and handles all
its errors. Work for a thousand workers is done in parts, so that the event loop is not blocked.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field

from baton.registry.event_streams import StreamEntry, StreamMark, parse_entry, stream_order
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import FeedItem, Forget, Heartbeat, Refreshed, Snapshot, hashes_checksum

REFRESH_S = 1.0
FORGET_AFTER_S = 10.0  # of absence from Redis
REFILL_S = 60.0  # time for the workers to fill an emptied Redis again
_RETRY_S = 0.5
_POLL_S = 0.1  # between two reads, so that several entries are read at once
_MARK_TURNS = 2  # seconds to read the marks of all, a part in each
_STREAM_READ = 4  # entries of each stream, of up to 32 KiB
_LONG_BYTES = 4096  # after an entry with more bytes of hashes the loop may run others


@dataclass(slots=True)
class _Track:
    sequence: int
    checksum: int
    missing_since_s: float | None = None


@dataclass(slots=True)
class FeedMachine:
    """Follows the events of every incarnation and decides which snapshots to read.

    ``wants`` has the incarnations that are new or had a loss: a gap in the sequence, a lost tail
    (a heartbeat with a higher sequence after the stream was read to its end), another checksum, or
    an emptied Redis. Returned items can be applied as they are.
    """

    wants: set[bytes] = field(default_factory=set)
    gaps: int = 0
    _tracks: dict[bytes, _Track] = field(default_factory=dict)
    _unknown_since_s: dict[bytes, float] = field(default_factory=dict)  # in wants, without track
    _refilled_s: float = 0.0  # until then absence means nothing

    def resync(self, now_s: float = 0.0) -> None:
        """Handle a restarted Redis: keep what is known, and read every snapshot again."""
        self.wants |= set(self._tracks)
        self._refilled_s = now_s + REFILL_S if self._tracks else 0.0

    def on_entry(self, entry: StreamEntry) -> list[FeedItem]:
        """Process the next entry of the stream."""
        track = self._tracks.get(entry.incarnation)
        if isinstance(entry, StreamMark):
            if entry.kind == "forget":
                return self._forget(entry.incarnation)
            if track is None or entry.sequence > track.sequence:
                self.wants.add(entry.incarnation)
            return []
        if entry.incarnation in self.wants:
            return []  # the snapshot is read after this entry and includes it
        if track is None:
            self.wants.add(entry.incarnation)
            return []
        if entry.sequence <= track.sequence:
            return []
        if entry.sequence > track.sequence + 1:
            self._missed(entry.incarnation)
            return []
        track.sequence = entry.sequence
        track.checksum = hashes_checksum((*entry.removed, *entry.stored), track.checksum)
        return [entry]

    def on_snapshot(self, snapshot: Snapshot, checksum: int) -> list[FeedItem]:
        """Process a snapshot. One that is damaged or outdated is read again."""
        track = self._tracks.get(snapshot.incarnation)
        outdated = track is not None and snapshot.sequence < track.sequence
        if outdated or snapshot.checksum != checksum:
            return []
        self.wants.discard(snapshot.incarnation)
        self._tracks[snapshot.incarnation] = _Track(snapshot.sequence, checksum)
        return [snapshot]

    def on_marks(self, marks: Mapping[bytes, tuple[int, int]]) -> list[FeedItem]:
        """Process some heartbeats, read before the stream was last read to its end."""
        items: list[FeedItem] = []
        for incarnation, (sequence, checksum) in marks.items():
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
        return items

    def on_absent(self, present: Collection[bytes], now_s: float) -> list[FeedItem]:
        """Forget incarnations that have been without heartbeat for a while."""
        items: list[FeedItem] = []
        for incarnation in self._tracks.keys() - present:
            track = self._tracks[incarnation]
            if track.missing_since_s is None:
                track.missing_since_s = now_s
            elif now_s >= max(track.missing_since_s + FORGET_AFTER_S, self._refilled_s):
                items += self._forget(incarnation)
        self._drop_unknown(present, now_s)
        return items

    def _drop_unknown(self, present: Collection[bytes], now_s: float) -> None:
        unknown = self.wants.difference(present, self._tracks)
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
    """KV events of all workers for one reader: ``async for item in feed``.

    Never ends and never raises because of Redis; without Redis it yields nothing.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._machine = FeedMachine()
        self._positions = registry.blocks.streams.beginning()
        self._birth: bytes | None = None
        self._refreshes: dict[bytes, bytes] = {}
        self._turn = 0
        self._present: set[bytes] = set()  # incarnations in Redis; others have no snapshot

    @property
    def gaps(self) -> int:
        """Number of losses that were noticed and repaired."""
        return self._machine.gaps

    def want(self, incarnation: bytes) -> None:
        """Read the incarnation's snapshot, because the reader has lost its state."""
        self._machine.wants.add(incarnation)

    async def __aiter__(self) -> AsyncIterator[FeedItem | Refreshed]:
        next_beat_s = 0.0
        while True:
            try:
                now_s = time.monotonic()
                beat = now_s >= next_beat_s
                idle = not (beat or self._machine.wants & self._present)
                wait_s = next_beat_s - now_s if idle else 0.0
                async for item in self._round(beat, now_s, wait_s):
                    yield item
                if beat:
                    next_beat_s = now_s + REFRESH_S
                await asyncio.sleep(_POLL_S)
            except RegistryUnavailableError:
                next_beat_s = 0.0
                await asyncio.sleep(_RETRY_S)

    async def _round(
        self, beat: bool, now_s: float, wait_s: float
    ) -> AsyncIterator[FeedItem | Refreshed]:
        marks: list[dict[bytes, tuple[int, int]]] = []
        if beat:
            await self._notice_another_life(now_s)
            before = self._refreshes
            self._refreshes = await self._registry.blocks.refreshes()
            anew = {life for life, at in self._refreshes.items() if before.get(life) != at}
            yield Refreshed(incarnations=anew)
            self._turn = (self._turn + 1) % _MARK_TURNS
            due = [life for life in self._refreshes if life[0] % _MARK_TURNS == self._turn]
            marks = [part async for part in self._registry.blocks.marks(due)]
        while True:
            after = self._positions
            after, entries = await self._registry.blocks.read_streams(after, _STREAM_READ, wait_s)
            if not entries:
                break
            self._positions = after
            wait_s = 0.0
            for fields in entries:
                entry = parse_entry(fields)
                if entry is not None:
                    self._present.add(entry.incarnation)
                    for item in self._machine.on_entry(entry):
                        yield item
                if len(fields.get(b"s", b"")) > _LONG_BYTES:
                    await asyncio.sleep(0)
        if beat:
            self._present = set(self._refreshes)
            for part in marks:
                for item in self._machine.on_marks(part):
                    yield item
                await asyncio.sleep(0)
            for item in self._machine.on_absent(self._present, now_s):
                yield item
        for incarnation in sorted(self._machine.wants & self._present):
            for item in await self._read_snapshot(incarnation):
                yield item

    async def _notice_another_life(self, now_s: float) -> None:
        birth = await self._registry.birth()
        tops = await self._registry.blocks.stream_tops()
        after = self._positions
        came_back_old = any(stream_order(tops[key]) < stream_order(after[key]) for key in tops)
        if birth != self._birth or came_back_old:
            self._positions = tops
            self._machine.resync(now_s)
            self._birth = birth

    async def _read_snapshot(self, incarnation: bytes) -> list[FeedItem]:
        answer = await self._registry.blocks.snapshot(incarnation)
        if answer is None:
            return []  # the worker will publish it, or the incarnation will be dropped
        snapshot, checksum = answer
        return self._machine.on_snapshot(snapshot, checksum)
