"""Keys of the registry in Redis, and all commands that it sends.

All keys start with ``baton:{fleet}:``, and each expires or is bounded. A lane has its own keys
under ``baton:{fleet.lane}:`` for workers, blocks, commands, adapters, tickets and routers:

    slot:<worker id>      the controller's record of a slot                60 s
    worker:<worker id>    the worker's own record                          10 s
    slots                 the ids of both kinds                            pruned when read
    changes               counts changes of records, except heartbeats     1 day
    kv:live               sorted set: incarnation -> last refresh (ms)     pruned when written
    kv:<incarnation>:blocks  list: hashes of the blocks at the last snapshot  60 s
    kv:<incarnation>:log  list: batches since then                         60 s
    kv:<incarnation>:mark sequence and checksum                            60 s
    kv:events:<0 to 7>    streams of batches, see event_streams.py         30 s, 16 MiB
    orders, answer:<id>   admin commands and replies, see admin_commands.py  10 s, 60 s
    wanted                sizes and nodes set at run time                  see wanted_sizes.py
    plan                  the planner's last result                        10 s
    lease                 the supervisor of the fleet                      see lease.py
    keys, keys:…          issued API keys, hashes only        see ../tenants/shared_keys.py
    tenants               limits and deletions of tenants     see ../tenants/shared_limits.py
    quotas:<tenant>       use of a tenant's limits            see ../tenants/quotas.py
    deletion:<id>         what each process deleted           see ../tenants/erasures.py
    usage:hours:<hour>    counters of an hour                 see ../tenants/usage/shared.py
    usage:life:<life>     last report of a process            see ../tenants/usage/shared.py
    audit:…               entries on their way to the file    see ../tenants/audit/inbox.py
    adapters:table        LoRA adapters loaded at run time    see shared_adapters.py
    adapters              the same of an earlier version                   1 day
    routes                names, golden prompts of models     see shared_routes.py
    gate:…                evidence about a canary             see gates.py
    tickets               the last ticket that a router took               1 day
    routers               hash: router -> its load                         1 minute
    responses:…           responses that clients asked to store            see stored_responses.py
    birth                 random; it changes when Redis restarts empty

Only commands of Redis 6.2 are used. Redis is never on a request's path, so every call may fail with
``RegistryUnavailableError``, and callers continue without it.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    ReadOnlyError,
    RedisError,
)

from baton.registry import event_streams
from baton.registry.connection import RedisUrlError, open_redis, reconnect
from baton.registry.event_streams import BOUND, EventStreams
from baton.registry.stream_entries import parse_mark, with_log
from baton.registry.types import (
    HASH_BYTES,
    INCARNATION_BYTES,
    TIERS,
    EventBatch,
    Snapshot,
    WorkerRecord,
    tier_incarnation,
)
from baton.types.lanes import whole_fleet

SLOT_TTL_S = 60.0
WORKER_TTL_S = 10.0
KV_TTL_S = 60.0
TICKETS_TTL_S = 24 * 3600
CHUNK_HASHES = 65_536  # hashes of a worker's set in one value: 1 MiB
CHUNK_BYTES = CHUNK_HASHES * HASH_BYTES
BATCH_HASHES = 2048  # hashes in one stream entry: 32 KiB
CHANGES_TTL_S = 24 * 3600
_CALL_LIMIT_S = 3.0
_SLICE = 128  # workers whose keys are read at once: takes less than a millisecond
_REFRESH = f"""
{BOUND}
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
redis.call('ZADD', KEYS[4], ARGV[2], ARGV[3])
return {{redis.call('GET', KEYS[1]), redis.call('LLEN', KEYS[2]), redis.call('LLEN', KEYS[3])}}
"""

# Errors of a server that is not, or not yet, the primary, and silence. redis-py has no class for
# some of them, and a script's error has the code in its text.
_WRONG_SERVER = (
    TimeoutError,
    ReadOnlyError,
    BusyLoadingError,
    AskError,
    ClusterDownError,
    MasterDownError,
)
_CODES = ("READONLY", "LOADING", "MASTERDOWN", "MOVED", "CLUSTERDOWN", "NOREPLICAS")

Command = tuple[Any, ...]
_Item = TypeVar("_Item")

_LOG = logging.getLogger(__name__)


class RegistryUnavailableError(ConnectionError):
    """Redis did not answer, or refused; the call may or may not have taken effect."""


class Registry:
    """Connection to the registry of one fleet. Connects at the first call.

    Raises:
        RedisUrlError: The URL cannot be used.
    """

    def __init__(self, url: str, fleet: str, connection: Redis | None = None) -> None:
        self._redis = connection or open_redis(url)
        self._skipped: dict[str, str] = {}
        self._read: dict[str, dict[str, tuple[bytes, WorkerRecord]]] = {"slot": {}, "worker": {}}
        self.on_skipped: Callable[[str], None] = lambda _: None
        self._prefix = f"baton:{{{fleet}}}:"  # the braces keep a fleet on one cluster node
        self.streams = EventStreams(self.key("kv:events"))
        self.fleet = fleet
        self.connected = False  # True if Redis answered the last call
        self.errors = 0  # failed calls

    @classmethod
    async def connect(cls, url: str, fleet: str) -> "Registry":
        """Create a registry and check its connection."""
        registry = cls(url, fleet)
        try:
            await registry.birth()
        except RegistryUnavailableError:
            await registry.close()
            raise
        return registry

    def of_whole_fleet(self) -> "Registry":
        """Return the registry of the fleet that a lane belongs to, over the same connections.

        It holds what lanes share: tenants, usage and the audit log. Close only this registry.
        """
        return self.of_lane(whole_fleet(self.fleet))

    def of_lane(self, fleet: str) -> "Registry":
        """Return the registry of a lane, ``FLEET.LANE``, over the same connections."""
        return self if fleet == self.fleet else Registry("", fleet, self._redis)

    async def close(self) -> None:
        """Close all connections to Redis."""
        await self._redis.aclose()

    async def birth(self) -> bytes:
        """Return the random id of this life of Redis; create it if there is none."""
        _, mark = await self.send(
            ("SET", self.key("birth"), secrets.token_hex(8), "NX"), ("GET", self.key("birth"))
        )
        return bytes(mark)

    async def state(self) -> tuple[bytes | None, bytes | None]:
        """Return that id, if any, and the counter of changes of workers' records."""
        mark, changes = await self.send(("GET", self.key("birth")), ("GET", self.key("changes")))
        return (None if mark is None else bytes(mark)), changes

    # --- workers and slots -----------------------------------------------------------------------

    async def register(self, record: WorkerRecord) -> None:
        """Write a worker's new or changed record; it expires in 10 s unless refreshed."""
        await self.send(*self._put("worker", record, WORKER_TTL_S), *self._changed())

    async def heartbeat(self, record: WorkerRecord) -> None:
        """Refresh the whole record, so that an emptied Redis heals by itself."""
        await self.send(*self._put("worker", record, WORKER_TTL_S))

    async def deregister(self, record: WorkerRecord) -> None:
        """Remove a worker: its record, and all its blocks in the index."""
        await self.send(("DEL", self.key("worker", record.worker_id)), *self._changed())
        await self.forget(record.incarnation)
        for tier in TIERS if record.incarnation else ():
            await self.forget(tier_incarnation(record.incarnation, tier))

    async def write_slot(self, record: WorkerRecord, ttl_s: float = SLOT_TTL_S) -> None:
        """Write the controller's record of a slot (starting, draining, dead)."""
        await self.write_slots((record,), ttl_s)

    async def write_slots(self, records: Sequence[WorkerRecord], ttl_s: float = SLOT_TTL_S) -> None:
        """Write several slots in one round trip."""
        if records:
            puts = (put for record in records for put in self._put("slot", record, ttl_s))
            await self.send(*puts, *self._changed())

    async def records(self) -> tuple[dict[str, WorkerRecord], dict[str, WorkerRecord]]:
        """Return all records by worker id: the controller's, and the workers' own.

        A record that cannot be read (of a later version, or damaged) is skipped, logged once by
        name, and reported to ``on_skipped``.
        """
        (ids,) = await self.send(("SMEMBERS", self.key("slots")))
        worker_ids = sorted(self.names_in(ids))
        read: dict[str, dict[str, tuple[bytes, WorkerRecord]]] = {"slot": {}, "worker": {}}
        gone: list[str] = []
        for names in slices(worker_ids):
            answers = await self.send(
                *(("MGET", *(self.key(kind, name) for name in names)) for kind in read)
            )
            gone += [name for name, *raw in zip(names, *answers, strict=True) if raw == [None] * 2]
            for kind, values in zip(read, answers, strict=True):
                raw = {n: v for n, v in zip(names, values, strict=True) if v is not None}
                read[kind] |= self._readable(kind, raw)
        if gone:
            await self.send(("SREM", self.key("slots"), *gone))
        self._read = read
        slots, workers = (
            {name: record for name, (_, record) in of_kind.items()} for of_kind in read.values()
        )
        return slots, workers

    def _put(self, kind: str, record: WorkerRecord, ttl_s: float) -> list[Command]:
        value = msgspec.msgpack.encode(record)
        return [
            ("SET", self.key(kind, record.worker_id), value, "PX", int(ttl_s * 1000)),
            ("SADD", self.key("slots"), record.worker_id),
        ]

    def _changed(self) -> list[Command]:
        """Return commands that notify readers of a changed list."""
        key = self.key("changes")
        return [("INCR", key), ("PEXPIRE", key, CHANGES_TTL_S * 1000)]

    def _readable(
        self, kind: str, raw: Mapping[str, bytes]
    ) -> dict[str, tuple[bytes, WorkerRecord]]:
        """Decode the readable records; unchanged ones are taken from the last read."""
        before = self._read[kind]
        read = dict[str, tuple[bytes, WorkerRecord]]()
        for name, value in raw.items():
            last = before.get(name)
            if last is not None and last[0] == value:
                read[name] = last
                continue
            try:
                read[name] = value, msgspec.msgpack.decode(value, type=WorkerRecord)
            except msgspec.DecodeError as error:  # includes wrong types and unknown values
                self.skip(name, str(error))
            else:
                self._skipped.pop(name, None)
        return read

    def names_in(self, raws: Iterable[bytes]) -> dict[str, bytes]:
        """Return raw names by their text; those that are not UTF-8 are skipped."""
        names = {}
        for raw in raws:
            try:
                names[raw.decode()] = raw
            except UnicodeDecodeError as error:
                self.skip(repr(raw), str(error))
        return names

    def skip(self, name: str, reason: str) -> None:
        """Log and report an unreadable record, once per name and reason."""
        if self._skipped.get(name) != reason:
            self._skipped[name] = reason
            _LOG.warning("skipping registry record %r: %s", name, reason)
            self.on_skipped(name)

    # --- tickets: the order of requests across all routers ----------------------------------------

    async def take_tickets(self, count: int, above: int) -> int:
        """Take the next ``count`` tickets and return the first; no router gets them again.

        ``above`` is the highest ticket that the caller has seen: numbering continues there if Redis
        was emptied.
        """
        key = self.key("tickets")
        kept = ("PEXPIRE", key, TICKETS_TTL_S * 1000)
        last, _ = await self.send(("INCRBY", key, count), kept)
        if last - count < above:
            last, _ = await self.send(("INCRBY", key, above - last + 2 * count), kept)
        return int(last) - count + 1

    # --- KV events: the publishing side ----------------------------------------------------------

    async def publish(self, batch: EventBatch, checksum: int) -> None:
        """Append a batch to the worker's log and stream and update its mark, in one MULTI."""
        blocks_key, log_key, _ = self._kv_keys(batch.incarnation)
        stored = b"".join(batch.stored)
        removed = b"".join(batch.removed)
        commands: list[Command] = []
        if batch.cleared:
            commands.append(("UNLINK", blocks_key, log_key))
        if stored or removed:
            commands.append(("RPUSH", log_key, msgspec.msgpack.encode((stored, removed))))
        fields = ("k", "b", "s", stored, "r", removed, "c", int(batch.cleared))
        commands += self._stamp(batch.incarnation, batch.sequence, checksum)
        commands += self._live_on(batch.incarnation)
        commands.append(self._append(batch.incarnation, batch.sequence, *fields))
        answers = await self.send(*commands, atomic=True)
        self.streams.appended(answers[-1])

    async def publish_snapshot(self, snapshot: Snapshot, checksum: int) -> None:
        """Replace the worker's whole set and let readers read it again."""
        await self._replace(
            snapshot,
            *self._stamp(snapshot.incarnation, snapshot.sequence, checksum),
            self._append(snapshot.incarnation, snapshot.sequence, "k", "s"),
        )

    async def fold(self, snapshot: Snapshot) -> None:
        """Replace set and log by one set with the same blocks; readers need not notice."""
        await self._replace(snapshot)

    async def _replace(self, snapshot: Snapshot, *commands: Command) -> None:
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
            await self.send(("UNLINK", scratch))
            for begin in range(0, len(packed), chunk_bytes):
                value = packed[begin : begin + chunk_bytes]
                await self.send(("RPUSH", scratch, value), ("PEXPIRE", scratch, ttl_ms))
            swap = [("RENAME", scratch, blocks_key), ("UNLINK", log_key)]
        await self.send(*swap, *commands, atomic=True)

    async def refresh(self, incarnation: bytes) -> tuple[int, int, int, int] | None:
        """Refresh an incarnation's keys.

        Returns:
            (sequence, checksum, values of its set, batches in its log) in Redis, or None.
        """
        blocks_key, log_key, mark_key = self._kv_keys(incarnation)
        keys = (mark_key, blocks_key, log_key, self.key("kv:live"), self.streams.key(incarnation))
        stream_bytes = event_streams.STREAM_BYTES
        # A script: eight commands would take a worker three times as long.
        ((mark, values, batches),) = await self.send(
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
        await self.send(
            ("UNLINK", blocks_key, blocks_key + b":new", log_key, mark_key),
            ("ZREM", self.key("kv:live"), incarnation),
            self._append(incarnation, 0, "k", "f"),
            atomic=True,
        )

    # --- KV events: the reading side -------------------------------------------------------------

    async def refreshes(self) -> dict[bytes, bytes]:
        """Return the last refresh of each incarnation in the index, by its own clock."""
        (flat,) = await self.send(("ZRANGE", self.key("kv:live"), 0, -1, "WITHSCORES"))
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return {life: at for life, at in pairs if len(life) == INCARNATION_BYTES}

    async def marks(
        self, incarnations: Collection[bytes]
    ) -> AsyncIterator[dict[bytes, tuple[int, int]]]:
        """Yield (sequence, checksum) of every incarnation in the index, in slices.

        Removes expired incarnations from the list. Expiry is by Redis' own clock, so that a host
        with a wrong clock removes none.
        """
        for part in slices(list(incarnations)):
            (marks,) = await self.send(("MGET", *(self._kv_keys(life)[-1] for life in part)))
            expired = [life for life, mark in zip(part, marks, strict=True) if mark is None]
            if expired:
                await self.send(("ZREM", self.key("kv:live"), *expired))
            pairs = zip(part, map(parse_mark, marks), strict=True)
            yield {bytes(life): mark for life, mark in pairs if mark is not None}

    async def snapshot(self, incarnation: bytes) -> tuple[Snapshot, int] | None:
        """Return an incarnation's set and checksum; None if it is missing or damaged."""
        blocks_key, log_key, mark_key = self._kv_keys(incarnation)
        lists = [("LRANGE", key, 0, -1) for key in (blocks_key, log_key)]
        mark, values, log = await self.send(("GET", mark_key), *lists, atomic=True)
        known = parse_mark(mark)
        packed = with_log(b"".join(values), log)
        if known is None or len(packed) % HASH_BYTES:
            return None
        return Snapshot(incarnation=incarnation, sequence=known[0], packed=packed), known[1]

    async def stream_tops(self) -> dict[bytes, bytes]:
        """Return the id of the newest entry of each stream; ``0-0`` if there is none."""
        return self.streams.top_positions(await self.send(*self.streams.tops()))

    async def read_streams(
        self, after: Mapping[bytes, bytes], count: int, wait_s: float = 0.0
    ) -> tuple[dict[bytes, bytes], list[dict[bytes, bytes]]]:
        """Return the new positions and up to ``count`` unparsed entries of each stream.

        Waits up to ``wait_s`` (below 3 s) for the first entry.
        """
        (answer,) = await self.send(self.streams.read(after, count, wait_s))
        positions = dict(after)
        batches = list[dict[bytes, bytes]]()
        for key, entries in answer or ():
            positions[bytes(key)] = bytes(entries[-1][0])
            batches += (fields for _, fields in entries)
        return positions, batches

    # --- plumbing --------------------------------------------------------------------------------

    def key(self, *parts: str) -> bytes:
        """Return a key of this fleet."""
        return (self._prefix + ":".join(parts)).encode()

    def _kv_keys(self, incarnation: bytes) -> tuple[bytes, bytes, bytes]:
        stem = self.key("kv", incarnation.hex())
        return stem + b":blocks", stem + b":log", stem + b":mark"

    def _stamp(self, incarnation: bytes, sequence: int, checksum: int) -> list[Command]:
        mark_key = self._kv_keys(incarnation)[-1]
        return [
            ("SET", mark_key, f"{sequence} {checksum}", "PX", int(KV_TTL_S * 1000)),
            ("ZADD", self.key("kv:live"), _now_ms(), incarnation),
        ]

    def _append(self, incarnation: bytes, sequence: int, *fields: Any) -> Command:
        return self.streams.append(incarnation, "n", sequence, *fields)

    async def send(self, *commands: Command, atomic: bool = False) -> Sequence[Any]:
        """Send commands in one round trip; with ``atomic`` in MULTI/EXEC.

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
            # uvloop reports a closed connection by a RuntimeError, which redis-py passes on.
            self.connected = False
            self.errors += 1
            if isinstance(error, _WRONG_SERVER) or any(code in str(error) for code in _CODES):
                await reconnect(self._redis)
            raise RegistryUnavailableError(f"Redis: {error}") from error
        self.connected = True
        return answers


def slices(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Yield slices that are small enough not to block the event loop for long."""
    return (items[at : at + _SLICE] for at in range(0, len(items), _SLICE))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
