"""The Prefill service: computes prompts, announces KV as it appears, and serves pulls.

There is one ``Handoff`` per (request, attempt, generation, reader). Its decisions are in
``kvtransfer.sender.HandoffSender``; the ``Announcer`` performs them. This file has the gRPC
methods, the reports of the engine, and the leases.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from batonpb import common_pb2, prefill_pb2_grpc
from batonpb import prefill_pb2 as pb

from baton.engine.core.sequence import Kind
from baton.engine.process import messages
from baton.engine.process.handle import EngineHandle
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.metrics import Metrics, count_cached
from baton.telemetry.tasks import BackgroundTasks
from baton.telemetry.tracing import Tracing, extract
from baton.types import events as ev
from baton.types.errors import BatonError, UnavailableError
from baton.wire.capability import refusal
from baton.wire.codecs import error_to_wire
from baton.wire.compatibility import disagreement
from baton.wire.fleet_token import FleetToken
from baton.wire.submission import check_submission, submit_from_wire
from baton.wire.tokens import unpack_tokens
from kvtransfer import sender
from kvtransfer.pool_source import HeldKv, Key, PoolSource
from kvtransfer.rank_pools import RankPools
from prefill_worker.announcer import Announcer
from prefill_worker.handoff import BeginPull, SentHandoff

_LOG = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
_REMEMBERED_ATTEMPTS = 4096


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """gRPC service of a prefill worker.

    Args:
        pool: KV pool of the engine, or pools of its ranks.
        begin_pull: Pulls prefixes from other workers' caches.
        token: Fleet token that signs capabilities of pulls; without one, pulls need none.
        unsigned_pulls: Whether pulls without a capability are allowed, too.
    """

    def __init__(
        self,
        engine: EngineHandle,
        pool: RankPools,
        identity: common_pb2.WorkerIdentity,
        capabilities: common_pb2.Capabilities,
        metrics: Metrics,
        tracing: Tracing,
        begin_pull: BeginPull,
        token: FleetToken,
        unsigned_pulls: bool,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._identity = identity
        self._capabilities = capabilities
        self._metrics = metrics
        self._tracing = tracing
        self._begin_pull = begin_pull
        self._token = token
        self._unsigned_pulls = unsigned_pulls
        self.source = PoolSource(
            pool,
            identity.incarnation,
            self._held,
            lambda sent_bytes: metrics.inc("baton_transfer_bytes", sent_bytes, direction="sent"),
            self._refusal,
            capabilities.encodings,
        )
        """Source of the frames that decode workers pull by any transport."""
        self._announcer = Announcer(engine, pool, metrics)
        self._handoffs: dict[Key, SentHandoff] = {}
        self._replaced: list[SentHandoff] = []  # by one with their key, while they are being read
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._tasks = BackgroundTasks(
            "prefill service", lambda name: metrics.inc("baton_task_failures", task=name)
        )
        self.draining = False

    async def Handshake(  # noqa: N802 - gRPC's name
        self, request: common_pb2.Capabilities, context: Any
    ) -> pb.HandshakeReply:
        """Send identity and capabilities, and refuse an incompatible decode worker."""
        reply = pb.HandshakeReply(identity=self._identity, capabilities=self._capabilities)
        reason = disagreement(self._capabilities, request)
        if reason:
            reply.refusal.CopyFrom(error_to_wire(UnavailableError(reason)))
        return reply

    async def Prefill(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.PrefillControl], context: Any
    ) -> AsyncIterator[pb.PrefillEvent]:
        """Serve one hand-off's control stream; a second stream with the same key resumes it."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("start"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream begins with `start`")
            return
        try:
            handoff, resumed = self._open(first.start)
        except BatonError as error:
            yield pb.PrefillEvent(failed=error_to_wire(error))
            return
        events = handoff.events
        accepted = pb.PrefillAccepted(identity=self._identity, resumed=resumed)
        yield pb.PrefillEvent(accepted=accepted)
        async with self._tasks.beside(self._control(request_iterator, handoff), "control"):
            loop = asyncio.get_running_loop()
            beat_s = loop.time() + HEARTBEAT_S  # also between publications: pulls wait for it
            while not (handoff.ended and events.empty()):
                try:
                    async with asyncio.timeout_at(beat_s):
                        event = await events.get()
                except TimeoutError:
                    event = pb.PrefillEvent(heartbeat=pb.Renew())
                    beat_s = loop.time() + HEARTBEAT_S
                yield event
                if event.HasField("failed"):
                    return

    def _open(self, start: pb.PrefillStart) -> tuple[SentHandoff, bool]:
        """Return the hand-off of a stream, and whether it was open already."""
        key = (start.request_id, start.attempt, start.generation, start.decode_incarnation)
        existing = self._handoffs.get(key)
        if existing is not None and existing.is_open:  # the decode worker has reconnected
            existing.events = asyncio.Queue()  # for another stream, which has received nothing yet
            existing.machine.renew(ALIVE.now_ns())
            self._announcer.perform(existing, existing.machine.replay())
            return existing, True
        self._check(start)
        prompt = unpack_tokens(start.prompt_tokens)
        machine = sender.HandoffSender(
            self._pool.geometry,
            len(prompt),
            start.skip_blocks,
            (start.lease_ms or 3000) * 1_000_000,
            ALIVE.now_ns(),
            parts=self._pool.parts,
        )
        engine_id = self._engine.unused_name(f"p/{start.request_id}/{start.attempt}")
        handoff = SentHandoff(engine_id, start, machine)
        if existing is not None:
            self._replaced.append(existing)
        self._handoffs[key] = handoff
        self._attempts[start.request_id] = start.attempt
        self._attempts.move_to_end(start.request_id)
        if len(self._attempts) > _REMEMBERED_ATTEMPTS:
            self._attempts.popitem(last=False)
        handoff_span = self._tracing.tracer.start_span(
            "baton.prefill", context=extract(start.traceparent, start.tracestate)
        )
        handoff_span.set_attribute("baton.prompt_tokens", len(prompt))
        handoff_span.set_attribute("baton.worker_id", self._identity.worker_id)
        on_report = partial(self._on_report, key, handoff, span=handoff_span)

        def submit(pulled_tokens: int) -> None:
            handoff.prefix = None
            handoff_span.set_attribute("baton.pulled_prefix_tokens", pulled_tokens)
            if handoff.is_open:
                kind = Kind.HELD if start.held_only else Kind.PREFILL
                command = submit_from_wire(start, engine_id, kind, start.skip_blocks)
                self._engine.submit(command, on_report)
            else:  # it was cancelled, or its lease lapsed, before the engine got it
                on_report(ev.Ended(engine_id, "cancelled"))

        handoff.prefix = self._begin_pull(start, submit)
        if handoff.prefix is None:
            submit(0)
        return handoff, False

    def _check(self, start: pb.PrefillStart) -> None:
        check_submission(start)
        if self.draining and not start.held_only:  # what it holds may be resumed elsewhere
            raise UnavailableError("this worker is draining")
        if self._engine.silent:
            raise UnavailableError("this worker's engine does not respond")
        if start.expected_incarnation != self._identity.incarnation:
            raise UnavailableError("this worker was restarted: another incarnation was expected")
        if start.attempt < self._attempts.get(start.request_id, 0):
            raise UnavailableError(f"attempt {start.attempt} is older than one already seen")

    async def _control(
        self, controls: AsyncIterator[pb.PrefillControl], handoff: SentHandoff
    ) -> None:
        """Handle renewals and the end of a hand-off. A broken stream is not a cancel."""
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            async for control in controls:
                if control.HasField("renew"):
                    handoff.machine.renew(ALIVE.now_ns())
                elif control.HasField("release"):
                    self._announcer.perform(handoff, handoff.machine.release())
                elif control.HasField("cancel"):
                    self._announcer.perform(handoff, handoff.machine.cancel())

    def _on_report(self, key: Key, handoff: SentHandoff, report: Any, *, span: Any) -> None:
        match report:
            case ev.Admitted():
                handoff.machine.admitted(report.blocks)
            case ev.Published():
                self._announcer.perform(handoff, handoff.machine.published(report))
            case ev.PromptOutputsReady():
                handoff.prompt_outputs = report
            case ev.PromptDone():
                self._announcer.perform(handoff, handoff.machine.prompt_done(report))
                span.set_attribute("baton.cached_tokens", report.cached_tokens)
                span.end()
                if not (handoff.start.probe or handoff.start.held_only):
                    computed = handoff.machine.prompt_tokens - report.cached_tokens
                    self._metrics.inc("baton_prefix_tokens", computed, source="computed")
                    count_cached(self._metrics, report.tier_tokens, report.cached_tokens)
            case ev.Ended():
                self._ended(key, handoff, report)
                if handoff.machine.done is None:
                    span.end()

    def _held(self, key: Key) -> HeldKv | None:
        handoff = self._handoffs.get(key)
        if handoff is None:
            return None
        return HeldKv(handoff.machine, partial(self._announcer.perform, handoff))

    def _refusal(self, request: pb.PullRequest) -> str:
        reader = request.reader_incarnation
        holder = self._identity.incarnation
        why = refusal(
            request.capability, self._token, request.request_id, holder, reader, time.time()
        )
        if not why or (why == "missing" and self._unsigned_pulls):
            return ""
        self._metrics.inc("baton_pulls_refused", reason=why)
        _LOG.warning("refused a pull of KV: request=%s reason=%s", request.request_id, why)
        return why

    def _ended(self, key: Key, handoff: SentHandoff, report: ev.Ended) -> None:
        if report.error_code and report.error_code != "cancelled":
            error = common_pb2.Error(code=report.error_code, message=report.error_message)
            handoff.events.put_nowait(pb.PrefillEvent(failed=error))
        handoff.ended = True
        handoff.machine.state = sender.SenderState.CLOSED  # frames being read are not sent
        handoff.events.put_nowait(pb.PrefillEvent(heartbeat=pb.Renew()))  # wakes the stream
        if self._handoffs.get(key) is handoff:
            del self._handoffs[key]

    async def watch_leases(self) -> None:
        """End hand-offs whose lease was not renewed; runs as long as the worker."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now_ns = ALIVE.now_ns()
            self._replaced = [
                old for old in self._replaced if old.machine.state is not sender.SenderState.CLOSED
            ]
            for handoff in [*self._handoffs.values(), *self._replaced]:
                was_open = handoff.is_open
                self._announcer.perform(handoff, handoff.machine.tick(now_ns))
                if was_open and not handoff.is_open:
                    self._metrics.inc("baton_orphans")

    def withdraw(self) -> None:
        """Return the prompts that have not begun; their decode workers ask for another worker.

        Prompts whose prefix is being pulled stay: their work has begun.
        """
        for handoff in self._handoffs.values():
            if handoff.is_open and handoff.prefix is None:
                self._engine.client.send(messages.Withdraw(handoff.engine_id))

    async def close(self) -> None:
        """Release all hand-offs, so that nothing keeps the KV pool of an ended engine mapped."""
        for handoff in [*self._handoffs.values(), *self._replaced]:
            if handoff.prefix is not None:
                handoff.prefix.close()
        self._handoffs.clear()
        self._replaced.clear()
        await self._tasks.close()

    @property
    def open_handoffs(self) -> int:
        """Number of hand-offs whose blocks are not released yet."""
        return len(self._handoffs)
