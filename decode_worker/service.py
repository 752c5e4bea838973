"""Decode service: sessions with routers, and their requests.

A router's heartbeats renew the lease of all its requests. The lease continues when its stream
breaks; the router reconnects and resumes each request by id. The others lapse.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
from batonpb import common_pb2, decode_pb2_grpc
from batonpb import decode_pb2 as pb

from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.logs import request_context
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import (
    BatonError,
    CancelledError_,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from baton.types.events import StepDone
from baton.wire.codecs import error_to_wire, scatter
from baton.wire.compatibility import WIRE_MAX, WIRE_MIN
from baton.wire.submission import check_submission
from baton.wire.tokens import pack_tokens
from baton.wire.worker_status import engine_status
from decode_worker.parts import WorkerParts
from decode_worker.request import DecodeRequest
from decode_worker.session import LoadReport, RouterSession

_LOG = logging.getLogger(__name__)

STATUS_S = 0.25
DEFAULT_LEASE_MS = 3000
REMEMBER_S = 5.0  # for which an ended request can be resumed
_MEASURED: tuple[Any, ...] = (  # fields of a report that each probe changes
    "steps",
    "prefill_tokens_per_s",
    "prefill_token_s",
    "prefill_context_s",
    "decode_step_s",
    "decode_base_s",
    "decode_row_s",
    "decode_context_s",
)
TOMBSTONE_NS = 60_000_000_000
MAX_TOMBSTONES = 4096

Key = tuple[str, int]  # request, attempt


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """gRPC service of a decode worker."""

    def __init__(
        self, parts: WorkerParts, capabilities: common_pb2.Capabilities, threads: int
    ) -> None:
        self.state = "ready"
        self._leaving = False
        self._parts = parts
        self._capabilities = capabilities
        self._threads = threads
        self._sessions: dict[str, RouterSession] = {}
        self._requests: dict[str, DecodeRequest] = {}
        self._tombstones = Tombstones()
        self._step = 0  # of the engine
        self._tasks = BackgroundTasks("decode service", parts.count_task_failure)
        self.event_sequence = 0
        self._highest_ticket = 0
        self._rest: LoadReport | None = None  # the last report, if there was no work
        parts.engine.after_step.append(self._after_step)

    async def Serve(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.RouterFrame], context: Any
    ) -> AsyncIterator[pb.WorkerFrame]:
        """Serve one router's stream; a second stream of the same router replaces the first."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream begins with `hello`")
            return
        wire = first.hello.wire
        if wire.max < WIRE_MIN or wire.min > WIRE_MAX:
            text = f"wire versions {wire.min}-{wire.max}; this worker speaks {WIRE_MIN}-{WIRE_MAX}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
            return
        session = self._session(first.hello.router_id)
        stream = session.connected(may_rest=first.hello.may_rest)
        for request in self._requests.values():
            if request.session is session:
                request.resumed = False
        session.status(self.status(with_capabilities=True))
        listening = self._listen(request_iterator, session, stream)
        async with self._tasks.beside(listening, "listen"):
            async for frame in session.frames(stream, lambda: self._step):
                yield frame

    async def Submit(self, request: pb.Submission, context: Any) -> pb.SubmitAck:  # noqa: N802
        """Take a submission too long for the stream, and renew the router's leases."""
        session = self._session(request.router_id)
        session.renew()
        self._submit(request, session)
        return pb.SubmitAck()

    async def Expand(self, request: pb.ImageQuestion, context: Any) -> pb.ImageTokens:  # noqa: N802
        """Return the tokens that stand for an image; the caller sets the time limit."""
        try:
            image = await self._parts.engine.expand(request.data)
        except BatonError as error:
            return pb.ImageTokens(error=error_to_wire(error))
        prompt = pack_tokens(image.prompt)
        return pb.ImageTokens(prompt_tokens=prompt, begin=image.begin, count=image.count)

    def _session(self, router_id: str) -> RouterSession:
        return self._sessions.setdefault(router_id, RouterSession(router_id))

    async def _listen(
        self, frames: AsyncIterator[pb.RouterFrame], session: RouterSession, stream: int
    ) -> None:
        """Read the router's frames. When that ends, sending must end, too."""
        try:
            with contextlib.suppress(grpc.RpcError):  # the stream is gone; the lease continues
                async for frame in frames:
                    session.note_frame(stream)
                    for single in scatter(frame):
                        self._handle(single, session)
        finally:
            session.end_stream(stream)

    def drain(self) -> None:
        """Refuse new requests from now on; no router can change that."""
        self.state = "draining"
        self._leaving = True

    def _handle(self, frame: pb.RouterFrame, session: RouterSession) -> None:
        match frame.WhichOneof("frame"):
            case "submit":
                self._submit(frame.submit, session)
            case "cancel":
                self._cancel(frame.cancel)
            case "resume":
                self._resume(frame.resume, session)
            case "replacement":
                replacement = frame.replacement
                request = self._find(replacement.request_id, replacement.attempt)
                if request is not None:
                    request.replace_prefill(replacement)
            case "drain" if not self._leaving:
                self.state = "draining" if frame.drain.on else "ready"

    def _find(self, request_id: str, attempt: int) -> DecodeRequest | None:
        request = self._requests.get(request_id)
        if request is None or request.submission.attempt != attempt:
            return None
        return request

    def _cancel(self, message: pb.Cancel) -> None:
        request = self._find(message.request_id, message.attempt)
        error = CancelledError_("cancelled by the router")
        if request is not None and message.choices:
            request.end_choices(list(message.choices))
        elif request is not None:
            request.stop(error)
        elif not message.choices:  # it may have overtaken its submission
            key = message.request_id, message.attempt
            self._tombstones.add(key, error, time.monotonic_ns())

    def _submit(self, submission: pb.Submission, session: RouterSession) -> None:
        self._highest_ticket = max(self._highest_ticket, submission.ticket)
        existing = self._requests.get(submission.request_id)
        if existing is not None and existing.submission.attempt >= submission.attempt:
            if existing.submission.attempt > submission.attempt:
                error = InvalidRequestError("an older attempt")
                self._refuse(submission.request_id, submission.attempt, session, error)
            return  # a repeated submission
        if existing is not None:
            existing.stop(CancelledError_("a newer attempt replaces this one"))
        refusal = self._refusal(submission)
        if refusal is not None:
            self._refuse(submission.request_id, submission.attempt, session, refusal)
            return
        with request_context(submission.request_id, submission.traceparent):
            self._begin(submission, session)

    def _begin(self, submission: pb.Submission, session: RouterSession) -> None:
        try:
            check_submission(submission)
            request = DecodeRequest(submission, session, self._parts)
            request.start()
        except InvalidRequestError as error:
            self._refuse(submission.request_id, submission.attempt, session, error)
            return
        except Exception:  # noqa: BLE001 - a fault of one request must not end the stream of all
            _LOG.exception("cannot take a submission: request=%s", submission.request_id)
            self._parts.count_task_failure("submit")
            refusal = InternalError("the decode worker failed to take the request; see its log")
            self._refuse(submission.request_id, submission.attempt, session, refusal)
            return
        self._requests[submission.request_id] = request

    def _refusal(self, submission: pb.Submission) -> BatonError | None:
        if self._parts.engine.silent:
            return UnavailableError("this worker's engine does not respond")
        if self.state == "draining" and not submission.probe:
            return UnavailableError("this worker is draining")
        return self._tombstones.find((submission.request_id, submission.attempt))

    def _refuse(
        self, request_id: str, attempt: int, session: RouterSession, error: BatonError
    ) -> None:
        wire = error_to_wire(error)
        session.end(pb.RequestEnd(request_id=request_id, attempt=attempt, error=wire))

    def _resume(self, message: pb.Resume, session: RouterSession) -> None:
        request = self._find(message.request_id, message.attempt)
        if request is None:
            error = UnavailableError("this worker does not have the request any more")
            key = message.request_id, message.attempt
            self._tombstones.add(key, error, time.monotonic_ns())
            self._refuse(*key, session, error)
            return
        request.session = session
        request.resume(list(message.next_index))

    async def tick_forever(self) -> None:
        """Send status frames and check leases and stalls, as long as the worker runs."""
        while True:
            await asyncio.sleep(STATUS_S)
            now_ns = time.monotonic_ns()
            self._parts.engine.watch(ALIVE.now_ns())
            self._tombstones.tick(now_ns)
            report = self._report()
            for session in list(self._sessions.values()):
                session.report(report, now_ns)
            alive_ns = ALIVE.now_ns()
            for request_id, request in list(self._requests.items()):
                self._watch(request_id, request, now_ns, alive_ns)
            for router_id, session in list(self._sessions.items()):
                if alive_ns - session.renewed_ns > 60e9:
                    session.end_stream()
                    del self._sessions[router_id]

    def _watch(self, request_id: str, request: DecodeRequest, now_ns: int, alive_ns: int) -> None:
        if request.ended:
            if now_ns - request.ended_ns > REMEMBER_S * 1e9:
                del self._requests[request_id]
                request.forget()
            return
        request.tick(alive_ns)
        lease_ns = (request.submission.lease_ms or DEFAULT_LEASE_MS) * 1_000_000
        session = request.session
        not_resumed = not request.resumed and alive_ns - session.connected_ns > lease_ns
        if not_resumed or alive_ns - session.renewed_ns > lease_ns:
            self._parts.metrics.inc("baton_orphans")
            request.stop(UnavailableError("the router's lease lapsed"))

    def _after_step(self, step: StepDone) -> None:
        self._step = step.step

    def _report(self) -> LoadReport:
        status = self.status()
        engine = self._parts.engine
        at_rest = not (engine.has_work or self.live_requests) and status.state == "ready"
        if at_rest and engine.has_probe and self._rest is not None:
            return self._rest
        content = common_pb2.WorkerStatus()
        content.CopyFrom(status)
        content.load_age_ns = 0
        report = LoadReport(status=status, content=content.SerializeToString())
        self._rest = None
        if at_rest:
            for field in _MEASURED:
                content.ClearField(field)
            content.resting = True
            report = msgspec.structs.replace(report, at_rest=content.SerializeToString())
            self._rest = report
        return report

    def status(self, with_capabilities: bool = False) -> common_pb2.WorkerStatus:
        """Return this worker's load and health."""
        engine = self._parts.engine
        status = engine_status(engine.load, engine.rates)
        status.MergeFrom(
            common_pb2.WorkerStatus(
                identity=self._parts.identity,
                state="draining" if engine.silent else self.state,
                threads=self._threads,
                transfers=self._parts.transfers,
                event_sequence=self.event_sequence,
                load_age_ns=engine.load_age_ns(time.monotonic_ns()),
                edges=[
                    common_pb2.EdgeRate(prefill_worker_id=name, bytes_per_s=edge.bytes_per_s)
                    for name, edge in self._parts.peers.edges.items()
                    if edge.measured
                ],
                capabilities=self._capabilities if with_capabilities else None,
                last_error=engine.sick,
                adapters=engine.adapters,
                highest_ticket=self._highest_ticket,
            )
        )
        return status

    @property
    def live_requests(self) -> int:
        """Number of requests that have not ended."""
        return sum(not request.ended for request in self._requests.values())

    async def close(self) -> None:
        """Release all requests, so that nothing keeps the KV pool of an ended engine mapped."""
        for request in self._requests.values():
            request.close()
        self._requests.clear()
        self._sessions.clear()
        await self._tasks.close()

    def cancel_all(self, error: BatonError) -> None:
        """End all requests that remain after the drain timeout."""
        for request in self._requests.values():
            if not request.ended:
                request.stop(error)


class Tombstones:
    """Submissions that must not run if they still arrive: the last ``MAX_TOMBSTONES``.

    A long prompt travels in a call of its own. A Cancel, or a Resume that was answered with "not
    held", can overtake it. Its router has already given it up, and would never end it.
    """

    def __init__(self) -> None:
        self._graves: OrderedDict[Key, tuple[int, BatonError]] = OrderedDict()

    def add(self, key: Key, error: BatonError, now_ns: int) -> None:
        """Refuse this submission with ``error``, if it arrives."""
        self._graves[key] = now_ns, error
        self._graves.move_to_end(key)
        if len(self._graves) > MAX_TOMBSTONES:
            self._graves.popitem(last=False)

    def find(self, key: Key) -> BatonError | None:
        """Return why a submission must not run; None if it may."""
        grave = self._graves.get(key)
        return grave[1] if grave else None

    def tick(self, now_ns: int) -> None:
        """Remove tombstones that have expired."""
        while self._graves:
            key, (buried_ns, _) = next(iter(self._graves.items()))
            if now_ns - buried_ns < TOMBSTONE_NS:
                return
            del self._graves[key]
