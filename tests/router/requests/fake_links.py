"""A real gateway over links that have no network: a test reads what was sent, and says frames."""

from functools import partial
from time import monotonic_ns

from batonpb import common_pb2 as common
from batonpb import decode_pb2 as pb

from baton.telemetry.metrics import Metrics
from baton.types.params import SamplingParams
from baton.wire.tokens import pack_tokens
from router.process_core import ProcessCore
from router.request import GenerationRequest
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.requests.gateway import Gateway
from router.routing.requests.observer import Observer
from router.routing.requests.worker_events import WorkerEvents
from router.routing.workers.link import WorkerLink
from router.routing.workers.slot import WorkerSlot
from tests.router.conftest import record_of
from tests.router.emulated_worker import EmulatedWorker
from tests.router.settings import settings_of
from tests.router.static_directory import StaticDirectory


class FakeGateway(Gateway):
    """A gateway whose links are `FakeLink`; it never starts."""

    def __init__(self, *parts) -> None:
        super().__init__(*parts)
        self.events = WorkerEvents(self)


class FakeLink(WorkerLink):
    """Live at once. `sent` is what the router said, `unary` what it submitted alone."""

    def __init__(self, gateway: Gateway, worker_id: str) -> None:
        is_fake = isinstance(gateway, FakeGateway)
        events = gateway.events if is_fake else gateway.workers._listener
        super().__init__(worker_id, "fake", events, pb.Hello(), ProcessCore())
        worker = EmulatedWorker(worker_id, worker_id.split("-")[0])
        self.status = worker._status(first=True)
        self.capabilities = self.status.capabilities
        self.incarnation, self.live = worker.incarnation, True
        self.status_ns = monotonic_ns()
        self.unary: list[pb.Submission] = []
        slot = WorkerSlot(record_of(worker_id, "fake", worker_id.split("-")[0]))
        gateway.workers._slots[worker_id] = slot
        slot.on_change = partial(gateway.workers._note_change, worker_id)
        slot.link = self

    def start(self) -> None:
        pass

    def submit(self, submission: pb.Submission, *, alone: bool) -> None:
        if alone:
            self.unary.append(submission)
        else:
            self.send(pb.RouterFrame(submit=submission))

    def sent(self, kind: str) -> list:
        """All messages of that kind so far."""
        return [getattr(f, kind) for f in self._out if f.WhichOneof("frame") == kind]

    def say(self, **fields) -> None:
        """A frame from the worker."""
        self._listener.on_frame(self, pb.WorkerFrame(**fields))

    def broken(self) -> None:
        """The stream breaks, and is not open yet."""
        self.live, self._broken_ns = False, monotonic_ns()
        self._listener.on_broken(self, "broken")

    def open_again(self) -> None:
        self.live, self._broken_ns = True, 0
        self._listener.on_live(self, same_life=True)


def fake_gateway(model, **settings) -> FakeGateway:
    core, lane = settings_of(**settings)
    observer = Observer(Metrics("router", model="m"))
    return FakeGateway(core, lane, model.tokenizer, StaticDirectory(), PrefixIndex(), observer)


def request(request_id="r", *, n=1, max_tokens=8, prompt=(1, 2, 3), seed=1, **more):
    now_ns = monotonic_ns()
    return GenerationRequest(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, n=n, seed=seed),
        arrived_ns=now_ns,
        deadline_ns=now_ns + 600 * 10**9,
        **more,
    )


def run(index: int, ids, reason: str = "", *, choice=0, attempt=1, request_id="r") -> pb.TokenRun:
    return pb.TokenRun(
        request_id=request_id,
        attempt=attempt,
        choice=choice,
        index=index,
        token_ids=pack_tokens(ids),
        finish_reason=reason,
    )


def end(attempt: int = 1, request_id: str = "r", error: common.Error | None = None):
    return pb.RequestEnd(request_id=request_id, attempt=attempt, error=error)
