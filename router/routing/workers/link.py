"""Link to one worker: a multiplexed stream, heartbeats, reopening, and detection of its death.

    connecting ──first status──▶ live ──stream breaks──▶ reopening ──within reopen_s──▶ live
                                  │                          └─ refused, or too late ─▶ dead
                                  └──silent for silence_s──▶ dead        dead ──first status──▶ live

`silence.py` defines silence, and when a worker without work gets a heartbeat.

A lost stream is not a cancel: the worker keeps its requests by lease, and when the same incarnation
answers again the listener resumes them. A refused connection means that no process listens there,
so that incarnation is dead at once. The link keeps trying: a new incarnation may come up.

Dead to this router is not always dead: a refused connection or another incarnation proves a death
(unless the worker was draining: that one was stopped). Silence proves none.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from time import monotonic_ns
from typing import Protocol

import grpc
import grpc.aio
from batonpb import decode_pb2 as pb
from batonpb.common_pb2 import WorkerStatus
from batonpb.decode_pb2 import Heartbeat, Hello, RouterFrame, Submission, WorkerFrame
from batonpb.decode_pb2_grpc import DecodeStub

from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import UnavailableError
from baton.wire.codecs import gather
from baton.wire.compatibility import GATHERED_WIRE
from baton.wire.grpc_options import ROUTER_OPTIONS, open_channel
from baton.wire.tls import distrust
from router.process_core import ProcessCore
from router.routing.workers.silence import Rest, UnansweredFrames

_LOG = logging.getLogger(__name__)

_WATCH_S = 0.1  # between two checks, at least
_RETRY_S = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
_GATHERED_FRAMES = 64  # per write: a worker handles them at once, which takes 20 ms
_GATHERED_BYTES = 256 << 10
_RETIRED_S = 15.0  # longer than a submission in a call of its own takes


class LinkListener(Protocol):
    """Receiver of a link's events. Calls come in the event loop and must not block."""

    def on_live(self, link: "WorkerLink", *, same_life: bool) -> None:
        """Handle a live worker. ``same_life``: the incarnation that was live before the break."""

    def on_frame(self, link: "WorkerLink", frame: WorkerFrame) -> None:
        """Handle a frame, whose status, if any, is in ``link.status`` already."""

    def on_dead(self, link: "WorkerLink", incarnation: bytes, reason: str, *, died: bool) -> None:
        """Handle an incarnation that is dead to this router. ``died``: not by a regular stop."""

    def on_broken(self, link: "WorkerLink", kind: str) -> None:
        """Handle a broken stream, which is being reopened."""

    def on_submit_failed(self, link: "WorkerLink", submission: Submission, reason: str) -> None:
        """Handle a submission in a call of its own that did not arrive."""


class WorkerLink:
    """Stream of this router to one worker.

    Args:
        core: Token, certificates and time limits of this router.
    """

    def __init__(
        self,
        worker_id: str,
        address: str,
        listener: LinkListener,
        hello: Hello,
        core: ProcessCore,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.worker_id = worker_id
        self.address = address
        self.on_change: Callable[[], None] = lambda: None
        self._status: WorkerStatus | None = None
        self.capabilities = WorkerStatus().capabilities
        self.status_ns = 0
        self.incarnation = b""
        self._live = False
        self.distrust = ""  # why worker and router do not trust each other
        self._logged_distrust = ""
        self._listener = listener
        self._hello = hello
        self._token = core.fleet_token
        self._tls = core.tls
        settings = core.settings
        self._heartbeat_s = settings.heartbeat_s
        self._silence_ns = int(settings.silence_s * 1e9)
        self._reopen_s = settings.reopen_s
        self._out: deque[RouterFrame] = deque()
        self._wake = asyncio.Event()
        self._exchange = UnansweredFrames(ALIVE.now_ns())
        self._beat_ns = 0  # interval until the next heartbeat, as of its last computation
        self._owes = asyncio.Event()  # the worker must answer: check how long it has been silent
        self._asks = False  # send a heartbeat at once
        self.rest = Rest()
        self.heard_ns = 0
        self._broken_ns = 0  # on ALIVE's clock; 0: the stream is not broken
        self._tasks = BackgroundTasks(f"link {worker_id}", count_failure)
        self._stub: DecodeStub | None = None

    @property
    def status(self) -> WorkerStatus | None:
        """Last report of the worker."""
        return self._status

    @status.setter
    def status(self, status: WorkerStatus | None) -> None:
        self._status = status
        self.on_change()

    @property
    def live(self) -> bool:
        """True while the stream is open and the worker answers."""
        return self._live

    @live.setter
    def live(self, live: bool) -> None:
        self._live = live
        self.on_change()

    @property
    def known(self) -> bool:
        """True if the worker is live, or its stream broke so recently that it may be."""
        return self.live or self._broken_ns != 0

    @property
    def resting(self) -> bool:
        """True if the worker has no work and need not send anything."""
        return self._live and self._exchange.owes_nothing

    def ask(self) -> None:
        """Send a heartbeat to a worker at rest, which must answer."""
        if self.resting:
            self._asks = True
            self._wake.set()

    def start(self) -> None:
        """Start connecting to the worker."""
        self._tasks.keep(self._run, "link")

    async def close(self) -> None:
        """Close the stream, without an event."""
        await self._tasks.close()
        self.live = False

    def send(self, frame: RouterFrame) -> None:
        """Queue a frame, to be sent in order, even after a break, but not to a dead worker."""
        if not self.known:
            return
        self._out.append(frame)
        self._wake.set()

    def submit(self, submission: Submission, *, alone: bool) -> None:
        """Send a submission; ``alone`` in a call of its own, so that it delays no tokens."""
        if not alone:
            self.send(RouterFrame(submit=submission))
            return
        self._tasks.spawn(self._submit_alone(submission), "submit")

    async def _submit_alone(self, submission: Submission) -> None:
        stub = self._stub
        reason = "no connection"
        if stub is not None:
            self._exchange.call_began(ALIVE.now_ns())
            self._pace_changed()
            try:
                await stub.Submit(submission, metadata=self._token.metadata, timeout=10)
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            else:
                return
            finally:
                self._exchange.call_ended(ALIVE.now_ns())
        self._listener.on_submit_failed(self, submission, reason)

    async def expand(self, image: bytes, timeout_s: float) -> pb.ImageTokens:
        """Return the tokens of an image in prompts, by the engine of a live worker."""
        if self._stub is None:
            raise UnavailableError(f"there is no connection to {self.worker_id}")
        question = pb.ImageQuestion(data=image)
        answer = self._stub.Expand(question, metadata=self._token.metadata, timeout=timeout_s)
        return await answer  # type: ignore[no-any-return]

    def die(self, reason: str, *, died: bool = False) -> None:
        """Declare the live incarnation dead to this router, if there is one.

        With ``died`` its death is proven; a draining worker has stopped regularly.
        """
        if not self.known:
            return
        if self.status is not None and self.status.state == "draining":
            died = False
        self.live = False
        self._broken_ns = 0
        self._out.clear()
        try:
            self._listener.on_dead(self, self.incarnation, reason, died=died)
        except Exception:  # noqa: BLE001 - logged; the link must be reopened anyway
            _LOG.exception("cannot handle the death of worker=%s", self.worker_id)

    async def _run(self) -> None:
        channel: grpc.aio.Channel | None = None
        shown: grpc.ChannelCredentials | None = None
        failures = 0
        try:
            while True:
                heard_before = self.heard_ns
                before = shown
                shown = self._tls.channel_credentials() if self._tls is not None else None
                if channel is None or shown is not before:
                    if channel is not None:  # a submission may still be under way there
                        self._tasks.spawn(channel.close(_RETIRED_S), "retired channel")
                    channel = open_channel(self.address, self._tls, ROUTER_OPTIONS)
                    self._stub = DecodeStub(channel)
                try:
                    reason, refused = await self._serve_once(DecodeStub(channel))
                    self._after_break(reason, refused)
                    self._note_distrust(reason)
                except Exception:  # noqa: BLE001 - logged; no caller would see it
                    _LOG.exception("link failed inside the router: worker=%s", self.worker_id)
                    self.die("the router failed to handle a frame of the worker")
                if self.heard_ns != heard_before:
                    failures = 0
                delay_s = _RETRY_S[min(failures, len(_RETRY_S) - 1)]
                failures += 1
                await asyncio.sleep(delay_s)
        finally:
            if channel is not None:
                await channel.close(grace=None)

    def _note_distrust(self, reason: str) -> None:
        self.distrust = distrust(reason)
        if self.distrust and self.distrust != self._logged_distrust:
            _LOG.error(
                "refused: worker=%s address=%s: %s", self.worker_id, self.address, self.distrust
            )
        self._logged_distrust = self.distrust or self._logged_distrust

    def _after_break(self, reason: str, refused: bool) -> None:
        if self.live:
            self.live = False
            self._broken_ns = ALIVE.now_ns()
            self._listener.on_broken(self, "refused" if refused else "broken")
        if not self._broken_ns:
            return
        late = ALIVE.now_ns() - self._broken_ns > self._reopen_s * 1e9
        if refused or late:
            self.die(reason, died=refused)

    async def _serve_once(self, stub: DecodeStub) -> tuple[str, bool]:
        """Run one stream; return why it ended, and whether the connection was refused."""
        call = stub.Serve(metadata=self._token.metadata)
        self._exchange.opened(ALIVE.now_ns())
        ended: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()
        parts = [
            self._tasks.spawn(_part(partial(self._read, call), ended), "read"),
            self._tasks.spawn(_part(partial(self._write, call), ended), "write"),
            self._tasks.spawn(_part(self._watch, ended), "watch"),
        ]
        try:
            return await ended
        finally:
            call.cancel()
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            since_ns = self._exchange.silent_since_ns
            if since_ns is None:
                self._owes.clear()
                await self._owes.wait()
                continue
            now_ns = ALIVE.now_ns()
            left_ns = self._silence_ns - (now_ns - since_ns)
            if left_ns < 0:
                self.die(f"silent for {self._silence_ns / 1e9:g} s")
                return
            if self._broken_ns:
                left_ns = 0
                if now_ns - self._broken_ns > self._reopen_s * 1e9:
                    self.die("the stream was not reopened in time")
            await asyncio.sleep(max(left_ns / 1e9, _WATCH_S))

    async def _read(self, call: "grpc.aio.StreamStreamCall[RouterFrame, WorkerFrame]") -> None:
        first = True
        while True:
            frame = await call.read()
            if not isinstance(frame, WorkerFrame):  # gRPC's end of stream
                code = await call.code()
                details = await call.details()
                if code is not grpc.StatusCode.OK:
                    raise grpc.aio.AioRpcError(
                        code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details
                    )
                return
            self.heard_ns = monotonic_ns()
            now_ns = ALIVE.now_ns()
            if frame.HasField("status"):
                self._exchange.took(frame.heard, now_ns, resting=frame.status.resting)
                self._owes.set()
                self._take_status(frame.status, first)
                first = False
                self._pace_changed()
            else:
                self._exchange.took(frame.heard, now_ns)
                if not (first or frame.tokens):  # nothing is new: the last report is current
                    self.status_ns = self.heard_ns
            if self.live:
                self._listener.on_frame(self, frame)

    def _take_status(self, status: WorkerStatus, first: bool) -> None:
        incarnation = status.identity.incarnation
        same_life = incarnation == self.incarnation and self._broken_ns != 0
        continues = self.live and not first
        if not same_life and not continues:
            # The old incarnation, which requests may still wait for.
            self.die("the worker was restarted", died=True)
        if status.HasField("capabilities"):
            self.capabilities = status.capabilities
        self.status = status
        self.status_ns = self.heard_ns
        if continues:
            return
        self.incarnation = incarnation
        self.distrust = self._logged_distrust = ""
        self.live = True
        self._broken_ns = 0
        self._wake.set()
        self._listener.on_live(self, same_life=same_life)

    async def _write(self, call: "grpc.aio.StreamStreamCall[RouterFrame, WorkerFrame]") -> None:
        loop = asyncio.get_running_loop()
        sequence = 0
        await call.write(RouterFrame(hello=self._hello))
        self._exchange.wrote(ALIVE.now_ns())
        wrote_s = -self._heartbeat_s
        while True:
            # Frames wait until the worker has sent its first status.
            while self._out and self.live:
                frames = self._next_frames()
                await call.write(gather(frames))
                self._exchange.wrote(ALIVE.now_ns())
                wrote_s = loop.time()  # any frame renews a lease
                self._owes.set()
                for frame in frames:
                    if self._out and self._out[0] is frame:
                        self._out.popleft()
            if self._asks or loop.time() >= wrote_s + self._next_beat_s():
                sequence += 1
                self._asks = False
                await call.write(RouterFrame(heartbeat=Heartbeat(sequence=sequence)))
                self._exchange.wrote(ALIVE.now_ns(), beat=True)
                wrote_s = loop.time()
                self._owes.set()
            self._wake.clear()
            if self._asks or (self._out and self.live):
                continue
            left_s = wrote_s + self._next_beat_s() - loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(left_s, 0)):
                    await self._wake.wait()

    def _next_frames(self) -> list[RouterFrame]:
        """Return the frames that the next write takes from the queue, at least one.

        gRPC takes one write at a time, and a write of a busy router lasts for several iterations of
        its loop. So waiting frames travel together, if the worker can read them.
        """
        if self.capabilities.wire.max < GATHERED_WIRE:
            return [self._out[0]]
        frames: list[RouterFrame] = []
        size_bytes = 0
        for frame in islice(self._out, _GATHERED_FRAMES):
            size_bytes += frame.ByteSize()
            if frames and size_bytes > _GATHERED_BYTES:
                break
            frames.append(frame)
        return frames

    def _next_beat_s(self) -> float:
        self._beat_ns = self._current_beat_ns()
        return self._beat_ns / 1e9

    def _pace_changed(self) -> None:
        """Wake the writer if its next heartbeat is due earlier than expected."""
        if self._current_beat_ns() < self._beat_ns:
            self._wake.set()
            self._owes.set()

    def _current_beat_ns(self) -> int:
        """Return the heartbeat interval; an idle worker holds no leases."""
        status = self._status
        idle = status is not None and not (status.running or status.waiting or status.answering)
        heartbeat_ns = int(self._heartbeat_s * 1e9)
        rest_ns = int(self.rest.beat_s * 1e9)
        return self._exchange.beat_ns(ALIVE.now_ns(), heartbeat_ns, rest_ns, idle=idle)


async def _part(
    work: Callable[[], Awaitable[None]], ended: "asyncio.Future[tuple[str, bool]]"
) -> None:
    """Run one of the loops of a stream. The first that ends sets the reason in ``ended``."""
    reason = "the stream ended"
    refused = False
    try:
        await work()
    except grpc.aio.AioRpcError as error:
        reason = error.details() or error.code().name
        refused = "Connection refused" in reason
    except asyncio.InvalidStateError:
        pass  # the other side has closed the stream
    except Exception as error:
        if not ended.done():
            ended.set_exception(error)
        raise
    finally:
        if not ended.done():
            ended.set_result((reason, refused))
