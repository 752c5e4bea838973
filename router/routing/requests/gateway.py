"""Admits requests, has them placed, and ends each exactly once.

    handler ── submit ──▶ queue ── window ──▶ place ──▶ worker link
       ▲                                                   │ frames
       └── wakeup ◀── record ◀── `WorkerEvents` ◀──────────┘

Everything here runs in one event loop and never waits: a call, an event or a timer is handled, and
the affected HTTP handlers are woken.
"""

import asyncio
import secrets
from collections.abc import Callable
from time import monotonic_ns

from batonpb.common_pb2 import WorkerStatus
from batonpb.decode_pb2 import Cancel, Hello, RouterFrame

from baton.registry.workers import RegistryWatcher
from baton.text.tokenizer import TextTokenizer
from baton.types.errors import (
    BatonError,
    CancelledError_,
    DeadlineError,
    QueueFullError,
    UnavailableError,
)
from baton.wire.compatibility import own_wire
from router.process_core import ProcessCore
from router.request import GenerationRequest
from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import Waiting
from router.routing.peers.shared_prompts import SharedPrompts
from router.routing.peers.shares import Shares
from router.routing.peers.work_counter import WorkCounter
from router.routing.placement.computing_prompts import SiblingWait
from router.routing.placement.placer import Placer, Quote
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.requests.active_request import ActiveRequest, Wakeup, as_error
from router.routing.requests.dispatch import Dispatcher
from router.routing.requests.history import KeptRecords
from router.routing.requests.observer import Observer
from router.routing.requests.record import RequestRecord
from router.routing.requests.sibling_admitter import SiblingAdmitter
from router.routing.requests.slo_admitter import SloAdmitter
from router.routing.requests.tickets import Tickets
from router.routing.workers.link import LinkListener
from router.routing.workers.table import WorkerTable
from router.settings import LaneSettings

_LINGER_S = 10.0  # for which an ended request is kept until its worker confirms the end


class Gateway:
    """Requests and workers of one lane of a router. The prefix index is fed from outside."""

    def __init__(
        self,
        core: ProcessCore,
        settings: LaneSettings,
        tokenizer: TextTokenizer,
        directory: RegistryWatcher,
        prefix_index: PrefixIndex,
        observer: Observer,
    ) -> None:
        self.core = core
        self.settings = settings
        self.prefix_index = prefix_index
        self.router_id = f"router-{secrets.token_hex(4)}"
        incarnation = secrets.token_bytes(16)
        hello = Hello(
            router_id=self.router_id, router_incarnation=incarnation, wire=own_wire(), may_rest=True
        )
        self.workers = WorkerTable(directory, core, settings, hello, observer.task_failed)
        self.admission = Admission(settings.max_queued_requests, core.policies.weight)
        self.shares = Shares(core.policies.weight)
        self.work = WorkCounter()
        self.tickets = Tickets()
        self._tokenizer = tokenizer
        self.observer = observer
        self.placer = Placer(settings, self.workers, prefix_index)
        self.book = self.placer.book
        self.prompts = SharedPrompts(self.placer, self.router_id)
        self._slo = SloAdmitter(
            settings, self.workers, self.placer, self.admission, self._admit, self.finish
        )
        self._siblings = SiblingAdmitter(
            self.placer,
            self.admission,
            self._judge,
            self._waits_for_prefix,
            later=lambda s, look: asyncio.get_running_loop().call_later(s, look),
            shared=self.prompts,
        )
        self._dispatcher = Dispatcher(core, self.workers, self.placer, observer, self.router_id)
        self.on_report: Callable[[str, WorkerStatus, int], None] | None = None  # may change one
        self.active: dict[str, ActiveRequest] = {}
        self._shadows: dict[str, ActiveRequest] = {}  # copies that run, the oldest first
        self.kept = KeptRecords(core.settings.kept_records)
        self._pumping = False
        self._closing = False
        self.asleep = False  # the model is unloaded
        self.starts_from_zero = settings.starts_from_zero  # requests may wait for a first worker
        self.stopping = False  # the fleet stops: responses may finish, lost workers have exited

    def start(self, listener: LinkListener) -> None:
        """Connect to the workers, whose events go to ``listener``. Needs a running event loop."""
        self.workers.start(listener)

    async def close(self) -> None:
        """End every request and close all links."""
        self.end_all()
        self._slo.close()
        await asyncio.sleep(0.05)  # so that cancels are sent
        await self.workers.close()

    def end_all(self) -> None:
        """End every request, as the router is shutting down."""
        self._closing = True
        for active in list(self.active.values()):
            self.finish(active, UnavailableError("the router is shutting down"))

    def submit(self, request: GenerationRequest, wakeup: Wakeup) -> ActiveRequest:
        """Admit a request; ``wakeup`` is set whenever there is news of it.

        Raises:
            QueueFullError: The queue is full.
            UnavailableError: No worker can serve the request in its mode.
        """
        if self._closing:
            raise UnavailableError("the router is shutting down")
        if self.asleep:
            raise UnavailableError("the model is unloaded until an operator loads it")
        waits = self.starts_from_zero and self.placer.awaits_start(request)
        if request.probe or not waits:
            self.placer.check_served(request)
        active = ActiveRequest(RequestRecord(request, self._tokenizer), wakeup)
        active.awaited_start = waits
        active.submitted_ns = now_ns = monotonic_ns()
        loser = None
        if not request.probe:
            cost_tokens = self.placer.cost_tokens(request, len(request.prompt))
            entry = Waiting.of(request, cost_tokens)  # as if nothing were cached
            self.work.arrived(active.id, len(request.prompt), request.sampling.n)
            try:
                loser = self.admission.offer(entry, now_ns, expected_s=self.placer.answer_s)
            except QueueFullError:
                self.work.ended(active.id, served=False)
                raise
            self.kept.keep(active)
        self.active[active.id] = active
        delay_s = max((request.deadline_ns - now_ns) / 1e9, 0)
        active.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, active)
        if request.probe:
            if request.shadow:
                self._shadows[active.id] = active
            active.record.ticket = self.tickets.draw()
            self.place(active)
        else:
            if loser is not None:
                self._evict(self.active[loser.request_id])
            self.pump()
        return active

    def _evict(self, active: ActiveRequest) -> None:
        tenant = active.request.tenant
        expected_s = self.placer.answer_s
        self.finish(active, self.admission.refusal(tenant, monotonic_ns(), expected_s=expected_s))

    def cancel(self, active: ActiveRequest, reason: str = "the client went away") -> None:
        """Cancel a request whose client has disconnected or does not need the response."""
        if not active.record.ended:
            self.observer.cancelled(active)
        self.finish(active, CancelledError_(reason))

    def abort(self, active: ActiveRequest) -> None:
        """End a request with the tokens that it has; one without a result to show, by an error."""
        record = active.record
        request = active.request
        if request.pooling or (request.wants_prompt_logprobs and record.prompt_logprobs is None):
            self.cancel(active, "the request was aborted")
        elif record.abort(monotonic_ns()):
            self.observer.cancelled(active)
            self.cancel_at_worker(active)
            self.release(active)

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended, or whose worker has not confirmed the end."""
        return len(self.active)

    @property
    def has_spare_place(self) -> bool:
        """True if a copy of a request may run: no request waits, and the window is not full."""
        return len(self._shadows) < self._places_for_shadows(self._window)

    @property
    def _window(self) -> int:
        return self.shares.window(len(self.workers.usable) * self.settings.window_requests)

    def _places_for_shadows(self, window: int) -> int:
        waiting = self.admission.waiting + self._slo.waiting
        return 0 if waiting else max(window - self.admission.running, 0)

    def _shed(self, window: int) -> None:
        """End the copies whose places requests need, the newest first."""
        for active in list(self._shadows.values())[self._places_for_shadows(window) :]:
            self.finish(active, CancelledError_("requests of clients need its place"))

    def pump(self) -> None:
        """Place the requests that fit into this router's part of the window."""
        if self._pumping:  # a placement failed at once and freed its place: the loop sees it
            return
        window = self._window
        self._pumping = True
        try:
            while not self._awaits_start() and (entry := self.admission.pop(window)) is not None:
                active = self.active[entry.request_id]  # a request that ends has left the queue
                if self.admission.overtook:
                    active.record.note("turn of its session or tier", monotonic_ns())
                self._siblings.admit(active, active.request, entry)
            if self._shadows:
                self._shed(window)
        finally:
            self._pumping = False
        waiting = self.admission.waiting + self._slo.waiting + self._siblings.waiting
        self.observer.queue(waiting, self.admission.max_waiting)

    def _awaits_start(self) -> bool:
        """Return whether the next request waits for a worker that starts."""
        head = self.admission.head if self.starts_from_zero else None
        return head is not None and self.placer.awaits_start(self.active[head.request_id].request)

    def _waits_for_prefix(self, active: ActiveRequest, wait: SiblingWait) -> None:
        held = wait.blocks * wait.prompt.worker.block_tokens
        self.work.placed(active.id, max(len(active.request.prompt) - held, 1))
        active.record.note(f"waits for the prefix of {wait.prompt.request_id}", monotonic_ns())
        self.observer.metrics.inc("baton_prefix_waits")

    def _judge(self, active: ActiveRequest, entry: Waiting, quote: Quote | None) -> None:
        active.admitted = True
        slo = active.request.slo
        if slo is None or active.awaited_start:
            self._admit(active, entry, quote)
        else:
            self._slo.admit(active, entry, slo)

    def _admit(self, active: ActiveRequest, entry: Waiting, quote: Quote | None = None) -> None:
        active.admitted = True
        active.record.ticket = self.tickets.draw()
        self.place(active, quote=quote)
        if active.placement is not None:  # now it is known what is cached
            uncached_tokens = active.placement.chosen.uncached_tokens
            cost_tokens = self.placer.cost_tokens(active.request, uncached_tokens)
            self.admission.charge(entry, cost_tokens)

    def place(
        self,
        active: ActiveRequest,
        avoid: bytes = b"",
        why: str = "",
        quote: Quote | None = None,
    ) -> None:
        """Choose workers and send. ``avoid`` is an incarnation that just failed, for ``why``."""
        try:
            self._dispatcher.begin_attempt(active, avoid, why, quote)
            if active.placement is not None:
                self.work.placed(active.id, active.placement.chosen.uncached_tokens)
        except Exception as fault:  # noqa: BLE001 - logged there; only this request ends
            active.decode_id = None
            self.fail_placed(active, as_error(active, fault))

    def _expire(self, active: ActiveRequest) -> None:
        waited_s = (active.request.deadline_ns - active.request.arrived_ns) / 1e9
        self.observer.timed_out(active)
        self.finish(active, DeadlineError(f"the request did not end within {waited_s:g} s"))

    def finish(self, active: ActiveRequest, error: BatonError) -> None:
        """End a request with an error, and cancel it at its worker."""
        if not active.record.fail(error, monotonic_ns()):
            return
        self.cancel_at_worker(active)
        self.release(active)

    def cancel_at_worker(self, active: ActiveRequest, choices: tuple[int, ...] = ()) -> None:
        """Cancel a request, or some of its ``choices``, and note when."""
        if not choices:
            active.cancelled_ns = monotonic_ns()
        self.send_cancel(active, choices)

    def send_cancel(self, active: ActiveRequest, choices: tuple[int, ...] = ()) -> None:
        """Send the worker the cancel of a request, or of some of its ``choices``."""
        link = self.workers.link(active.decode_id)
        if link is None or active.record.attempt == 0:
            return
        cancel = Cancel(request_id=active.id, attempt=active.record.attempt, choices=choices)
        link.send(RouterFrame(cancel=cancel))

    def release(self, active: ActiveRequest) -> None:
        """Free the place of a request that has ended; keep it until the worker confirms."""
        now_ns = monotonic_ns()
        active.stop_timers()
        active.wants_prefill = False
        self._shadows.pop(active.id, None)
        self.placer.release(active.id, now_ns)
        self.work.ended(active.id, served=active.record.error is None)
        if active.admitted:
            self.admission.release(active.request.sampling.n, now_ns, active.request.tenant)
            active.admitted = False
        elif not (active.decode_id or active.request.probe or self._leave(active.id)):
            self.admission.leave(active.id)
        if active.decode_id is None:
            self.active.pop(active.id, None)
        else:
            loop = asyncio.get_running_loop()
            active.timer = loop.call_later(_LINGER_S, self.expire_lingering, active)
        self._learn(active)
        if active.record.error is None:
            self.placer.learn(active.request, active.record.completion_tokens)
        active.wakeup.set()
        self.pump()

    def _leave(self, request_id: str) -> bool:  # a place outside the queue
        return self._siblings.leave(request_id) or self._slo.leave(request_id)

    def on_response_sent(self, active: ActiveRequest) -> None:
        """Note that the handler has written the last byte, or the client has disconnected."""
        active.delivered_ns = monotonic_ns()
        if active.id not in self.active or active.record.times is not None:
            self.observer.record_finished(active)
        active.record.release_payload()

    def _learn(self, active: ActiveRequest) -> None:
        """Teach the gate how long the first token and the others took."""
        record = active.record
        if active.request.slo is None or active.placement is None or not record.first_token_ns:
            return
        if record.attempt == 1:
            first_s = (record.first_token_ns - active.placed_ns) / 1e9
            predicted_s = active.placement.chosen.terms.first_token_s
            self._slo.gate.learn_wait(predicted_s, first_s, record.prompt_tokens)
            tokens = record.completion_tokens // active.request.sampling.n
            # The second token also waits for the KV transfer and for the step that runs.
            step_s = (record.last_token_ns - record.second_token_ns) / 1e9 / max(tokens - 2, 1)
            self._slo.gate.learn_step(active.predicted_step_s, step_s, tokens)

    def expire_lingering(self, active: ActiveRequest) -> None:
        """Forget an ended request whose worker has not confirmed the end."""
        if self.active.pop(active.id, None) is not None and active.delivered_ns:
            self.observer.record_finished(active)

    def held_by(self, worker_id: str) -> list[ActiveRequest]:
        """Return the requests that a worker holds."""
        return [active for active in self.active.values() if active.decode_id == worker_id]

    def fail_placed(self, active: ActiveRequest, error: BatonError) -> None:
        """End a request that no worker holds any more."""
        self.active.pop(active.id, None)
        self.fail(active, error)

    def fail(self, active: ActiveRequest, error: BatonError) -> None:
        """End a request whose worker has the error already."""
        if active.record.fail(error, monotonic_ns()):
            self.release(active)
