"""A real ``WorkerLink`` and a real ``DecodeService`` in one event loop whose time is made up.

Nothing is computed: a request is held until the test finishes it. What is real is the stream, the
call beside it, heartbeats, rests, silence and leases. An hour of them takes a moment.
"""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import grpc
from batonpb import common_pb2 as common
from batonpb import decode_pb2 as pb

import baton.telemetry.alive_clock
import decode_worker.service
import decode_worker.session
import router.routing.workers.link
from baton.wire.codecs import scatter
from baton.wire.compatibility import WIRE_MAX, WIRE_MIN, own_wire
from decode_worker.service import DecodeService
from router.process_core import ProcessCore
from router.routing.workers.link import WorkerLink

LEASE_MS = 5000
MODULES = (router.routing.workers.link, baton.telemetry.alive_clock)
INCARNATION = b"i" * 16


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time: the clock moves to the next timer when nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def now_ns(self) -> int:
        return int(self.now_s * 1e9)

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled and not self._ready:
            self._timer_cancelled_count -= 1
            self._scheduled[0]._scheduled = False
            asyncio.base_events.heapq.heappop(self._scheduled)
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0]._when)
        super()._run_once()


class HeldRequest:
    """What ``DecodeService`` keeps of a request."""

    def __init__(self, submission: pb.Submission, session, service: "TimedService") -> None:
        self.submission = submission
        self.session = session
        self.service = service
        self.resumed = True
        self.ended = False
        self.ended_ns = 0

    def tick(self, now_ns: int) -> None:
        pass

    def forget(self) -> None:
        pass

    def resume(self, next_index: list[int]) -> None:
        self.resumed = True
        if self.ended:
            self._say_end()

    def stop(self, error) -> None:
        if not self.ended:
            if "lapsed" in str(error):
                self.service.lapsed.append(self.submission.request_id)
            self.finish()

    def finish(self) -> None:
        self.ended = True
        self.ended_ns = decode_worker.service.time.monotonic_ns()
        self._say_end()

    def _say_end(self) -> None:
        name = self.submission.request_id
        self.session.end(pb.RequestEnd(request_id=name, attempt=self.submission.attempt))


class TimedService(DecodeService):
    """The service without an engine."""

    def __init__(self) -> None:
        engine = SimpleNamespace(
            after_step=[], silent=False, has_probe=False, watch=lambda now_ns: None
        )
        parts = SimpleNamespace(engine=engine, metrics=Mock(), count_task_failure=Mock())
        super().__init__(parts, common.Capabilities(wire=own_wire()), threads=1)
        self.lapsed: list[str] = []

    def _begin(self, submission, session) -> None:
        self._requests[submission.request_id] = HeldRequest(submission, session, self)

    def running(self) -> list[HeldRequest]:
        return [request for request in self._requests.values() if not request.ended]

    def _report(self):
        self._parts.engine.has_work = bool(self.live_requests)
        return super()._report()

    def status(self, with_capabilities: bool = False) -> common.WorkerStatus:
        identity = common.WorkerIdentity(worker_id="decode-0", incarnation=INCARNATION)
        status = common.WorkerStatus(
            identity=identity, state=self.state, running=self.live_requests
        )
        if with_capabilities:
            status.capabilities.CopyFrom(self._capabilities)
        return status


class Stream:
    """gRPC's stream, for both ends."""

    def __init__(self, service: TimedService, frames_up: list[pb.RouterFrame]) -> None:
        self._all_up = frames_up
        self._up: asyncio.Queue = asyncio.Queue()
        self._down: asyncio.Queue = asyncio.Queue()
        self._served = asyncio.create_task(self._serve(service))
        self.broken = False

    async def _serve(self, service: TimedService) -> None:
        async for frame in service.Serve(self._frames(), Mock()):
            self._down.put_nowait(frame)
        self.cut()

    async def _frames(self):
        while (frame := await self._up.get()) is not None:
            yield frame

    def cut(self) -> None:
        """Break it for both ends; what is under way is lost."""
        self.broken = True
        self._up.put_nowait(None)
        self._down.put_nowait(None)

    async def write(self, frame: pb.RouterFrame) -> None:
        if self.broken:
            raise asyncio.InvalidStateError
        self._all_up.append(frame)
        self._up.put_nowait(frame)

    async def read(self):
        return await self._down.get()

    async def code(self):
        return grpc.StatusCode.OK

    async def details(self):
        return ""

    def cancel(self) -> None:
        self.cut()


class Fleet:
    """One router's link to one worker; also the link's listener, and its gRPC stub."""

    def __init__(self, monkeypatch) -> None:
        loop = asyncio.get_running_loop()
        for module in MODULES:
            monkeypatch.setattr(module, "monotonic_ns", loop.now_ns)
        for module in (decode_worker.service, decode_worker.session):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=loop.now_ns))
        monkeypatch.setattr(router.routing.workers.link, "open_channel", lambda *_: AsyncMock())
        monkeypatch.setattr(router.routing.workers.link, "DecodeStub", lambda _: self)
        self.service = TimedService()
        self.sent: list[pb.RouterFrame] = []  # by the router, on any stream
        self.stream: Stream | None = None
        self.deaths: list[str] = []
        self.active: set[str] = set()
        self.delays_s = (0.0, 0.0)  # of the next call beside the stream: before and behind it
        self._number = 0
        wire = common.WireRange(min=WIRE_MIN, max=WIRE_MAX)
        hello = pb.Hello(router_id="router-0", wire=wire, may_rest=True)
        self.link = WorkerLink("decode-0", "fake", self, hello, ProcessCore())
        self._ticking = loop.create_task(self.service.tick_forever())
        self.link.start()

    async def close(self) -> None:
        self._ticking.cancel()
        self.link._stub = None
        closing = asyncio.create_task(self.link.close())
        if self.stream is not None:
            self.stream.cut()
        await closing
        await asyncio.gather(self._ticking, return_exceptions=True)

    # --- gRPC -----------------------------------------------------------------------------------

    def Serve(self, metadata):
        self.stream = Stream(self.service, self.sent)
        return self.stream

    async def Submit(self, submission, metadata, timeout):
        before_s, behind_s = self.delays_s
        await asyncio.sleep(before_s)
        await self.service.Submit(submission, Mock())
        await asyncio.sleep(behind_s)

    # --- the listener ---------------------------------------------------------------------------

    def on_live(self, link, *, same_life) -> None:
        for name in sorted(self.active):
            link.send(pb.RouterFrame(resume=pb.Resume(request_id=name, attempt=1)))

    def on_frame(self, link, frame) -> None:
        for end in frame.ends:
            self.active.discard(end.request_id)

    def on_dead(self, link, incarnation, reason, *, died) -> None:
        self.deaths.append(reason)

    def on_broken(self, link, kind) -> None:
        pass

    def on_submit_failed(self, link, submission, reason) -> None:
        self.active.discard(submission.request_id)

    # --- what a test does -----------------------------------------------------------------------

    def submit(self, *, alone: bool, before_s: float = 0.0, behind_s: float = 0.0) -> str:
        """Send a request; ``alone`` on a call of its own."""
        name = f"r{self._number}"
        self._number += 1
        self.delays_s = (before_s, behind_s)
        self.active.add(name)
        submission = pb.Submission(
            request_id=name, attempt=1, router_id="router-0", lease_ms=LEASE_MS
        )
        self.link.submit(submission, alone=alone)
        return name

    def heartbeats(self) -> int:
        return sum(frame.HasField("heartbeat") for frame in self.sent)

    def submissions(self) -> list[list[str]]:
        """The request ids in each frame that carries submissions."""
        found = [
            [single.submit.request_id for single in scatter(frame) if single.HasField("submit")]
            for frame in self.sent
        ]
        return [names for names in found if names]


async def fleet(monkeypatch) -> Fleet:
    """A fleet whose link is live."""
    made = Fleet(monkeypatch)
    while not made.link.live:
        await asyncio.sleep(0.1)
    return made
