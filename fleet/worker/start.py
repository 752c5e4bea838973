"""Start of a worker: the engine, both services, the publishers, in order."""

import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import grpc.aio
import msgspec
from batonpb import common_pb2, decode_pb2_grpc, prefill_pb2_grpc

from baton.addresses import join_address
from baton.engine.emulated_timing import TIMINGS
from baton.engine.process.client import EngineClient
from baton.engine.process.handle import EngineHandle
from baton.engine.process.link import InnerLink
from baton.engine.settings import EngineSettings
from baton.model.artifact import resolve_model
from baton.model.trust import check_trust
from baton.registry.connection import RoundTrips
from baton.registry.kv_events import KvEventPublisher
from baton.registry.redis_store import Registry
from baton.registry.types import WorkerRecord, tier_incarnation
from baton.registry.workers import Presence
from baton.telemetry.metrics import Metrics, serve_metrics
from baton.telemetry.tracing import Tracing
from baton.tenants.usage.worker_time import WorkerTime
from baton.types.lanes import lane_of
from baton.types.trust import TrustRules
from baton.wire.fleet_token import FleetToken, TokenInterceptor
from baton.wire.grpc_options import SERVER_OPTIONS, listen
from baton.wire.tls import FleetTls
from decode_worker.pacing import ReceivePacer
from decode_worker.parts import WorkerParts
from decode_worker.peers import Peers
from decode_worker.prefix_pull import begin_pull
from decode_worker.service import DecodeService
from fleet.ports import chosen_port, free_port, kv_listener
from fleet.private_logs import open_log
from fleet.worker.identity import capabilities_of
from fleet.worker.settings import WorkerSettings
from kvtransfer.rank_pools import RankPools
from kvtransfer.transport import ServingSide
from kvtransfer.transports import servers
from prefill_worker.service import PrefillService

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartContext:
    """Settings of a worker, and what all steps of its start use."""

    settings: WorkerSettings
    token: FleetToken
    tls: FleetTls | None
    tracing: Tracing
    metrics: Metrics
    registry: Registry
    time: WorkerTime
    on_progress: Callable[[str], None]


StartEngine = Callable[[StartContext, AsyncExitStack], Awaitable[EngineHandle]]
"""Starts the engine of a worker; the stack ends it."""


@dataclass(frozen=True, slots=True)
class Publishers:
    """Publishers of a worker: its record, and the events of its KV pool and tiers."""

    presence: Presence
    pool: KvEventPublisher
    tiers: Mapping[str, KvEventPublisher]

    def start(self) -> None:
        """Start publishing."""
        for publisher in (self.pool, *self.tiers.values()):
            publisher.start()
        self.presence.start()


def check_worker_trust(settings: WorkerSettings) -> None:
    """Check licence, digest and signature of the model; raise ModelError."""
    if settings.trust == TrustRules() or settings.engine.emulated is not None:
        return
    external = settings.engine.external is not None
    check_trust(resolve_model(settings.engine.model, allow_unsupported=external), settings.trust)


def open_context(
    settings: WorkerSettings,
    stack: AsyncExitStack,
    on_progress: Callable[[str], None],
    redis: RoundTrips | None = None,
) -> StartContext:
    """Open metrics, traces and the registry; read the token and certificates."""
    metrics = Metrics("worker", model=settings.served_model_name)
    registry = Registry(settings.redis_url, settings.fleet, redis)
    context = StartContext(
        settings,
        settings.token(),
        settings.credentials(),
        Tracing("worker"),
        metrics,
        registry,
        WorkerTime(
            settings.role,
            registry.of_whole_fleet(),
            metrics,
            failure_counter(metrics),
            lane_of(settings.fleet),
        ),
        on_progress,
    )
    stack.callback(context.tracing.shutdown)
    stack.push_async_callback(context.registry.close)
    stack.push_async_callback(context.time.close)
    context.time.start()
    return context


async def start_engine(context: StartContext, stack: AsyncExitStack) -> EngineHandle:
    """Start the engine process."""
    metrics = context.metrics
    stderr = _open_log(context.settings)
    if stderr is not None:
        stack.callback(stderr.close)
    engine_settings = _with_address(context.settings.engine, context.settings)

    def progress(what: str) -> None:
        _LOG.info("%s", what)
        context.on_progress(what)

    client = await EngineClient.start(
        engine_settings, progress, stderr, count_task_failure=failure_counter(metrics)
    )
    stack.push_async_callback(client.stop)
    link: EngineClient | InnerLink = client
    if client.ready.running:
        from baton.engine.vllm.translator import VllmLink  # needs pyzmq

        link = VllmLink(client, engine_settings)
        stack.push_async_callback(link.stop)
    engine = EngineHandle(link, is_server=engine_settings.external is not None)
    metrics.set("baton_model_load_seconds", engine.client.ready.load_s)
    geometry = engine.client.ready.geometry
    metrics.set_cache_info(geometry.num_blocks, geometry.block_tokens, geometry.dtype)
    _report_engine_kind(context.settings, metrics)
    return engine


def _with_address(engine: EngineSettings, settings: WorkerSettings) -> EngineSettings:
    """Return engine settings with the role and address with which vLLM hands KV over by NIXL."""
    external = engine.external
    if external is None or external.hand_off != "nixl":
        return engine
    port = chosen_port(settings.host, settings.ports)
    address = join_address(settings.host, port)
    own = msgspec.structs.replace(
        external, role=settings.role, address=address, ports=settings.ports
    )
    return msgspec.structs.replace(engine, external=own)


async def start_servers(
    context: StartContext, stack: AsyncExitStack
) -> tuple[grpc.aio.Server, str, str]:
    """Serve metrics and open the gRPC port; return the gRPC server and both addresses."""
    host = context.settings.host
    ports = context.settings.ports
    page = context.tls.page_context() if context.tls is not None else None
    pages = serve_metrics(context.metrics, host, free_port(host, ports), page)
    metrics_address = await stack.enter_async_context(pages)
    server = grpc.aio.server(interceptors=[TokenInterceptor(context.token)], options=SERVER_OPTIONS)
    port = listen(server, join_address(host, free_port(host, ports)), context.tls)
    return server, join_address(host, port), metrics_address


async def start_services(
    context: StartContext,
    engine: EngineHandle,
    pool: RankPools,
    identity: common_pb2.WorkerIdentity,
    server: grpc.aio.Server,
    stack: AsyncExitStack,
) -> tuple[DecodeService, PrefillService]:
    """Add both services to the gRPC server and start the KV transports."""
    settings = context.settings
    listener = _kv_listener(settings, stack)
    client = engine.client
    side = ServingSide(server, context.token, identity.incarnation, client.pool_fd, listener)
    senders = servers(side, settings.transports)
    capabilities = capabilities_of(settings, client.ready, senders)
    peers = Peers(capabilities, context.token, context.tls)
    stack.push_async_callback(peers.close)
    decode, prefill = _make_services(context, engine, pool, peers, identity, capabilities)
    decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)
    prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server)
    for sender in senders:
        await sender.start(prefill.source)
        stack.push_async_callback(sender.close)
    return decode, prefill


def _make_services(
    context: StartContext,
    engine: EngineHandle,
    pool: RankPools,
    peers: Peers,
    identity: common_pb2.WorkerIdentity,
    capabilities: common_pb2.Capabilities,
) -> tuple[DecodeService, PrefillService]:
    settings = context.settings
    ready = engine.client.ready
    pacer = ReceivePacer(settings.receive_cpu_share if settings.engine.steps_on_cpu else 0.0)
    engine.after_step.append(pacer.after_step)
    known = (ready.eos_token_ids, context.metrics, context.tracing)
    parts = WorkerParts(engine, pool, peers, identity, *known, pacer)
    decode = DecodeService(parts, capabilities, ready.threads)
    prefill = PrefillService(
        engine,
        pool,
        identity,
        capabilities,
        context.metrics,
        context.tracing,
        partial(begin_pull, parts),
        token=context.token,
        unsigned_pulls=settings.unsigned_pulls,
    )
    return decode, prefill


def make_publishers(
    context: StartContext,
    identity: common_pb2.WorkerIdentity,
    record: WorkerRecord,
    stack: AsyncExitStack,
) -> Publishers:
    """Make the publishers, which the stack stops."""
    count = failure_counter(context.metrics)
    incarnation = identity.incarnation
    publisher = KvEventPublisher(context.registry, incarnation, count)
    tiers = {
        tier: KvEventPublisher(context.registry, tier_incarnation(incarnation, tier), count)
        for tier in context.settings.engine.kv_tiers.names
    }
    for each in (publisher, *tiers.values()):
        stack.push_async_callback(each.stop)
    presence = Presence(context.registry, record, count)
    stack.push_async_callback(presence.stop)
    return Publishers(presence, publisher, tiers)


def _kv_listener(settings: WorkerSettings, undo: AsyncExitStack) -> socket.socket | None:
    """Return the socket for KV transfers by TCP, which are plain text; None with TLS."""
    if settings.tls is not None or (settings.transports and "tcp" not in settings.transports):
        return None
    listener = kv_listener(settings.host, settings.ports, settings.engine.workers_on_host)
    return None if listener is None else undo.enter_context(listener)


def failure_counter(metrics: Metrics) -> Callable[[str], None]:
    """Return the counter of failures of background tasks."""
    return lambda task: metrics.inc("baton_task_failures", task=task)


def _report_engine_kind(settings: WorkerSettings, metrics: Metrics) -> None:
    """Show the kind of the engine in metrics, and in the log if it is emulated."""
    model = settings.engine.emulated
    timing = model.timing if model is not None else ""
    external = settings.engine.external
    kind = external.kind if external is not None else "emulated" if timing else "real"
    metrics.set("baton_engine_info", 1, engine=kind, timing=timing)
    if timing:
        _LOG.warning(
            "worker=%s is EMULATED: no model runs, responses are synthetic; step times: %s (%s)",
            settings.worker_id,
            timing,
            TIMINGS[timing].source,
        )


def _open_log(settings: WorkerSettings) -> IO[bytes] | None:
    """Open the engine process's error log; None: it inherits this process's."""
    if not settings.log_dir:
        return None
    folder = Path(settings.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return open_log(folder / f"{settings.worker_id}.engine.log")
