"""The registry's keys in Redis, and every command that is sent to it.

All keys start with ``baton:{fleet}:`` and every one of them expires or is bounded:

    slot:<worker id>      what the controller says about a slot            60 s
    worker:<worker id>    what the worker says about itself                10 s
    slots                 the ids of both kinds                            pruned when read
    kv:live               sorted set: incarnation -> last refresh (ms)     pruned when written
    kv:<incarnation>:blocks  list: hashes of the blocks that it held       60 s
    kv:<incarnation>:log  list: batches that came since                    60 s
    kv:<incarnation>:meta hash: sequence, checksum                         60 s
    kv:events             stream of batches                                MAXLEN ~
    orders, answer:<id>   what operators ask, see orders.py                10 s, 60 s
    wanted                what they asked of the pools' sizes and nodes    see wanted.py
    lease                 who runs the fleet                               see lease.py
    adapters              hash: name -> entry of a LoRA adapter            1 day
    tickets               the last ticket that a router took               1 day
    routers               hash: router -> what it has to do                1 minute
    responses:…           what clients asked to be kept                    see stored_responses.py
    birth                 random; another value means another Redis life

Only commands of Redis 6.2 are used. Redis is never on a request's path, so every call may fail:
``RegistryUnavailableError`` is the one error, and callers go on without it.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from redis.exceptions import RedisError

from registry.connection import RedisUrlError, open_redis
from registry.stream_entries import StreamEntry, parse_entry, with_log
from registry.types import (
    HASH_BYTES,
    TIERS,
    EventBatch,
    Snapshot,
    WorkerRecord,
    tier_incarnation,
)

SLOT_TTL_S = 60.0
WORKER_TTL_S = 10.0
KV_TTL_S = 60.0
ADAPTERS_TTL_S = TICKETS_TTL_S = 24 * 3600
STREAM_BATCHES = 4096
CHUNK_HASHES = 65_536  # of a worker's set are one value in Redis: 1 MiB
BATCH_HASHES = 2048  # so that the stream stays below STREAM_BATCHES x 32 KiB
_CALL_LIMIT_S = 3.0

Command = tuple[Any, ...]

_LOG = logging.getLogger(__name__)


class RegistryUnavailableError(ConnectionError):
    """Redis did not answer, or refused; nothing is known about whether the call took effect."""


class Registry:
    """A connection to the registry of one fleet. Makes no call until it is used.

    Args:
        url: See ``registry/connection.py``.
        fleet: The fleet's name.

    Raises:
        RedisUrlError: The URL cannot be used.
    """

    def __init__(self, url: str, fleet: str) -> None:
        self._redis = open_redis(url)
        self._skipped: dict[str, str] = {}
        self.on_skipped: Callable[[str], None] = lambda _: None
        self._prefix = f"baton:{{{fleet}}}:"  # the braces keep a fleet on one cluster node
        self.fleet = fleet
        self.connected = False  # whether Redis answered the last call
        self.errors = 0  # calls that failed

    @classmethod
    async def connect(cls, url: str, fleet: str) -> "Registry":
        """Make one and try it.

        Raises:
            RegistryUnavailableError: Redis does not answer.
        """
        registry = cls(url, fleet)
        try:
            await registry.birth()
        except RegistryUnavailableError:
            await registry.close()
            raise
        return registry

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    async def birth(self) -> bytes:
        """The random mark of this life of Redis; made if there is none."""
        _, mark = await self.send(
            ("SET", self.key("birth"), secrets.token_hex(8), "NX"), ("GET", self.key("birth"))
        )
        return bytes(mark)

    async def present_birth(self) -> bytes | None:
        """The same, or None if it has none yet."""
        (mark,) = await self.send(("GET", self.key("birth")))
        return None if mark is None else bytes(mark)

    # --- workers and slots -----------------------------------------------------------------------

    async def register(self, record: WorkerRecord) -> None:
        """Write what a worker says about itself; expires in 10 s unless refreshed."""
        await self._write("worker", record, WORKER_TTL_S)

    async def heartbeat(self, record: WorkerRecord) -> None:
        """Refresh the whole record, so that an emptied Redis heals by itself."""
        await self.register(record)

    async def deregister(self, record: WorkerRecord) -> None:
        """Take a worker out: its record, and at once all that it held in the index."""
        await self.send(("DEL", self.key("worker", record.worker_id)))
        await self.forget(record.incarnation)
        for tier in TIERS if record.incarnation else ():
            await self.forget(tier_incarnation(record.incarnation, tier))

    async def write_slot(self, record: WorkerRecord, ttl_s: float = SLOT_TTL_S) -> None:
        """Write what the controller says about a slot (starting, draining, dead)."""
        await self._write("slot", record, ttl_s)

    async def write_slots(self, records: Sequence[WorkerRecord], ttl_s: float = SLOT_TTL_S) -> None:
        """``write_slot`` for many, in one round trip."""
        if records:
            await self.send(*(c for record in records for c in self._put("slot", record, ttl_s)))

    async def remove_slot(self, worker_id: str) -> None:
        """Forget a slot that no longer exists."""
        await self.send(
            ("DEL", self.key("slot", worker_id), self.key("worker", worker_id)),
            ("SREM", self.key("slots"), worker_id),
        )

    async def records(self) -> tuple[dict[str, WorkerRecord], dict[str, WorkerRecord]]:
        """All records by worker id: the controller's, and the workers' own.

        One that cannot be read (of a future version, or damaged) is skipped, logged once by name,
        and told to ``on_skipped``.
        """
        (ids,) = await self.send(("SMEMBERS", self.key("slots")))
        worker_ids = sorted(worker_id.decode() for worker_id in ids)
        if not worker_ids:
            return {}, {}
        slot_keys = [self.key("slot", worker_id) for worker_id in worker_ids]
        worker_keys = [self.key("worker", worker_id) for worker_id in worker_ids]
        raw_slots, raw_workers = await self.send(("MGET", *slot_keys), ("MGET", *worker_keys))
        slots = self._readable(worker_ids, raw_slots)
        workers = self._readable(worker_ids, raw_workers)
        raw = zip(worker_ids, raw_slots, raw_workers, strict=True)
        gone = [name for name, slot, worker in raw if slot is None and worker is None]
        if gone:
            await self.send(("SREM", self.key("slots"), *gone))
        return slots, workers

    async def _write(self, kind: str, record: WorkerRecord, ttl_s: float) -> None:
        await self.send(*self._put(kind, record, ttl_s))

    def _put(self, kind: str, record: WorkerRecord, ttl_s: float) -> list[Command]:
        stamped = msgspec.structs.replace(record, heartbeat_ms=_now_ms())
        value = msgspec.msgpack.encode(stamped)
        return [
            ("SET", self.key(kind, record.worker_id), value, "PX", int(ttl_s * 1000)),
            ("SADD", self.key("slots"), record.worker_id),
        ]

    def _readable(
        self, names: Sequence[str], raw: Sequence[bytes | None]
    ) -> dict[str, WorkerRecord]:
        records = {}
        for name, value in zip(names, raw, strict=True):
            if value is None:
                continue
            try:
                records[name] = msgspec.msgpack.decode(value, type=WorkerRecord)
            except msgspec.DecodeError as error:  # wrong types and unknown values among them
                self.skip(name, str(error))
            else:
                self._skipped.pop(name, None)
        return records

    def skip(self, name: str, reason: str) -> None:
        """Log a record that cannot be read when it is new, or is wrong in a new way."""
        if self._skipped.get(name) != reason:
            self._skipped[name] = reason
            _LOG.warning("the registry's record of %r cannot be read: %s", name, reason)
            self.on_skipped(name)

    # --- adapters that clients may name, shared by the routers -----------------------------------

    async def adapters(self) -> dict[str, bytes]:
        """What routers wrote, by name. Each read keeps it for another day."""
        key = self.key("adapters")
        pairs, _ = await self.send(("HGETALL", key), ("PEXPIRE", key, ADAPTERS_TTL_S * 1000))
        return {name.decode(): bytes(raw) for name, raw in pairs.items()}

    async def put_adapters(self, entries: Mapping[str, bytes]) -> None:
        """Write entries, over those of the same name."""
        fields = [part for name, raw in entries.items() for part in (name, raw)]
        await self.send(("HSET", self.key("adapters"), *fields))

    # --- tickets: the order of requests, over all routers -----------------------------------------

    async def take_tickets(self, count: int, above: int) -> int:
        """Take the next ``count`` tickets; no router gets one of them again.

        Args:
            count: How many.
            above: The highest one that the caller knows of: an emptied Redis goes on from there.

        Returns:
            The first one.
        """
        key = self.key("tickets")
        (last,) = await self.send(("INCRBY", key, count))
        if last - count < above:
            (last,) = await self.send(("INCRBY", key, above - last + 2 * count))
        await self.send(("PEXPIRE", key, TICKETS_TTL_S * 1000))
        return int(last) - count + 1

    # --- KV events: the publishing side ----------------------------------------------------------

    async def publish(self, batch: EventBatch, checksum: int) -> None:
        """One MULTI: add to the worker's log and to the stream, bump the sequence."""
        blocks_key, log_key, _ = self._kv_keys(batch.incarnation)
        stored, removed = b"".join(batch.stored), b"".join(batch.removed)
        commands: list[Command] = []
        if batch.cleared:
            commands.append(("UNLINK", blocks_key, log_key))
        if stored or removed:
            commands.append(("RPUSH", log_key, msgspec.msgpack.encode((stored, removed))))
        fields = ("k", "b", "s", stored, "r", removed, "c", int(batch.cleared))
        commands += self._stamp(batch.incarnation, batch.sequence, checksum)
        commands.append(self._append(batch.incarnation, batch.sequence, *fields))
        await self.send(*commands, *self._live_on(batch.incarnation), atomic=True)

    async def publish_snapshot(self, snapshot: Snapshot, checksum: int) -> None:
        """Replace the worker's whole set; readers are told to read it again."""
        await self._replace(
            snapshot,
            *self._stamp(snapshot.incarnation, snapshot.sequence, checksum),
            self._append(snapshot.incarnation, snapshot.sequence, "k", "s"),
        )

    async def fold(self, snapshot: Snapshot) -> None:
        """Put the log into the set: the same blocks, so that readers need not know of it."""
        await self._replace(snapshot)

    async def _replace(self, snapshot: Snapshot, *commands: Command) -> None:
        """The set in a few values, not one for each block: it is written and read as a whole."""
        blocks_key, log_key, _ = self._kv_keys(snapshot.incarnation)
        scratch, packed = blocks_key + b":new", snapshot.packed
        await self.send(("UNLINK", scratch))
        for begin in range(0, len(packed), CHUNK_HASHES * HASH_BYTES):
            await self.send(
                ("RPUSH", scratch, packed[begin : begin + CHUNK_HASHES * HASH_BYTES]),
                ("PEXPIRE", scratch, int(KV_TTL_S * 1000)),
            )
        swap: Command = ("RENAME", scratch, blocks_key) if packed else ("UNLINK", blocks_key)
        await self.send(swap, ("UNLINK", log_key), *commands, atomic=True)

    async def refresh(self, incarnation: bytes) -> tuple[int, int, int, int] | None:
        """Keep an incarnation's keys alive.

        Returns:
            (sequence, checksum, values of its set, batches in its log) as Redis has them, or None
            if it has nothing.
        """
        blocks_key, log_key, meta_key = self._kv_keys(incarnation)
        meta, values, batches, *_ = await self.send(
            ("HMGET", meta_key, "n", "x"),
            ("LLEN", blocks_key),
            ("LLEN", log_key),
            ("PEXPIRE", meta_key, int(KV_TTL_S * 1000)),
            *self._live_on(incarnation),
            ("ZADD", self.key("kv:live"), _now_ms(), incarnation),
            atomic=True,
        )
        if meta[0] is None:
            return None
        return int(meta[0]), int(meta[1]), int(values), int(batches)

    def _live_on(self, incarnation: bytes) -> list[Command]:
        blocks_key, log_key, _ = self._kv_keys(incarnation)
        return [("PEXPIRE", key, int(KV_TTL_S * 1000)) for key in (blocks_key, log_key)]

    async def forget(self, incarnation: bytes) -> None:
        """Drop all that a dead incarnation held, in O(1), and tell the readers."""
        if not incarnation:
            return
        blocks_key, log_key, meta_key = self._kv_keys(incarnation)
        await self.send(
            ("UNLINK", blocks_key, blocks_key + b":new", log_key, meta_key),
            ("ZREM", self.key("kv:live"), incarnation),
            self._append(incarnation, 0, "k", "f"),
            atomic=True,
        )

    # --- KV events: the reading side -------------------------------------------------------------

    async def live(self) -> dict[bytes, tuple[int, int]]:
        """(sequence, checksum) of every incarnation in the index.

        What has expired is taken off the list here, by Redis' own clock: a host whose clock is
        wrong takes off nobody.
        """
        (members,) = await self.send(("ZRANGE", self.key("kv:live"), 0, -1))
        if not members:
            return {}
        commands = [("HMGET", self._kv_keys(member)[-1], "n", "x") for member in members]
        metas = await self.send(*commands)
        expired = [m for m, (sequence, _) in zip(members, metas, strict=True) if sequence is None]
        if expired:
            await self.send(("ZREM", self.key("kv:live"), *expired))
        return {
            bytes(member): (int(sequence), int(checksum))
            for member, (sequence, checksum) in zip(members, metas, strict=True)
            if sequence is not None
        }

    async def snapshot(self, incarnation: bytes) -> tuple[Snapshot, int] | None:
        """One incarnation's set with the checksum it should have, or None if Redis lacks it."""
        blocks_key, log_key, meta_key = self._kv_keys(incarnation)
        meta, values, log = await self.send(
            ("HMGET", meta_key, "n", "x"),
            ("LRANGE", blocks_key, 0, -1),
            ("LRANGE", log_key, 0, -1),
            atomic=True,
        )
        if meta[0] is None:
            return None
        packed = with_log(b"".join(values), log)
        snapshot = Snapshot(incarnation=incarnation, sequence=int(meta[0]), packed=packed)
        return snapshot, int(meta[1])

    async def stream_top(self) -> bytes:
        """The id of the newest entry; ``0-0`` if there is none."""
        (entries,) = await self.send(("XREVRANGE", self.key("kv:events"), "+", "-", "COUNT", 1))
        return bytes(entries[0][0]) if entries else b"0-0"

    async def read_stream(self, after: bytes, count: int) -> tuple[bytes, list[StreamEntry]]:
        """Up to ``count`` entries after an id, and the id to go on from."""
        (answer,) = await self.send(
            ("XREAD", "COUNT", count, "STREAMS", self.key("kv:events"), after)
        )
        if not answer:
            return after, []
        entries = answer[0][1]
        parsed = [parse_entry(fields) for _, fields in entries]
        return bytes(entries[-1][0]), [entry for entry in parsed if entry is not None]

    # --- plumbing --------------------------------------------------------------------------------

    def key(self, *parts: str) -> bytes:
        """A key of this fleet."""
        return (self._prefix + ":".join(parts)).encode()

    def _kv_keys(self, incarnation: bytes) -> tuple[bytes, bytes, bytes]:
        stem = self.key("kv", incarnation.hex())
        return stem + b":blocks", stem + b":log", stem + b":meta"

    def _stamp(self, incarnation: bytes, sequence: int, checksum: int) -> list[Command]:
        meta = self._kv_keys(incarnation)[-1]
        return [
            ("HSET", meta, "n", sequence, "x", checksum),
            ("PEXPIRE", meta, int(KV_TTL_S * 1000)),
            ("ZADD", self.key("kv:live"), _now_ms(), incarnation),
        ]

    def _append(self, incarnation: bytes, sequence: int, *fields: Any) -> Command:
        bound = ("MAXLEN", "~", STREAM_BATCHES, "*")
        return ("XADD", self.key("kv:events"), *bound, "i", incarnation, "n", sequence, *fields)

    async def send(self, *commands: Command, atomic: bool = False) -> Sequence[Any]:
        """One round trip; with ``atomic`` in MULTI/EXEC.

        Raises:
            RegistryUnavailableError: Redis did not answer, or refused.
        """
        try:
            async with self._redis.pipeline(transaction=atomic) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                async with asyncio.timeout(_CALL_LIMIT_S):
                    answers: Sequence[Any] = await pipe.execute()
        except (TimeoutError, RedisError, OSError, RedisUrlError, RuntimeError) as error:
            # uvloop says by a RuntimeError, and redis-py passes on, that a connection was closed.
            self.connected = False
            self.errors += 1
            raise RegistryUnavailableError(f"Redis: {error}") from error
        self.connected = True
        return answers


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
