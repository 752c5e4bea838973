"""Workers in the registry: heartbeats of a worker, and the list of workers for routers."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec

from baton.registry.connection import RedisUrlError, next_beat_s
from baton.registry.json_file import keep, kept
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import Role, WorkerRecord, WorkerState
from baton.telemetry.tasks import BackgroundTasks

_LOG = logging.getLogger(__name__)
_LAST_HEARTBEAT_S = 1.0

HEARTBEAT_S = 1.0
POLL_S = 0.25
WHOLE_S = 4.0  # the list is read at least this often
FORGET_AFTER_S = 10.0  # of absence while Redis answers; deaths are reported as state `dead`
REFILL_S = 60.0  # time for the workers to fill an emptied Redis again


class Presence:
    """Keeps a worker's record in Redis fresh, in the background. Never raises because of Redis.

    ``count_failure`` receives the name of a background task that raised.
    """

    def __init__(
        self,
        registry: Registry,
        record: WorkerRecord,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._tasks = BackgroundTasks("presence", count_failure)
        self._changed = asyncio.Event()
        self._stopping = False
        self.record = record
        self.connected = False

    def start(self) -> None:
        """Start refreshing. Needs a running event loop."""
        self._tasks.keep(self._run, "presence")

    def update(self, state: WorkerState, reason: str = "") -> None:
        """Change the state; it is written at once, or when Redis is back."""
        self.record = msgspec.structs.replace(self.record, state=state, reason=reason)
        self._changed.set()

    def change_role(self, role: Role, number: int) -> None:
        """Change the role, as ``update`` changes the state."""
        self.record = msgspec.structs.replace(self.record, role=role, turn=number)
        self._changed.set()

    async def stop(self) -> None:
        """Stop refreshing and take the worker out of the registry and the index."""
        # Not cancelled in the middle of a heartbeat: it could reach Redis after `deregister`.
        self._stopping = True
        self._changed.set()
        await self._tasks.settle(_LAST_HEARTBEAT_S)
        await self._tasks.close()
        with contextlib.suppress(RegistryUnavailableError):
            await self._registry.deregister(self.record)

    async def _run(self) -> None:
        written: WorkerRecord | None = None
        while not self._stopping:
            self._changed.clear()
            record = self.record
            try:
                if record is written:
                    await self._registry.heartbeat(record)
                else:
                    await self._registry.register(record)
                self.connected = True
                written = record
            except RegistryUnavailableError as error:
                if self.connected:
                    _LOG.warning("serving without the registry: %s", error)
                self.connected = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_beat_s(HEARTBEAT_S)):
                    await self._changed.wait()


async def was_replaced(url: str, fleet: str, worker_id: str, epoch: int) -> bool | None:
    """Return whether the controller has replaced an incarnation; None if that is unknown."""
    try:
        registry = Registry(url, fleet)
    except RedisUrlError:  # such as a password's file that is being replaced
        return None
    try:
        (raw,) = await registry.send(("GET", registry.key("slot", worker_id)))
        slot = msgspec.msgpack.decode(raw, type=WorkerRecord) if raw is not None else None
    except (RegistryUnavailableError, msgspec.DecodeError):
        return None
    finally:
        await registry.close()
    if slot is None or slot.epoch < epoch:  # expired, or left over
        return None
    return slot.epoch > epoch or slot.state == "dead"


class WorkerChange(msgspec.Struct, frozen=True):
    """Change of one slot's record; ``after`` is None when the slot left the list."""

    worker_id: str
    before: WorkerRecord | None
    after: WorkerRecord | None


def merged(
    slots: Mapping[str, WorkerRecord], workers: Mapping[str, WorkerRecord]
) -> dict[str, WorkerRecord]:
    """Merge the records of the controller and of the workers into one per slot.

    The later life wins. Within one life the worker has its addresses, and the controller has
    drains and deaths. The role is that of the later turn in either record, the intent is the
    controller's.
    """
    result: dict[str, WorkerRecord] = {}
    for worker_id in slots.keys() | workers.keys():
        slot = slots.get(worker_id)
        worker = workers.get(worker_id)
        if slot is None or worker is None:
            record = worker or slot
        elif slot.epoch != worker.epoch:
            record = max(slot, worker, key=lambda record: record.epoch)
        elif slot.state in ("dead", "draining"):
            record = msgspec.structs.replace(worker, state=slot.state, reason=slot.reason)
        else:
            record = worker
        if slot is not None and record is not None and slot.turn > record.turn:
            record = msgspec.structs.replace(record, role=slot.role, turn=slot.turn)
        if slot is not None and record is not None and slot.intent != record.intent:
            record = msgspec.structs.replace(record, intent=slot.intent)
        if record is not None:
            result[worker_id] = record
    return result


class RegistryWatcher:
    """List of workers, for a router: ``async for change in watcher``.

    While Redis is unreachable the list does not change. An emptied Redis has a minute to be filled
    by the workers before any is removed. With the JSON file ``last_known``, the list survives a
    restart of the router without Redis.
    """

    def __init__(self, registry: Registry, last_known: Path | None = None) -> None:
        self._registry = registry
        self._file = last_known
        self._missing_since_s: dict[str, float] = {}
        self._birth: bytes | None = None  # id of the last known life of Redis
        self._changes: bytes | None = None
        self._whole_s = 0.0  # time of the next full read
        self._refilled_s = 0.0  # until then an emptied Redis is being filled
        self._pending: deque[WorkerChange] = deque()
        self.workers: dict[str, WorkerRecord] = {}
        self.connected = False

    @property
    def known(self) -> bool:
        """True if a list was read, or loaded from the file."""
        return self.connected or bool(self.workers)

    async def __aiter__(self) -> AsyncIterator[WorkerChange]:
        while True:
            self._pending += await self.poll()
            while self._pending:  # kept for a reader that returns after an error of its own
                yield self._pending.popleft()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> list[WorkerChange]:
        """Return the changes since the last call. Never raises because of Redis."""
        try:
            birth, changes = await self._registry.state()
            now_s = time.monotonic()
            changed = (birth, changes) != (self._birth, self._changes)
            if self.connected and not (changed or self._missing_since_s or now_s >= self._whole_s):
                return []
            listed = merged(*await self._registry.records())
        except RegistryUnavailableError as error:
            if self.connected:
                _LOG.warning("using the last known workers, registry unreachable: %s", error)
            self.connected = False
            self._missing_since_s.clear()
            last_known = self.workers or kept(self._file, dict[str, WorkerRecord]) or {}
            return self._apply(last_known)
        self.connected = True
        self._changes = changes
        self._whole_s = now_s + WHOLE_S
        if self._birth is not None and birth != self._birth:
            self._refilled_s = now_s + REFILL_S
        self._birth = birth
        return self._apply(self._with_missing(listed, now_s))

    def _with_missing(
        self, listed: dict[str, WorkerRecord], now_s: float
    ) -> dict[str, WorkerRecord]:
        """Return ``listed``, plus known workers that are missing only for a short time."""
        result = dict(listed)
        for worker_id, record in self.workers.items():
            if worker_id in listed:
                self._missing_since_s.pop(worker_id, None)
            elif now_s < max(
                self._missing_since_s.setdefault(worker_id, now_s) + FORGET_AFTER_S,
                self._refilled_s,
            ):
                result[worker_id] = record
            else:
                del self._missing_since_s[worker_id]
        return result

    def _apply(self, now: dict[str, WorkerRecord]) -> list[WorkerChange]:
        before = self.workers
        self.workers = now
        changes = []
        for worker_id in sorted(before.keys() | now.keys()):
            was = before.get(worker_id)
            is_now = now.get(worker_id)
            if was is not is_now and was != is_now:  # an unchanged one is mostly the same object
                changes.append(WorkerChange(worker_id, was, is_now))
        if changes:
            keep(self._file, self.workers)
        return changes
