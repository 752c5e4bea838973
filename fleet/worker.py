"""One worker: an engine process, both services around it, and its place in the registry.

The role is only what the router uses the worker for; every worker hosts both services, so a fleet
of one pool serves too. Ray is not needed here: ``fleet.pools.resources`` wraps a ``Worker`` into an actor.
"""

import asyncio
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import IO, Any

import grpc.aio
import msgspec
from batonpb import common_pb2, decode_pb2_grpc, prefill_pb2_grpc

from decode_worker.peers import Peers
from decode_worker.request import WorkerParts
from decode_worker.service import DecodeService
from engine.core import events as ev
from engine.core.errors import UnavailableError
from engine.core.params import SamplingParams
from engine.core.speculative.proposers import SpeculationSettings
from engine.ipc import die_with_parent
from engine.process import messages
from engine.process.handle import EngineHandle
from engine.settings import EngineSettings
from kvtransfer import grpc_transport
from kvtransfer.chunk import PoolView
from kvtransfer.fault_injection import FrameTamperer
from prefill_worker.service import PrefillService
from registry.kv_events import KvEventPublisher
from registry.redis_store import Registry
from registry.types import Role, WorkerRecord
from registry.workers import Presence
from telemetry.metrics import Metrics, MetricsServer, serve_metrics
from telemetry.tracing import Tracing
from wire.compatibility import WIRE_MAX, WIRE_MIN, kv_group
from wire.grpc_options import WORKER_OPTIONS, TokenInterceptor
from wire.tokens import pack_tokens

_LOG = logging.getLogger(__name__)

CANARY_S = 10.0
QUARANTINE_FRACTION = 0.05
QUARANTINE_S = 3.0  # above the fraction
QUARANTINE_LONG_S = 30.0  # any block at all
_CANARY_PROMPT = tuple(range(100, 124))
_CANARY_TOKENS = 4


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one worker needs to know."""

    worker_id: str
    role: Role
    epoch: int
    fleet: str
    model: str
    served_model_name: str
    redis_url: str
    fleet_token: str
    host: str = "127.0.0.1"
    max_context_tokens: int = 0  # 0 = what the model says
    numerics: str = "exact"
    dtype: str = "bf16"
    device: str = "cpu"  # "cuda" and "auto" are not proven on hardware yet (docs/gpu.md)
    weight_quantisation: str = "none"  # or "int8", "int4"; on CUDA "fp8"
    kv_dtype: str = ""  # "int8", "fp8"; empty = as the activations
    kv_blocks: int = 1024  # 0 = sized from the memory that is free
    workers_on_host: int = 1  # that share it
    threads: int = 1  # of each rank
    tensor_parallel: int = 1  # ranks
    max_batch_requests: int = 32
    max_step_tokens: int = 512
    max_adapters: int = 8  # LoRA adapters in memory at once
    max_adapter_rank: int = 64
    speculation: SpeculationSettings = SpeculationSettings()
    log_dir: str = ""
    drill: str = ""  # damage frames on purpose, see kvtransfer.fault_injection
    poison_token: int = -1  # drill: the engine dies of a prompt that holds it
    check_every_step: bool = False  # tests: recount all blocks after each step
    emulated_token_s: float = 0.0
    emulated_nan_after_steps: int = 0
    canary_s: float = CANARY_S


class Worker:
    """See the module.

    Args:
        settings: Of this worker.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._incarnation = secrets.token_bytes(16)
        self._metrics = Metrics("worker", model=settings.served_model_name)
        self._tracing = Tracing("worker")
        self._tasks: list[asyncio.Task[None]] = []
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stderr: IO[bytes] | None = None
        self._canary_tokens: tuple[int, ...] | None = None

    async def start(self) -> WorkerRecord:
        """Load the model, serve, register; returns the record that routers will see.

        Raises:
            InternalError: The engine could not start; the message says why.
        """
        settings = self._settings
        self._registry = Registry(settings.redis_url, settings.fleet)
        self._stderr = _open_log(settings)
        self._engine = EngineHandle(self._engine_settings(), _LOG.info, self._stderr)
        ready = await self._engine.start()
        self._metrics.set("baton_model_load_seconds", ready.load_s)
        self._metrics_server: MetricsServer = await serve_metrics(self._metrics, settings.host)
        await self._serve(ready)
        self._publisher = KvEventPublisher(self._registry, self._incarnation)
        self._engine.on_cache_changed = self._on_cache_changed
        self._engine.on_adapter_changed = self._on_adapter_changed
        self._metrics.before_page.append(self._show_registry)
        if settings.max_adapters:
            self._metrics.before_page.append(self._show_adapters)
        self._engine.after_step.append(self._note_step)
        self._publisher.start()
        self._presence = Presence(self._registry, self._record)
        self._presence.start()
        self._keep(self._decode.tick_forever())
        self._keep(self._prefill.watch_leases())
        self._keep(self._watch_engine())
        self._keep(self._watch_quarantine())
        if settings.canary_s:
            self._keep(self._run_canary())
        return self._record

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task for as long as the worker lives; if it breaks, the worker fails."""

        async def watched() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - never go on unwatched
                _LOG.exception("%s: a task broke", self._settings.worker_id)
                await self._fail(f"{type(error).__name__}: {error}", 1)

        self._tasks.append(asyncio.create_task(watched()))

    def _engine_settings(self) -> EngineSettings:
        settings = self._settings
        return EngineSettings(
            model=settings.model,
            dtype=settings.dtype,
            numerics=settings.numerics,
            device=settings.device,
            weight_quantisation=settings.weight_quantisation,
            kv_dtype=settings.kv_dtype,
            kv_blocks=settings.kv_blocks,
            workers_on_host=settings.workers_on_host,
            threads=settings.threads,
            tensor_parallel=settings.tensor_parallel,
            max_context_tokens=settings.max_context_tokens,
            max_batch_requests=settings.max_batch_requests,
            max_step_tokens=settings.max_step_tokens,
            max_adapters=settings.max_adapters,
            max_adapter_rank=settings.max_adapter_rank,
            check_every_step=settings.check_every_step,
            speculation=settings.speculation,
            emulated_token_s=settings.emulated_token_s,
            emulated_nan_after_steps=settings.emulated_nan_after_steps,
            poison_token=settings.poison_token,
        )

    async def _serve(self, ready: messages.Ready) -> None:
        settings = self._settings
        self._server = grpc.aio.server(
            interceptors=[TokenInterceptor(settings.fleet_token)],
            options=[*WORKER_OPTIONS, ("grpc.so_reuseport", 0)],
        )
        port = self._server.add_insecure_port(f"{settings.host}:0")
        address = f"{settings.host}:{port}"
        identity = common_pb2.WorkerIdentity(
            worker_id=settings.worker_id,
            incarnation=self._incarnation,
            epoch=settings.epoch,
            role=settings.role,
            host=socket.gethostname(),
            address=address,
            pid=ready.pid,
        )
        capabilities = common_pb2.Capabilities(
            wire=common_pb2.WireRange(min=WIRE_MIN, max=WIRE_MAX),
            kv_groups=[kv_group(ready.geometry)],
            numerics_id=ready.numerics_id,
            weights_digest=ready.weights_digest,
            model=settings.served_model_name,
            max_context_tokens=ready.max_context_tokens,
        )
        pool = PoolView(self._engine.client.pool, ready.geometry)
        self._peers = Peers(capabilities, settings.fleet_token)
        parts = WorkerParts(
            self._engine,
            pool,
            self._peers,
            identity,
            ready.eos_token_ids,
            self._metrics,
            self._tracing,
        )
        self._decode = DecodeService(parts, capabilities, ready.threads)
        self._prefill = PrefillService(
            self._engine,
            pool,
            identity,
            capabilities,
            self._metrics,
            self._tracing,
            FrameTamperer.parse(settings.drill),
        )
        decode_pb2_grpc.add_DecodeServicer_to_server(self._decode, self._server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._prefill, self._server)
        grpc_transport.add_pull_handler(self._server, self._prefill.pull)
        await self._server.start()
        self._record = WorkerRecord(
            worker_id=settings.worker_id,
            role=settings.role,
            state="ready",
            epoch=settings.epoch,
            incarnation=self._incarnation,
            pid=ready.pid,
            host=identity.host,
            address=address,
            metrics_address=self._metrics_server.address,
            threads=ready.threads,
            ranks=ready.ranks,
        )

    # ---------------------------------------------------------------- life

    async def wait(self) -> int:
        """Exit code of the worker: 0 after ``stop``, otherwise something died."""
        return await asyncio.shield(self._done)

    async def drain(self, timeout_s: float = 30.0) -> bool:
        """Take no new work and wait for what is there; True when nothing was left."""
        self._decode.state = "draining"
        self._prefill.draining = True
        self._presence.update("draining")
        try:
            async with asyncio.timeout(timeout_s):
                while self._decode.live_requests or self._prefill.open_handoffs:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self._decode.cancel_all(UnavailableError("the worker is shutting down"))
            await asyncio.sleep(0.2)
            return False
        return True

    async def stop(self) -> None:
        """Leave the registry and end all processes of this worker."""
        await self._leave(0)

    async def _leave(self, code: int) -> None:
        if self._done.done():
            return
        self._done.set_result(code)
        this = asyncio.current_task()
        for task in self._tasks:
            if task is not this:
                task.cancel()
        await self._server.stop(0.2 if code == 0 else None)
        await self._presence.stop()
        await self._publisher.stop()
        await self._peers.close()
        await self._engine.client.stop()
        await self._metrics_server.close()
        await self._registry.close()
        self._tracing.shutdown()
        if self._stderr is not None:
            self._stderr.close()

    async def _watch_engine(self) -> None:
        code = await self._engine.client.exited
        why = self._engine.client.fatal or f"the engine process ended with code {code}"
        await self._fail(why, code or 1)

    async def _fail(self, why: str, code: int) -> None:
        """The worker fails as one.

        Its streams break, which tells every router and every decode worker that this incarnation
        is gone; what to do next is theirs to decide.
        """
        _LOG.error("%s fails: %s", self._settings.worker_id, why)
        await self._leave(code)

    async def _watch_quarantine(self) -> None:
        """Blocks whose writer cannot be proven to have stopped cost capacity: start afresh."""
        any_s = many_s = 0.0
        while True:
            await asyncio.sleep(0.5)
            load = self._engine.load
            any_s = any_s + 0.5 if load.quarantined else 0.0
            many = load.quarantined > QUARANTINE_FRACTION * load.total
            many_s = many_s + 0.5 if many else 0.0
            if many_s > QUARANTINE_S or any_s > QUARANTINE_LONG_S:
                self._metrics.inc("baton_quarantines")
                await self._fail(f"{load.quarantined} KV blocks are stuck in quarantine", 1)
                return

    # ---------------------------------------------------------------- health

    async def _run_canary(self) -> None:
        """Canary: a fixed prompt must be answered, and in `exact` as the first time.

        It goes ahead of all requests, so that an engine that does not even step for as long as a
        canary may take is hung, and one that answers NaN to it is sick: both leave traffic.
        """
        await asyncio.sleep(min(1.0, self._settings.canary_s))
        while True:
            step_before = self._engine.load.step
            tokens, error = await self._canary(self._settings.canary_s)
            if error:
                await self._fail(f"canary: {error}", 1)
                return
            if tokens is None and self._engine.load.step == step_before:
                await self._fail(f"no engine step for {self._settings.canary_s:.0f} s", 1)
                return
            if tokens is not None and self._settings.numerics == "exact":
                self._canary_tokens = self._canary_tokens or tokens
                if tokens != self._canary_tokens:
                    await self._fail(f"canary: {tokens} instead of {self._canary_tokens}", 1)
                    return
            await asyncio.sleep(self._settings.canary_s)

    async def _canary(self, timeout_s: float) -> tuple[tuple[int, ...] | None, str]:
        """Tokens of one canary (None: not in time) and the error that it ended with."""
        drawn: list[int] = []
        ended = asyncio.get_running_loop().create_future()

        def on_report(report: object) -> None:
            if isinstance(report, ev.Tokens):
                drawn.extend(token.token for token in report.tokens)
            elif isinstance(report, ev.Ended) and not ended.done():
                ended.set_result(report.error_message)

        name = f"canary/{secrets.token_hex(8)}"
        params = SamplingParams(max_tokens=_CANARY_TOKENS, temperature=0.0, ignore_eos=True)
        prompt = pack_tokens(_CANARY_PROMPT)
        command = messages.Submit(name, "full", prompt, params, bytes(16), -1, 0, cacheable=False)
        self._engine.submit(command, on_report)
        try:
            async with asyncio.timeout(timeout_s):
                error = await ended
        except TimeoutError:
            self._engine.client.send(messages.Cancel(name))
            return None, ""
        return tuple(drawn), error

    # ---------------------------------------------------------------- index and metrics

    def _on_cache_changed(self, change: ev.CacheChanged) -> None:
        self._publisher.publish(list(change.stored), list(change.removed))
        self._decode.event_sequence = self._publisher.sequence
        self._metrics.inc("baton_kv_events", len(change.stored), kind="stored")
        self._metrics.inc("baton_kv_events", len(change.removed), kind="removed")

    def _on_adapter_changed(self, change: ev.AdapterChanged) -> None:
        metrics = self._metrics
        metrics.set("baton_adapters_held", change.held)
        if change.what == "evicted":
            metrics.inc("baton_adapter_evictions", adapter=change.name)
            return
        metrics.inc("baton_adapter_loads", adapter=change.name, outcome=change.what)
        metrics.observe("baton_adapter_load_seconds", change.load_s)

    def _show_registry(self) -> None:
        self._metrics.set("baton_registry_connected", self._registry.connected)
        self._count_up("baton_registry_errors", self._registry.errors)
        self._count_up("baton_kv_snapshots", self._publisher.snapshots)

    def _show_adapters(self) -> None:
        running, waiting = self._engine.adapters_in_use()
        self._metrics.set_info(
            "baton_adapter_requests_info",
            time.time(),
            max_lora=str(self._settings.max_adapters),
            running_lora_adapters=",".join(running),
            waiting_lora_adapters=",".join(waiting),
        )

    def _note_step(self, step: ev.StepDone) -> None:
        metrics = self._metrics
        for state in ("total", "free", "cached", "leased", "quarantined"):
            metrics.set("baton_kv_blocks", getattr(step, state), state=state)
        metrics.set("baton_kv_usage_ratio", step.leased / max(step.total, 1))
        metrics.set("baton_running_requests", step.running)
        metrics.set("baton_waiting_requests", step.waiting)
        self._count_up("baton_kv_evictions", step.evictions)
        self._count_up("baton_preemptions", step.preemptions)
        self._count_up("baton_spec_drafts", step.drafts)
        self._count_up("baton_spec_draft_tokens", step.draft_tokens)
        self._count_up("baton_spec_accepted_tokens", step.accepted_tokens)
        if not step.duration_ns:
            return
        kinds = {(True, True): "mixed", (True, False): "prefill", (False, True): "decode"}
        kind = kinds.get((step.prompt_tokens > 0, step.decode_rows > 0), "decode")
        metrics.observe("baton_step_seconds", step.duration_ns / 1e9, kind=kind)
        if step.mask_ns:
            metrics.observe("baton_grammar_mask_seconds", step.mask_ns / 1e9)
        metrics.observe("baton_batch_requests", step.running)
        metrics.observe("baton_batch_tokens", step.prompt_tokens, kind="prefill")
        metrics.observe("baton_batch_tokens", step.decode_rows, kind="decode")

    def _count_up(self, name: str, total: int) -> None:
        delta = total - self._metrics.value(name)
        if delta > 0:
            self._metrics.inc(name, delta)


def _open_log(settings: WorkerSettings) -> IO[bytes] | None:
    """Where the engine process writes its errors; None inherits ours."""
    if not settings.log_dir:
        return None
    folder = Path(settings.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{settings.worker_id}.engine.log").open("ab")


async def serve(settings: WorkerSettings) -> int:
    """Run one worker in this process, without Ray, until a signal or a death; its exit code.

    The record of the worker goes to standard output as one line of JSON when it is ready.
    """
    worker = Worker(settings)
    loop = asyncio.get_running_loop()
    record = await worker.start()
    stopping: list[asyncio.Task[None]] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: stopping.append(loop.create_task(worker.stop())))
    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
    sys.stdout.flush()
    code = await worker.wait()
    await asyncio.gather(*stopping)
    return code


def main() -> None:
    """Entry of ``python -m fleet.worker``: settings as JSON on standard input, secrets included."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    die_with_parent()
    sys.exit(asyncio.run(serve(msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSettings))))


if __name__ == "__main__":
    main()
