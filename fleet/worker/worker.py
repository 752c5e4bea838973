"""A worker: an engine process, the prefill and the decode service, and a registry record.

Only routers use the role. Every worker has both services, so a fleet with one pool works too. This
module does not need Ray; ``fleet.pools.ray_worker`` hosts a ``Worker`` in an actor.
"""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc.aio
import msgspec

from baton.engine.parent import die_with_parent
from baton.engine.process.handle import EngineHandle
from baton.planner.state import WorkerState, state_of
from baton.registry.connection import RoundTrips, beat
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import Role, WorkerRecord
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.logs import set_up_logs
from baton.telemetry.metric_export import MetricExport
from baton.telemetry.metrics import Metrics
from baton.telemetry.process_memory import WORKER_OBJECTS, collect_rarely, keep_message_memory
from baton.telemetry.tasks import BackgroundTasks
from baton.tenants.erasures import Erasures
from baton.tenants.usage.worker_time import WorkerTime
from baton.types import events as ev
from baton.types.errors import UnavailableError
from baton.wire.process_end import exit_process
from decode_worker.service import DecodeService
from fleet.worker.engine_metrics import EngineMetrics
from fleet.worker.identity import identity_of, record_of
from fleet.worker.probe import EngineProbe, sleep_when_idle
from fleet.worker.settings import PROBE_S, WorkerSettings
from fleet.worker.start import (
    Publishers,
    StartEngine,
    check_worker_trust,
    failure_counter,
    make_publishers,
    open_context,
    start_engine,
    start_servers,
    start_services,
)
from kvtransfer.rank_pools import RankPools
from prefill_worker.service import PrefillService

_LOG = logging.getLogger(__name__)

DRAIN_S = 30.0
"""Time after a signal for other workers to resume the requests that run here."""

GIVES_S = 0.5
"""Time that workers which resume requests have to pull KV from the cache here."""

_POLL_S = 0.05
MANY_QUARANTINED = 0.05  # of the blocks of a pool
MANY_QUARANTINED_NS = 3_000_000_000  # limit with more than these
QUARANTINED_NS = 30_000_000_000
_ERASE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    engine: EngineHandle
    metrics: Metrics
    server: grpc.aio.Server
    decode: DecodeService
    prefill: PrefillService
    publishers: Publishers
    registry: Registry
    time: WorkerTime


class Worker:
    """A running worker, made by ``start``."""

    def __init__(self, settings: WorkerSettings, parts: _Parts, undo: AsyncExitStack) -> None:
        self._settings = settings
        self._parts = parts
        self._undo = undo
        self._closed = asyncio.Event()
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._engine_metrics = EngineMetrics(
            parts.engine, parts.metrics, settings.engine.max_adapters
        )
        parts.engine.on_cache_changed = self._on_cache_changed
        parts.metrics.before_page.append(self._show_registry)
        self._tasks = BackgroundTasks("worker", failure_counter(parts.metrics))
        self._vital(ALIVE.run(), "alive clock")
        self._tasks.keep(MetricExport(parts.metrics).run, "metrics export")
        self._vital(parts.decode.tick_forever(), "decode tick")
        self._vital(parts.prefill.watch_leases(), "prefill leases")
        self._vital(self._watch_engine(), "engine")
        self._vital(self._watch_quarantine(), "quarantine")
        erasures = Erasures(parts.registry.of_whole_fleet())
        earlier = not settings.label  # an attached server's whole cache would be reset
        erasing = erase_forever(parts.engine, erasures, settings.worker_id, earlier=earlier)
        self._vital(erasing, "erasure")
        probe = _probe(settings, parts.engine)
        if settings.probe_s:
            self._vital(self._watch_probe(probe), "probe")
        if settings.idle_sleep_s:
            rest = sleep_when_idle(parts.engine, probe, settings.idle_sleep_s, parts.metrics)
            self._vital(rest, "sleep")

    @classmethod
    async def start(
        cls,
        settings: WorkerSettings,
        start_engine: StartEngine = start_engine,
        on_progress: Callable[[str], None] = lambda _: None,
        redis: RoundTrips | None = None,
    ) -> "Worker":
        """Load the model, start serving, and register. A failure or cancellation cleans up.

        ``start_engine`` starts the engine, or connects to it; ``on_progress`` gets what it does.
        ``redis`` is the connection of a process with several workers.

        Raises:
            InternalError: The engine did not start, or the worker may not listen.
            ModelError: The model does not meet the gates of the fleet file.
            SecretError, CertificateError: The token's or a certificate's file cannot be used.
        """
        keep_message_memory()
        async with AsyncExitStack() as stack:
            context = open_context(settings, stack, on_progress, redis)
            await asyncio.to_thread(check_worker_trust, settings)
            engine = await start_engine(context, stack)
            server, address, metrics_address = await start_servers(context, stack)
            ready = engine.client.ready
            identity = identity_of(settings, ready, address)
            pool = RankPools(engine.client.pools, engine.client.pool_geometry)
            decode, prefill = await start_services(context, engine, pool, identity, server, stack)
            record = record_of(settings, identity, ready, metrics_address)
            publishers = make_publishers(context, identity, record, stack)
            stack.push_async_callback(server.stop, None)
            if not settings.label:  # the process of attached servers has many, and many streams
                collect_rarely(WORKER_OBJECTS)
            await server.start()
            publishers.start()
            parts = _Parts(
                engine=engine,
                metrics=context.metrics,
                server=server,
                decode=decode,
                prefill=prefill,
                publishers=publishers,
                registry=context.registry,
                time=context.time,
            )
            return cls(settings, parts, stack.pop_all())

    @property
    def record(self) -> WorkerRecord:
        """The worker's record in the registry."""
        return self._parts.publishers.presence.record

    def load(self) -> WorkerState:
        """Return the speed and the load, for the planner of roles."""
        max_streams = self._settings.engine.max_batch_requests
        status = self._parts.decode.status()
        return state_of(self.record.worker_id, self.record.role, status, max_streams)

    def _vital(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task until the worker stops; if the task raises, the worker fails."""

        def broke(error: Exception) -> None:
            self._tasks.spawn(self._fail(f"{type(error).__name__}: {error}", 1), "fail")

        self._tasks.vital(work, name, broke)

    def _on_cache_changed(self, change: ev.CacheChanged) -> None:
        publisher = self._parts.publishers.pool
        publisher.publish(list(change.stored), list(change.removed))
        for below in change.tiers:
            tier = self._parts.publishers.tiers[below.tier]
            tier.publish(list(below.stored), list(below.removed))
        self._parts.decode.event_sequence = publisher.sequence
        self._engine_metrics.note_cache(change)

    async def wait(self) -> int:
        """Wait for the end of the worker, and return its exit code: 0 after ``stop``."""
        return await asyncio.shield(self._done)

    async def closed(self) -> None:
        """Wait until this process has released all resources of the worker."""
        await self._closed.wait()

    async def drain(self, timeout_s: float = DRAIN_S, hurried: asyncio.Event | None = None) -> bool:
        """Accept no new requests, and wait until other workers have resumed the running ones.

        Requests that are left after ``timeout_s`` are cancelled. Returns whether none was left.
        """
        decode = self._parts.decode
        prefill = self._parts.prefill
        decode.drain()
        prefill.draining = True
        self._parts.publishers.presence.update("draining")
        is_empty = await drained(
            lambda: bool(decode.live_requests or prefill.open_handoffs), timeout_s, hurried
        )
        if not is_empty:
            decode.cancel_all(UnavailableError("the worker is shutting down"))
            await asyncio.sleep(0.2)
        return is_empty

    async def change_role(self, role: Role, number: int) -> None:
        """Take another role. What runs stays, and so does the cache.

        Prompts that wait here go to other workers if this one decodes from now on.
        """
        self._parts.publishers.presence.change_role(role, number)
        self._parts.time.change_role(role)
        if role == "decode":
            self._parts.prefill.withdraw()

    async def stop(self) -> None:
        """Remove the worker from the registry and end all of its processes."""
        await self._leave(0)

    async def _leave(self, code: int) -> None:
        if self._done.done():
            return
        self._done.set_result(code)
        await self._tasks.close()
        await self._parts.server.stop(0.2 if code == 0 else None)
        await self._parts.decode.close()
        await self._parts.prefill.close()
        await self._undo.aclose()
        if not self._settings.label:
            gc.unfreeze()  # see `collect_rarely`: this worker's objects are garbage now
        self._closed.set()

    async def _fail(self, why: str, code: int) -> None:
        """Fail as a whole: broken streams show routers and decode workers that it is gone."""
        _LOG.error("stopping worker=%s: %s", self._settings.worker_id, why)
        await self._leave(code)

    async def _watch_engine(self) -> None:
        client = self._parts.engine.client
        code = await client.exited
        await self._fail(client.fatal or f"the engine process exited with code {code}", code or 1)

    def _show_registry(self) -> None:
        metrics = self._parts.metrics
        registry = self._parts.registry
        metrics.set("baton_registry_connected", registry.connected)
        metrics.count_up("baton_registry_errors", registry.errors)
        metrics.count_up("baton_kv_snapshots", self._parts.publishers.pool.snapshots)

    async def _watch_probe(self, probe: EngineProbe) -> None:
        await self._fail(await probe.run(), 1)

    async def _watch_quarantine(self) -> None:
        """Fail if blocks stay in quarantine, which costs capacity until a restart."""
        watch = QuarantineWatch()
        while True:
            await asyncio.sleep(0.5)
            load = self._parts.engine.load
            if watch.stuck(load, ALIVE.now_ns()):
                self._parts.metrics.inc("baton_quarantines")
                await self._fail(f"{load.blocks.quarantined} KV blocks are stuck in quarantine", 1)
                return


def _probe(settings: WorkerSettings, engine: EngineHandle) -> EngineProbe:
    interval_s = settings.probe_s or PROBE_S
    return EngineProbe(
        engine=engine,
        interval_s=interval_s,
        # the steps of an external engine are seen by their tokens only
        limit_s=interval_s if settings.engine.external is None else 3 * interval_s,
        exact=settings.engine.numerics == "exact",
        counts_errors=bool(settings.server),
    )


class QuarantineWatch:
    """Clock of the oldest reservation in quarantine, whose blocks a restart frees. Does no I/O.

    Blocks of a revoked reservation stay in quarantine until no writer is left. That is normal under
    load; a reservation that never drains is a fault.
    """

    def __init__(self) -> None:
        self._oldest = 0
        self._since_ns = 0

    def stuck(self, load: ev.StepDone, now_ns: int) -> bool:
        """Return whether a reservation has drained for too long. Call it several times a second."""
        if load.oldest_quarantine != self._oldest:
            self._oldest = load.oldest_quarantine
            self._since_ns = now_ns
        if not self._oldest:
            return False
        many = load.blocks.quarantined > MANY_QUARANTINED * load.blocks.total
        return now_ns - self._since_ns > (MANY_QUARANTINED_NS if many else QUARANTINED_NS)


async def drained(
    busy: Callable[[], bool], timeout_s: float, hurried: asyncio.Event | None = None
) -> bool:
    """Wait until the worker is idle, and ``GIVES_S`` longer if it was busy at the start.

    Returns whether it is idle; the event ``hurried`` ends the wait early.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    idle_from_s = loop.time()
    while True:
        left = busy()
        now_s = loop.time()
        if now_s >= until_s or (hurried is not None and hurried.is_set()):
            return not left
        if left:
            idle_from_s = now_s + GIVES_S
        elif now_s >= idle_from_s:
            return True
        await asyncio.sleep(_POLL_S)


async def erase_forever(
    engine: EngineHandle, erasures: Erasures, worker_id: str, *, earlier: bool = True
) -> None:
    """Erase the blocks of deleted tenants from pool and tiers, and report their number to Redis.

    At the start it reads the tags of all deleted tenants, since files of the disk tier may be older
    than a deletion. Without ``earlier``, only those of tenants that are deleted from now on.
    """
    done: set[str] | None = set() if earlier else None
    unreported: dict[str, dict[str, int]] = {}
    while True:
        try:
            tags = (await erasures.forgotten()).tags
            if done is None:
                done = set(tags)
            new = {tag: deletion for tag, deletion in tags.items() if tag not in done}
            for deletion in dict.fromkeys(new.values()):
                mine = frozenset(bytes.fromhex(tag) for tag in new if new[tag] == deletion)
                unreported[deletion] = counts = await engine.forget(mine)
                if any(counts.values()):
                    _LOG.info("erased KV of a deleted tenant deletion=%s: %s", deletion, counts)
                done.update(tag for tag in new if new[tag] == deletion)
            for deletion in list(unreported):
                await erasures.report(deletion, worker_id, unreported[deletion])
                del unreported[deletion]
        except RegistryUnavailableError:
            pass  # the registry counts it
        await beat(_ERASE_EVERY_S)


async def serve(settings: WorkerSettings) -> int:
    """Run one worker in this process, without Ray, and return its exit code.

    A ready worker prints its record to standard output as one line of JSON. After a first signal it
    drains: other workers resume its requests, then it exits with code 0. A second signal, or
    ``DRAIN_S``, ends it with requests left, and code 1.
    """
    loop = asyncio.get_running_loop()
    worker = None
    stop_requested = asyncio.timeout(None)
    hurried = asyncio.Event()

    def stop() -> None:
        if not stop_requested.expired():
            stop_requested.reschedule(loop.time())
        else:
            hurried.set()

    try:
        async with stop_requested:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop)
            worker = await Worker.start(settings)
            sys.stdout.write(msgspec.json.encode(worker.record).decode() + "\n")
            sys.stdout.flush()
            return await worker.wait()
    except TimeoutError:
        if not stop_requested.expired():
            raise
    if worker is None:
        return 0
    emptied = await worker.drain(DRAIN_S, hurried)
    await worker.stop()
    return await worker.wait() or int(not emptied)


def main() -> None:
    """Run this module with settings, secrets included, as JSON on standard input."""
    die_with_parent()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSettings)
    named = {"fleet": settings.fleet, "worker": settings.worker_id}
    set_up_logs(settings.log_format, fields=named)
    exit_process(asyncio.run(serve(settings)))


if __name__ == "__main__":
    main()
