"""Blocks of the workers in Redis: a set, a log, a mark and a stream entry for each change.

``redis_store`` has the table of their keys.
"""

import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

import msgspec

from baton.registry import event_streams
from baton.registry.connection import Command
from baton.registry.event_streams import BOUND, EventStreams, parse_mark, with_log
from baton.registry.types import HASH_BYTES, INCARNATION_BYTES, EventBatch, Snapshot

_Item = TypeVar("_Item")

KV_TTL_S = 60.0
_SLICE = 128  # workers whose keys are read at once: takes less than a millisecond
CHUNK_HASHES = 65_536  # hashes of a worker's set in one value: 1 MiB
CHUNK_BYTES = CHUNK_HASHES * HASH_BYTES
BATCH_HASHES = 2048  # hashes in one stream entry: 32 KiB
_REFRESH = f"""
{BOUND}
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
redis.call('ZADD', KEYS[4], ARGV[2], ARGV[3])
return {{redis.call('GET', KEYS[1]), redis.call('LLEN', KEYS[2]), redis.call('LLEN', KEYS[3])}}
"""


class WorkerBlocks:
    """Hashes of the blocks of all incarnations of one fleet, by ``Registry.blocks``.

    ``send`` sends commands in one round trip; with ``atomic`` in MULTI/EXEC.
    """

    def __init__(
        self, key: Callable[..., bytes], send: Callable[..., Awaitable[Sequence[Any]]]
    ) -> None:
        self._key = key
        self._send = send
        self.streams = EventStreams(key("kv:events"))

    async def publish(self, batch: EventBatch, checksum: int) -> None:
        """Append a batch to the worker's log and stream and update its mark, in one MULTI."""
        _, log_key, _ = self._kv_keys(batch.incarnation)
        stored = b"".join(batch.stored)
        removed = b"".join(batch.removed)
        commands: list[Command] = []
        if stored or removed:
            commands.append(("RPUSH", log_key, msgspec.msgpack.encode((stored, removed))))
        fields = ("k", "b", "s", stored, "r", removed, "c", 0)  # readers of 0.1.0 need "c"
        commands += self._stamp(batch.incarnation, batch.sequence, checksum)
        commands += self._live_on(batch.incarnation)
        commands.append(self._append(batch.incarnation, batch.sequence, *fields))
        answers = await self._send(*commands, atomic=True)
        self.streams.appended(answers[-1])

    async def publish_snapshot(self, snapshot: Snapshot, checksum: int) -> None:
        """Replace the worker's whole set and let readers read it again."""
        await self.replace(
            snapshot,
            *self._stamp(snapshot.incarnation, snapshot.sequence, checksum),
            self._append(snapshot.incarnation, snapshot.sequence, "k", "s"),
        )

    async def replace(self, snapshot: Snapshot, *commands: Command) -> None:
        """Replace set and log by one set; if it has the same blocks, readers need not notice."""
        # The set has a few large values instead of one per block, since it is read as a whole.
        blocks_key, log_key, _ = self._kv_keys(snapshot.incarnation)
        scratch = blocks_key + b":new"
        packed = snapshot.packed
        chunk_bytes = CHUNK_BYTES
        ttl_ms = int(KV_TTL_S * 1000)
        swap: list[Command] = [("UNLINK", blocks_key, log_key, scratch)]
        if 0 < len(packed) <= chunk_bytes:  # one value goes with the swap
            swap += [("RPUSH", blocks_key, packed), ("PEXPIRE", blocks_key, ttl_ms)]
        elif packed:
            await self._send(("UNLINK", scratch))
            for begin in range(0, len(packed), chunk_bytes):
                value = packed[begin : begin + chunk_bytes]
                await self._send(("RPUSH", scratch, value), ("PEXPIRE", scratch, ttl_ms))
            swap = [("RENAME", scratch, blocks_key), ("UNLINK", log_key)]
        await self._send(*swap, *commands, atomic=True)

    async def refresh(self, incarnation: bytes) -> tuple[int, int, int, int] | None:
        """Refresh an incarnation's keys.

        Returns:
            (sequence, checksum, values of its set, batches in its log) in Redis, or None.
        """
        blocks_key, log_key, mark_key = self._kv_keys(incarnation)
        keys = (mark_key, blocks_key, log_key, self._key("kv:live"), self.streams.key(incarnation))
        stream_bytes = event_streams.STREAM_BYTES
        # A script: eight commands would take a worker three times as long.
        ((mark, values, batches),) = await self._send(
            (
                *("EVAL", _REFRESH, len(keys), *keys),
                *(int(KV_TTL_S * 1000), _now_ms(), incarnation, stream_bytes),
            )
        )
        known = parse_mark(mark)
        return None if known is None else (*known, int(values), int(batches))

    def _live_on(self, incarnation: bytes) -> list[Command]:
        blocks_key, log_key, _ = self._kv_keys(incarnation)
        return [("PEXPIRE", key, int(KV_TTL_S * 1000)) for key in (blocks_key, log_key)]

    async def forget(self, incarnation: bytes) -> None:
        """Delete everything of a dead incarnation in O(1), and notify the readers."""
        if not incarnation:
            return
        blocks_key, log_key, mark_key = self._kv_keys(incarnation)
        await self._send(
            ("UNLINK", blocks_key, blocks_key + b":new", log_key, mark_key),
            ("ZREM", self._key("kv:live"), incarnation),
            self._append(incarnation, 0, "k", "f"),
            atomic=True,
        )

    async def refreshes(self) -> dict[bytes, bytes]:
        """Return the last refresh of each incarnation in the index, by its own clock."""
        (flat,) = await self._send(("ZRANGE", self._key("kv:live"), 0, -1, "WITHSCORES"))
        found = zip(flat[::2], flat[1::2], strict=True)
        return {one: at for one, at in found if len(one) == INCARNATION_BYTES}

    async def marks(
        self, incarnations: Collection[bytes]
    ) -> AsyncIterator[dict[bytes, tuple[int, int]]]:
        """Yield (sequence, checksum) of every incarnation in the index, in slices.

        Removes expired incarnations from the list. Expiry is by Redis' own clock, so that a host
        with a wrong clock removes none.
        """
        for part in slices(list(incarnations)):
            (marks,) = await self._send(("MGET", *(self._kv_keys(one)[-1] for one in part)))
            expired = [one for one, mark in zip(part, marks, strict=True) if mark is None]
            if expired:
                await self._send(("ZREM", self._key("kv:live"), *expired))
            found = zip(part, map(parse_mark, marks), strict=True)
            yield {bytes(one): mark for one, mark in found if mark is not None}

    async def snapshot(self, incarnation: bytes) -> tuple[Snapshot, int] | None:
        """Return an incarnation's set and checksum; None if it is missing or damaged."""
        blocks_key, log_key, mark_key = self._kv_keys(incarnation)
        lists = [("LRANGE", key, 0, -1) for key in (blocks_key, log_key)]
        mark, values, log = await self._send(("GET", mark_key), *lists, atomic=True)
        known = parse_mark(mark)
        packed = with_log(b"".join(values), log)
        if known is None or len(packed) % HASH_BYTES:
            return None
        return Snapshot(incarnation=incarnation, sequence=known[0], packed=packed), known[1]

    async def stream_tops(self) -> dict[bytes, bytes]:
        """Return the id of the newest entry of each stream; ``0-0`` if there is none."""
        return self.streams.top_positions(await self._send(*self.streams.tops()))

    async def read_streams(
        self, after: Mapping[bytes, bytes], count: int, wait_s: float = 0.0
    ) -> tuple[dict[bytes, bytes], list[dict[bytes, bytes]]]:
        """Return the new positions and up to ``count`` unparsed entries of each stream.

        Waits up to ``wait_s`` (below 3 s) for the first entry.
        """
        (answer,) = await self._send(self.streams.read(after, count, wait_s))
        positions = dict(after)
        found = list[dict[bytes, bytes]]()
        for key, entries in answer or ():
            positions[bytes(key)] = bytes(entries[-1][0])
            found += (fields for _, fields in entries)
        return positions, found

    def _kv_keys(self, incarnation: bytes) -> tuple[bytes, bytes, bytes]:
        stem = self._key("kv", incarnation.hex())
        return stem + b":blocks", stem + b":log", stem + b":mark"

    def _stamp(self, incarnation: bytes, sequence: int, checksum: int) -> list[Command]:
        mark_key = self._kv_keys(incarnation)[-1]
        return [
            ("SET", mark_key, f"{sequence} {checksum}", "PX", int(KV_TTL_S * 1000)),
            ("ZADD", self._key("kv:live"), _now_ms(), incarnation),
        ]

    def _append(self, incarnation: bytes, sequence: int, *fields: Any) -> Command:
        return self.streams.append(incarnation, "n", sequence, *fields)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def slices(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Yield slices that are small enough not to block the event loop for long."""
    return (items[at : at + _SLICE] for at in range(0, len(items), _SLICE))
