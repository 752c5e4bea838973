"""One worker: an engine process, both services around it, and its place in the registry.

The role is only what the router uses the worker for; every worker hosts both services, so a fleet
of one pool serves too. Ray is not needed here: ``fleet.pools.ray_worker`` puts a ``Worker`` into
an actor.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import grpc.aio
import msgspec
from batonpb import common_pb2, decode_pb2_grpc, prefill_pb2_grpc

from baton.engine.emulated_timing import TIMINGS
from baton.engine.parent import die_with_parent
from baton.engine.process.handle import EngineHandle
from baton.registry.kv_events import KvEventPublisher
from baton.registry.redis_store import Registry
from baton.registry.types import WorkerRecord, tier_incarnation
from baton.registry.workers import Presence
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.logs import set_up_logs
from baton.telemetry.metrics import Metrics, serve_metrics
from baton.telemetry.tasks import BackgroundTasks
from baton.telemetry.tracing import Tracing
from baton.types import events as ev
from baton.types.errors import UnavailableError
from baton.wire.fleet_token import FleetToken, TokenInterceptor
from baton.wire.grpc_options import WORKER_OPTIONS, listen
from baton.wire.message_memory import keep_message_memory
from decode_worker.pacing import ReceivePacer
from decode_worker.parts import WorkerParts
from decode_worker.peers import Peers
from decode_worker.prefix_pull import PrefixPuller
from decode_worker.service import DecodeService
from fleet.canary import Canary
from fleet.draining import drained
from fleet.engine_metrics import EngineMetrics
from fleet.ports import free_port, kv_listener
from fleet.private_logs import open_log
from fleet.quarantine_watch import QuarantineWatch
from fleet.rank_links import open_links, serve_links
from fleet.worker_identity import capabilities_of, identity_of, record_of
from fleet.worker_settings import WorkerSettings
from kvtransfer.fault_injection import FrameTamperer
from kvtransfer.ranks.link import RankLink
from kvtransfer.ranks.pools import RankPools
from kvtransfer.transport import ServingSide
from kvtransfer.transports import servers
from prefill_worker.service import PrefillService
from router.memory import collect_rarely

_LOG = logging.getLogger(__name__)

DRAIN_S = 30.0
"""For others to go on with what runs here, after a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a worker is made of, all of it running."""

    engine: EngineHandle
    metrics: Metrics
    server: grpc.aio.Server
    decode: DecodeService
    prefill: PrefillService
    publisher: KvEventPublisher
    tier_publishers: Mapping[str, KvEventPublisher]
    presence: Presence
    registry: Registry
    links: Sequence[RankLink]


class Worker:
    """See the module. ``start`` makes one.

    Args:
        settings: Of this worker.
        parts: What it is made of.
        undo: Ends them.
    """

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
        self._tasks = BackgroundTasks("worker", _failure_counter(parts.metrics))
        self._vital(ALIVE.run(), "alive clock")
        self._vital(parts.decode.tick_forever(), "decode tick")
        self._vital(parts.prefill.watch_leases(), "prefill leases")
        self._vital(self._watch_engine(), "engine")
        self._vital(self._watch_quarantine(), "quarantine")
        for link in parts.links:
            self._vital(self._watch_rank(link), "rank")
        if settings.canary_s:
            self._vital(self._watch_canary(), "canary")

    @classmethod
    async def start(cls, settings: WorkerSettings) -> "Worker":
        """Load the model, serve, register.

        Whatever else ends this, a cancellation too, leaves nothing behind.

        Raises:
            InternalError: The engine could not start, or the worker may not listen; the message
                says why.
            SecretError, CertificateError: A file of its settings cannot be used.
        """
        keep_message_memory()
        token = settings.token()
        tls = settings.credentials()
        async with AsyncExitStack() as undo:
            stderr = _open_log(settings)
            if stderr is not None:
                undo.callback(stderr.close)
            tracing = Tracing("worker")
            undo.callback(tracing.shutdown)
            metrics = Metrics("worker", model=settings.served_model_name)
            registry = Registry(settings.redis_url, settings.fleet)
            undo.push_async_callback(registry.close)
            links, engine_settings = await open_links(
                settings, token, partial(_note_sent, metrics), undo
            )
            engine = await EngineHandle.start(
                engine_settings, _LOG.info, stderr, _failure_counter(metrics)
            )
            undo.push_async_callback(engine.client.stop)
            metrics.set("baton_model_load_seconds", engine.client.ready.load_s)
            _say_what_computes(settings, metrics)
            metrics_server = await serve_metrics(
                metrics,
                settings.host,
                free_port(settings.host, settings.ports),
                tls.page_context() if tls is not None else None,
            )
            undo.push_async_callback(metrics_server.close)

            server = grpc.aio.server(
                interceptors=[TokenInterceptor(token)],
                options=[*WORKER_OPTIONS, ("grpc.so_reuseport", 0)],
            )
            free = free_port(settings.host, settings.ports)
            port = listen(server, f"{settings.host}:{free}", tls)
            identity = identity_of(settings, engine.client.ready, f"{settings.host}:{port}")
            unsigned = settings.unsigned_pulls
            await serve_links(links, engine.client.ready, identity.incarnation, unsigned)
            pool = RankPools(engine.client.pools, engine.client.ready.geometry, links)
            side = ServingSide(
                server,
                token,
                identity.incarnation,
                engine.client.pool_fd,
                _kv_listener(settings, undo),
            )
            senders = servers(side, settings.transports)
            capabilities = capabilities_of(settings, engine.client.ready, senders, pool)
            peers = Peers(capabilities, token, tls)
            undo.push_async_callback(peers.close)
            decode, prefill = _services(
                settings, engine, pool, peers, identity, capabilities, metrics, tracing, token
            )
            decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)
            prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server)
            for sender in senders:
                await sender.start(prefill.source)
                undo.push_async_callback(sender.close)

            count = _failure_counter(metrics)
            publisher = KvEventPublisher(registry, identity.incarnation, count)
            tier_publishers = {
                tier: KvEventPublisher(
                    registry, tier_incarnation(identity.incarnation, tier), count
                )
                for tier in settings.engine.kv_tiers.names
            }
            for one in (publisher, *tier_publishers.values()):
                undo.push_async_callback(one.stop)
            record = record_of(
                settings, identity, engine.client.ready, links, metrics_server.address
            )
            presence = Presence(registry, record, count)
            undo.push_async_callback(presence.stop)
            undo.push_async_callback(server.stop, None)
            collect_rarely()
            await server.start()
            for one in (publisher, *tier_publishers.values()):
                one.start()
            presence.start()
            parts = _Parts(
                engine=engine,
                metrics=metrics,
                server=server,
                decode=decode,
                prefill=prefill,
                publisher=publisher,
                tier_publishers=tier_publishers,
                presence=presence,
                registry=registry,
                links=links,
            )
            return cls(settings, parts, undo.pop_all())

    @property
    def record(self) -> WorkerRecord:
        """What routers see of it."""
        return self._parts.presence.record

    def _vital(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task for as long as the worker lives; if it breaks, the worker fails."""

        def broke(error: Exception) -> None:
            self._tasks.spawn(self._fail(f"{type(error).__name__}: {error}", 1), "fail")

        self._tasks.vital(work, name, broke)

    def _on_cache_changed(self, change: ev.CacheChanged) -> None:
        publisher = self._parts.publisher
        publisher.publish(list(change.stored), list(change.removed))
        for below in change.tiers:
            tier = self._parts.tier_publishers[below.tier]
            tier.publish(list(below.stored), list(below.removed))
        self._parts.decode.event_sequence = publisher.sequence
        self._engine_metrics.note_cache(change)

    # ---------------------------------------------------------------- life

    async def wait(self) -> int:
        """Exit code of the worker: 0 after ``stop``, otherwise something died."""
        return await asyncio.shield(self._done)

    async def closed(self) -> None:
        """Returns when nothing of the worker is left in this process."""
        await self._closed.wait()

    async def drain(self, timeout_s: float = DRAIN_S, hurried: asyncio.Event | None = None) -> bool:
        """Take nothing new, and wait until others have gone on with what is there; see ``drained``.

        What is left then is ended.
        """
        decode = self._parts.decode
        prefill = self._parts.prefill
        decode.drain()
        prefill.draining = True
        self._parts.presence.update("draining")
        is_empty = await drained(
            lambda: bool(decode.live_requests or prefill.open_handoffs), timeout_s, hurried
        )
        if not is_empty:
            decode.cancel_all(UnavailableError("the worker is shutting down"))
            await asyncio.sleep(0.2)
        return is_empty

    async def stop(self) -> None:
        """Leave the registry and end all processes of this worker."""
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
        gc.unfreeze()  # see `collect_rarely`: what this life leaves behind is garbage now
        self._closed.set()

    async def _fail(self, why: str, code: int) -> None:
        """The worker fails as one.

        Its streams break, which tells every router and every decode worker that this incarnation
        is gone; what to do next is theirs to decide.
        """
        _LOG.error("%s fails: %s", self._settings.worker_id, why)
        await self._leave(code)

    # ---------------------------------------------------------------- health

    async def _watch_engine(self) -> None:
        client = self._parts.engine.client
        code = await client.exited
        await self._fail(client.fatal or f"the engine process ended with code {code}", code or 1)

    def _show_registry(self) -> None:
        metrics = self._parts.metrics
        registry = self._parts.registry
        metrics.set("baton_registry_connected", registry.connected)
        metrics.count_up("baton_registry_errors", registry.errors)
        metrics.count_up("baton_kv_snapshots", self._parts.publisher.snapshots)

    async def _watch_rank(self, link: RankLink) -> None:
        await self._fail(await asyncio.shield(link.broken), 1)

    async def _watch_canary(self) -> None:
        exact = self._settings.engine.numerics == "exact"
        canary = Canary(self._parts.engine, self._settings.canary_s, exact=exact)
        await self._fail(await canary.run(), 1)

    async def _watch_quarantine(self) -> None:
        """Blocks whose writer cannot be proven to have stopped cost capacity: start afresh."""
        watch = QuarantineWatch()
        while True:
            await asyncio.sleep(0.5)
            load = self._parts.engine.load
            if watch.stuck(load, ALIVE.now_ns()):
                self._parts.metrics.inc("baton_quarantines")
                await self._fail(f"{load.blocks.quarantined} KV blocks are stuck in quarantine", 1)
                return


def _kv_listener(settings: WorkerSettings, undo: AsyncExitStack) -> socket.socket | None:
    """For readers by TCP, who get KV in plain text: not where there is TLS."""
    if settings.tls is not None or (settings.transports and "tcp" not in settings.transports):
        return None
    ranks = settings.engine.tensor_parallel if settings.rank_addresses else 1
    programs = settings.engine.workers_on_host * ranks  # that listen on this host, at most
    listener = kv_listener(settings.host, settings.ports, programs)
    return None if listener is None else undo.enter_context(listener)


def _note_sent(metrics: Metrics, sent_bytes: int) -> None:
    """KV that left the pool of a rank elsewhere; of the leader's own prefill's service tells."""
    metrics.inc("baton_transfer_bytes", sent_bytes, direction="sent")


def _failure_counter(metrics: Metrics) -> Callable[[str], None]:
    """For ``BackgroundTasks``."""
    return lambda task: metrics.inc("baton_task_failures", task=task)


def _say_what_computes(settings: WorkerSettings, metrics: Metrics) -> None:
    """Nobody who looks at this worker shall take made-up answers for a model's."""
    model = settings.engine.emulated
    timing = model.timing if model is not None else ""
    metrics.set("baton_engine_info", 1, engine="emulated" if timing else "real", timing=timing)
    if timing:
        _LOG.warning(
            "%s is EMULATED: no model runs here, its answers are made up; steps last as in %s (%s)",
            settings.worker_id,
            timing,
            TIMINGS[timing].source,
        )


def _open_log(settings: WorkerSettings) -> IO[bytes] | None:
    """Where the engine process writes its errors; None inherits ours."""
    if not settings.log_dir:
        return None
    folder = Path(settings.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return open_log(folder / f"{settings.worker_id}.engine.log")


def _services(
    settings: WorkerSettings,
    engine: EngineHandle,
    pool: RankPools,
    peers: Peers,
    identity: common_pb2.WorkerIdentity,
    capabilities: common_pb2.Capabilities,
    metrics: Metrics,
    tracing: Tracing,
    token: FleetToken,
) -> tuple[DecodeService, PrefillService]:
    """Both services around one engine."""
    ready = engine.client.ready
    pacer = ReceivePacer(settings.receive_cpu_share if settings.engine.steps_on_cpu else 0.0)
    engine.after_step.append(pacer.after_step)
    known = (ready.eos_token_ids, metrics, tracing)
    parts = WorkerParts(engine, pool, peers, identity, *known, pacer)
    tamperer = FrameTamperer.parse(settings.fault_injection)
    prefixes = PrefixPuller(parts)
    return (
        DecodeService(parts, capabilities, ready.threads),
        PrefillService(
            engine,
            pool,
            identity,
            capabilities,
            metrics,
            tracing,
            prefixes,
            tamperer,
            token=token,
            unsigned_pulls=settings.unsigned_pulls,
        ),
    )


async def serve(settings: WorkerSettings) -> int:
    """Run one worker in this process, without Ray, until a signal or a death; its exit code.

    The record of the worker goes to standard output as one line of JSON when it is ready. After a
    first signal it takes nothing new, and routers have others go on with what runs; with all of
    that gone it ends, with exit code 0. A second signal, or ``DRAIN_S``, ends it with requests.
    """
    loop = asyncio.get_running_loop()
    worker = None
    asked_to_stop = asyncio.timeout(None)
    hurried = asyncio.Event()

    def stop() -> None:
        if not asked_to_stop.expired():
            asked_to_stop.reschedule(loop.time())
        else:
            hurried.set()

    try:
        async with asked_to_stop:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop)
            worker = await Worker.start(settings)
            sys.stdout.write(msgspec.json.encode(worker.record).decode() + "\n")
            sys.stdout.flush()
            return await worker.wait()
    except TimeoutError:
        if not asked_to_stop.expired():
            raise
    if worker is None:
        return 0
    emptied = await worker.drain(DRAIN_S, hurried)
    await worker.stop()
    return await worker.wait() or int(not emptied)


def main() -> None:
    """Entry of ``python -m fleet.worker``: settings as JSON on standard input, secrets included."""
    die_with_parent()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSettings)
    set_up_logs(settings.log_format)
    sys.exit(asyncio.run(serve(settings)))


if __name__ == "__main__":
    main()
