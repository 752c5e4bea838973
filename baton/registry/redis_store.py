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
    routes                names, golden prompts of models     see shared_tables.py
    gate:…                evidence about a canary             see gates.py
    tickets               the last ticket that a router took               1 day
    routers               hash: router -> its load                         1 minute
    prompts               stream of long prompts of routers                1 minute, 128 entries
    responses:…           responses that clients asked to store            see stored_responses.py
    birth                 random; it changes when Redis restarts empty

Only commands of Redis 6.2 are used. Redis is never on a request's path, so every call may fail with
``RegistryUnavailableError``, and callers continue without it.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    ReadOnlyError,
    RedisError,
)

from baton.registry.connection import Command, RedisUrlError, RoundTrips, reconnect
from baton.registry.types import TIERS, WorkerRecord, tier_incarnation
from baton.registry.worker_blocks import WorkerBlocks, slices
from baton.types.lanes import whole_fleet

SLOT_TTL_S = 60.0
WORKER_TTL_S = 10.0
TICKETS_TTL_S = 24 * 3600
CHANGES_TTL_S = 24 * 3600

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

_LOG = logging.getLogger(__name__)
_Value = TypeVar("_Value")


class RegistryUnavailableError(ConnectionError):
    """Redis did not answer, or refused; the call may or may not have taken effect."""


class Registry:
    """Connection to the registry of one fleet. Connects at the first call.

    ``shared`` is a connection of several registries, which ``close`` leaves open.

    Raises:
        RedisUrlError: The URL cannot be used.
    """

    def __init__(self, url: str, fleet: str, shared: RoundTrips | None = None) -> None:
        self._is_shared = shared is not None
        self._round_trips = shared or RoundTrips(url)
        self._skipped: dict[str, str] = {}
        self._read: dict[str, dict[str, tuple[bytes, WorkerRecord]]] = {"slot": {}, "worker": {}}
        self.on_skipped: Callable[[str], None] = lambda _: None
        self._prefix = f"baton:{{{fleet}}}:"  # the braces keep a fleet on one cluster node
        self.blocks = WorkerBlocks(self.key, self.send)
        self.fleet = fleet
        self.connected = False  # True if Redis answered the last call
        self.errors = 0  # failed calls

    def of_whole_fleet(self) -> "Registry":
        """Return the registry of the fleet that a lane belongs to, over the same connections.

        It holds what lanes share: tenants, usage and the audit log.
        """
        return self.of_lane(whole_fleet(self.fleet))

    def of_lane(self, fleet: str) -> "Registry":
        """Return the registry of a lane, ``FLEET.LANE``, over the same connections."""
        return self if fleet == self.fleet else Registry("", fleet, self._round_trips)

    async def close(self) -> None:
        """Close all connections to Redis, unless they are shared."""
        if not self._is_shared:
            await self._round_trips.close()

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

    async def register(self, record: WorkerRecord) -> None:
        """Write a worker's new or changed record; it expires in 10 s unless refreshed."""
        await self.send(*self._put("worker", record, WORKER_TTL_S), *self._changed())

    async def heartbeat(self, record: WorkerRecord) -> None:
        """Refresh the whole record, so that an emptied Redis heals by itself."""
        await self.send(*self._put("worker", record, WORKER_TTL_S))

    async def deregister(self, record: WorkerRecord) -> None:
        """Remove a worker: its record, and all its blocks in the index."""
        await self.send(("DEL", self.key("worker", record.worker_id)), *self._changed())
        await self.blocks.forget(record.incarnation)
        for tier in TIERS if record.incarnation else ():
            await self.blocks.forget(tier_incarnation(record.incarnation, tier))

    async def write_slots(self, records: Sequence[WorkerRecord]) -> None:
        """Write the controller's records of slots (starting, draining, dead) in one round trip."""
        if records:
            puts = (put for record in records for put in self._put("slot", record, SLOT_TTL_S))
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

    def decoded(
        self,
        name: str,
        raw: bytes | None,
        kind: type[_Value],
        decode: Callable[..., _Value] = msgspec.msgpack.decode,
    ) -> _Value | None:
        """Return a value of Redis; None without one, or if it is unreadable, which is reported."""
        if raw is None:
            return None
        try:
            return decode(raw, type=kind)
        except msgspec.DecodeError as error:  # another version, or damaged
            self.skip(name, str(error))
            return None

    def skip(self, name: str, reason: str) -> None:
        """Log and report an unreadable record, once per name and reason."""
        if self._skipped.get(name) != reason:
            self._skipped[name] = reason
            _LOG.warning("skipping registry record %r: %s", name, reason)
            self.on_skipped(name)

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

    def key(self, *parts: str) -> bytes:
        """Return a key of this fleet."""
        return (self._prefix + ":".join(parts)).encode()

    async def send(self, *commands: Command, atomic: bool = False) -> Sequence[Any]:
        """Send commands in one round trip; with ``atomic`` in MULTI/EXEC.

        Raises:
            RegistryUnavailableError: Redis did not answer, or refused.
        """
        try:
            answers = await self._round_trips.send(commands, atomic=atomic)
        except (TimeoutError, RedisError, OSError, RedisUrlError, RuntimeError) as error:
            # uvloop reports a closed connection by a RuntimeError, which redis-py passes on.
            self.connected = False
            self.errors += 1
            if isinstance(error, _WRONG_SERVER) or any(code in str(error) for code in _CODES):
                await reconnect(self._round_trips.client)
            raise RegistryUnavailableError(f"Redis: {str(error) or 'no answer'}") from error
        self.connected = True
        return answers
