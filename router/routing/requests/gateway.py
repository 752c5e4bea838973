"""Admits requests, has them placed, and follows each to its end.

    handler ── submit ──▶ queue ── window ──▶ place ──▶ worker link
       ▲                                                   │ frames
       └── wakeup ◀── record ◀── on_frame / on_dead ◀──────┘

Everything here runs in one event loop and never waits: a frame, a death or a timer is handled, and
the affected HTTP handlers are woken.
"""

import asyncio
import logging
import secrets
from time import monotonic_ns

from batonpb.decode_pb2 import (
    Cancel,
    Hello,
    RequestEnd,
    RouterFrame,
    Submission,
    TokenRun,
    WorkerFrame,
)

from baton.text.tokenizer import TextTokenizer
from baton.types.errors import (
    BatonError,
    CancelledError_,
    DeadlineError,
    InternalError,
    QueueFullError,
    UnavailableError,
    WorkerLostError,
)
from baton.wire.codecs import error_from_wire
from baton.wire.compatibility import own_wire
from router.process_core import ProcessCore
from router.request import GenerationRequest
from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import Waiting
from router.routing.peers.shares import Shares
from router.routing.peers.work_counter import WorkCounter
from router.routing.placement.booked_load import LoadBook
from router.routing.placement.placer import Placer, Quote
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.requests.active_request import ActiveRequest, Wakeup, as_error
from router.routing.requests.dispatch import Dispatcher
from router.routing.requests.history import KeptRecords
from router.routing.requests.observer import Observer
from router.routing.requests.prefill_recovery import PrefillRecovery
from router.routing.requests.record import RequestRecord
from router.routing.requests.recovery_policy import after_worker_death, may_try_again
from router.routing.requests.slo_admitter import SloAdmitter
from router.routing.requests.stream_repair import StreamRepair
from router.routing.requests.tickets import Tickets
from router.routing.workers.link import WorkerLink
from router.routing.workers.table import WorkerDirectory, WorkerTable
from router.settings import LaneSettings

_LOG = logging.getLogger(__name__)

_LINGER_S = 10.0  # for which an ended request is kept until its worker confirms the end


class Gateway:
    """Requests and workers of one lane of a router. The prefix index is fed from outside."""

    def __init__(
        self,
        core: ProcessCore,
        settings: LaneSettings,
        tokenizer: TextTokenizer,
        directory: WorkerDirectory,
        prefix_index: PrefixIndex,
        observer: Observer,
    ) -> None:
        self.settings = settings
        self.prefix_index = prefix_index
        self.router_id = f"router-{secrets.token_hex(4)}"
        incarnation = secrets.token_bytes(16)
        hello = Hello(
            router_id=self.router_id, router_incarnation=incarnation, wire=own_wire(), may_rest=True
        )
        self.workers = WorkerTable(directory, core, settings, hello, self, observer.task_failed)
        self.workers.on_turn = self._on_turn
        self.admission = Admission(settings.max_queued_requests, core.policies.weight)
        self.shares = Shares(core.policies.weight)
        self.work = WorkCounter()
        self.tickets = Tickets()
        self._tokenizer = tokenizer
        self._observer = observer
        self._book = LoadBook()
        self._placer = Placer(settings, self.workers, prefix_index, self._book)
        self._slo = SloAdmitter(
            settings.window_requests,
            settings.max_queued_requests,
            self.workers,
            self._placer,
            self.admission,
            self._admit,
            self._finish,
        )
        self._dispatcher = Dispatcher(core, self.workers, self._placer, observer, self.router_id)
        self._prefill_recovery = PrefillRecovery(
            core, self.workers, self._book, observer, self._fail_at
        )
        self._stream_repair = StreamRepair()
        self._active: dict[str, ActiveRequest] = {}
        self._shadows: dict[str, ActiveRequest] = {}  # copies that run, the oldest first
        self.kept = KeptRecords(core.settings.kept_records)
        self._pumping = False
        self._closing = False
        self.stopping = False  # the fleet stops: responses may finish, lost workers have exited

    def start(self) -> None:
        """Connect to the workers. Needs a running event loop."""
        self.workers.start()

    async def close(self) -> None:
        """End every request and close all links."""
        self.end_all()
        self._slo.close()
        await asyncio.sleep(0.05)  # so that cancels are sent
        await self.workers.close()

    def end_all(self) -> None:
        """End every request, as the router is shutting down."""
        self._closing = True
        for active in list(self._active.values()):
            self._finish(active, UnavailableError("the router is shutting down"))

    # --- requests --------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, wakeup: Wakeup) -> ActiveRequest:
        """Admit a request; ``wakeup`` is set whenever there is news of it.

        Raises:
            QueueFullError: The queue is full.
            UnavailableError: No worker can serve the request in its mode.
        """
        if self._closing:
            raise UnavailableError("the router is shutting down")
        waits = self.settings.starts_from_zero and self._placer.awaits_start(request)
        if request.probe or not waits:
            self._placer.check_served(request)
        active = ActiveRequest(RequestRecord(request, self._tokenizer), wakeup)
        active.awaited_start = waits
        active.submitted_ns = now_ns = monotonic_ns()
        loser = None
        if not request.probe:
            cost_tokens = self._placer.cost_tokens(request, len(request.prompt))
            entry = Waiting.of(request, cost_tokens)  # as if nothing were cached
            self.work.arrived(active.id, len(request.prompt), request.sampling.n)
            try:
                loser = self.admission.offer(entry, now_ns, expected_s=self._placer.answer_s)
            except QueueFullError:
                self.work.ended(active.id, served=False)
                raise
            self.kept.keep(active)
        self._active[active.id] = active
        delay_s = max((request.deadline_ns - now_ns) / 1e9, 0)
        active.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, active)
        if request.probe:
            if request.shadow:
                self._shadows[active.id] = active
            active.record.ticket = self.tickets.draw()
            self._place(active)
        else:
            if loser is not None:
                self._evict(self._active[loser.request_id])
            self.pump()
        return active

    def _evict(self, active: ActiveRequest) -> None:
        tenant = active.request.tenant
        expected_s = self._placer.answer_s
        self._finish(active, self.admission.refusal(tenant, monotonic_ns(), expected_s=expected_s))

    def cancel(self, active: ActiveRequest, reason: str = "the client went away") -> None:
        """Cancel a request whose client has disconnected or does not need the response."""
        if not active.record.ended:
            self._observer.cancelled(active)
        self._finish(active, CancelledError_(reason))

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended, or whose worker has not confirmed the end."""
        return len(self._active)

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
            self._finish(active, CancelledError_("requests of clients need its place"))

    def pump(self) -> None:
        """Place the requests that fit into this router's part of the window."""
        if self._pumping:  # a placement failed at once and freed its place: the loop sees it
            return
        window = self._window
        self._pumping = True
        try:
            while not self._awaits_start() and (entry := self.admission.pop(window)) is not None:
                active = self._active[entry.request_id]  # a request that ends has left the queue
                active.admitted = True
                slo = active.request.slo
                if slo is None or active.awaited_start:
                    self._admit(active, entry)
                else:
                    self._slo.admit(active, entry, slo)
            if self._shadows:
                self._shed(window)
        finally:
            self._pumping = False
        waiting = self.admission.waiting + self._slo.waiting
        self._observer.queue(waiting, self.admission.max_waiting)

    def _awaits_start(self) -> bool:
        """Return whether the next request waits for a worker that starts."""
        head = self.admission.head if self.settings.starts_from_zero else None
        return head is not None and self._placer.awaits_start(self._active[head.request_id].request)

    def _admit(self, active: ActiveRequest, entry: Waiting, quote: Quote | None = None) -> None:
        active.admitted = True
        active.record.ticket = self.tickets.draw()
        self._place(active, quote=quote)
        if active.placement is not None:  # now it is known what is cached
            uncached_tokens = active.placement.chosen.uncached_tokens
            cost_tokens = self._placer.cost_tokens(active.request, uncached_tokens)
            self.admission.charge(entry, cost_tokens)

    # --- placement -------------------------------------------------------------------------------

    def _place(
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
            self._fail_placed(active, as_error(active, fault))

    # --- ends ------------------------------------------------------------------------------------

    def _expire(self, active: ActiveRequest) -> None:
        waited_s = (active.request.deadline_ns - active.request.arrived_ns) / 1e9
        self._observer.timed_out(active)
        self._finish(active, DeadlineError(f"the request did not end within {waited_s:g} s"))

    def _finish(self, active: ActiveRequest, error: BatonError) -> None:
        if not active.record.fail(error, monotonic_ns()):
            return
        self._cancel_at_worker(active)
        self._release(active)

    def _cancel_at_worker(self, active: ActiveRequest, choices: tuple[int, ...] = ()) -> None:
        if not choices:
            active.cancelled_ns = monotonic_ns()
        self._send_cancel(active, choices)

    def _send_cancel(self, active: ActiveRequest, choices: tuple[int, ...] = ()) -> None:
        link = self.workers.link(active.decode_id)
        if link is None or active.record.attempt == 0:
            return
        cancel = Cancel(request_id=active.id, attempt=active.record.attempt, choices=choices)
        link.send(RouterFrame(cancel=cancel))

    def _release(self, active: ActiveRequest) -> None:
        """Free the place of a request that has ended; keep it until the worker confirms."""
        now_ns = monotonic_ns()
        active.stop_timers()
        active.wants_prefill = False
        self._shadows.pop(active.id, None)
        self._book.release(active.id, now_ns)
        self.work.ended(active.id, served=active.record.error is None)
        if active.admitted:
            self.admission.release(active.request.sampling.n, now_ns, active.request.tenant)
            active.admitted = False
        elif (
            active.decode_id is None and not active.request.probe and not self._slo.leave(active.id)
        ):
            self.admission.leave(active.id)
        if active.decode_id is None:
            self._active.pop(active.id, None)
        else:
            loop = asyncio.get_running_loop()
            active.timer = loop.call_later(_LINGER_S, self._expire_lingering, active)
        self._learn(active)
        if active.record.error is None:
            self._placer.learn(active.request, active.record.completion_tokens)
        active.notify()
        self.pump()

    def on_response_sent(self, active: ActiveRequest) -> None:
        """Note that the handler has written the last byte, or the client has disconnected."""
        active.delivered_ns = monotonic_ns()
        if active.id not in self._active or active.record.times is not None:
            self._observer.record_finished(active)
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

    def _expire_lingering(self, active: ActiveRequest) -> None:
        if self._active.pop(active.id, None) is not None and active.delivered_ns:
            self._observer.record_finished(active)

    # --- events of the workers -------------------------------------------------------------------

    def on_live(self, link: WorkerLink, *, same_life: bool) -> None:
        """Resume the requests of a live worker, or place waiting ones on it."""
        self.workers.note_live(link)
        self._stream_repair.on_live(link)
        if same_life:
            for active in self._held_by(link.worker_id):
                ended = active.record.ended
                if not ended:
                    self._stream_repair.resume(link, active)
                choices = tuple(c.index for c in active.record.choices if c.finish_reason)
                # The first cancel, of all choices or of some, may have been lost.
                if ended and (active.cancelled_ns or active.record.error is not None):
                    self._send_cancel(active)
                elif choices and not ended:
                    self._send_cancel(active, choices)
        self._prefill_recovery.on_live(list(self._active.values()))
        self.pump()

    def _on_turn(self) -> None:
        """Place requests that wait for a worker of a role."""
        self._prefill_recovery.on_live(list(self._active.values()))
        self.pump()

    def on_broken(self, link: WorkerLink, kind: str) -> None:
        """Count a broken stream, which is being reopened."""
        self._observer.stream_error(kind)

    def on_dead(self, link: WorkerLink, incarnation: bytes, reason: str, *, died: bool) -> None:
        """Place the requests of a dead worker again, or end them."""
        _LOG.warning("worker is dead to this router: worker=%s: %s", link.worker_id, reason)
        self._observer.stream_error("dead")
        self.workers.note_dead(link)
        self.prefix_index.forget(incarnation)
        self._book.forget(link.worker_id)
        for active in self._held_by(link.worker_id):
            if active.record.ended:
                self._expire_lingering(active)
            else:
                self._move(active, incarnation, f"{link.worker_id}: {reason}", died=died)

    def _held_by(self, worker_id: str) -> list[ActiveRequest]:
        return [active for active in self._active.values() if active.decode_id == worker_id]

    def _move(self, active: ActiveRequest, dead: bytes, reason: str, *, died: bool) -> None:
        active.record.note(f"worker lost: {reason}", monotonic_ns())
        error = after_worker_death(active.record, dead=dead, reason=reason, died=died)
        if self.stopping:
            error = UnavailableError("the fleet is stopping")
        if error is not None:
            if error.code == "poison_request":
                self._observer.poison()
            active.decode_id = None
            self._fail_placed(active, error)
            return
        self._retry(active, dead, "worker lost", WorkerLostError(f"the worker was lost: {reason}"))

    def _retry(self, active: ActiveRequest, avoid: bytes, why: str, otherwise: BatonError) -> None:
        if not self._placer.eligible(active.record.to_place, avoid):
            active.decode_id = None
            self._fail_placed(active, otherwise)
            return
        self._observer.retried(why, goes_on=active.record.can_go_on)
        self._book.release(active.id)
        self._place(active, avoid, why)

    def _move_away(self, link: WorkerLink) -> None:
        leaves = UnavailableError(f"{link.worker_id} is leaving")
        for active in self._held_by(link.worker_id):
            pinned = active.request.pinned is not None
            if active.record.ended or pinned or not may_try_again(active.record):
                continue
            if self._placer.could_place(active.record.to_place, link.incarnation):
                active.record.note(f"{link.worker_id} is leaving", monotonic_ns())
                self._send_cancel(active)
                self._retry(active, link.incarnation, "worker leaving", leaves)

    def _fail_placed(self, active: ActiveRequest, error: BatonError) -> None:
        self._active.pop(active.id, None)
        self._fail_at(active, error)

    def _fail_at(self, active: ActiveRequest, error: BatonError) -> None:
        if active.record.fail(error, monotonic_ns()):
            self._release(active)

    def on_submit_failed(self, link: WorkerLink, submission: Submission, reason: str) -> None:
        """Retry or fail a request whose submission did not arrive."""
        active = self._active.get(submission.request_id)
        if active is None or active.record.ended or active.record.attempt != submission.attempt:
            return
        error = UnavailableError(f"{link.worker_id} did not take the request: {reason}")
        self._send_cancel(active)  # the worker may have it, and only the reply be lost
        if may_try_again(active.record):
            self._retry(active, link.incarnation, "submit failed", error)
        else:
            self._fail_placed(active, error)

    def on_frame(self, link: WorkerLink, frame: WorkerFrame) -> None:
        """Handle the results of one worker step. A fault in one request ends only that one."""
        now_ns = monotonic_ns()
        if frame.HasField("status"):
            self.workers.note_transfers(link, frame.status.transfers)
            self._book.reported(link.worker_id, now_ns - frame.status.load_age_ns)
            self.tickets.seen(frame.status.highest_ticket)
            if self.workers.leaves(link) and not self.stopping:
                self._move_away(link)
        if frame.HasField("transfers"):
            self.workers.note_transfers(link, frame.transfers)
        for route in frame.routes:
            active = self._active.get(route.request_id)
            if active is not None:
                active.record.on_route(route, now_ns)
        for run in frame.tokens:
            active = self._runs_for(link, run.request_id, run.attempt)
            if active is not None:
                try:
                    self._on_run(link, active, run, now_ns)
                except Exception as fault:  # noqa: BLE001 - logged there
                    self._finish(active, as_error(active, fault))
        self._observer.flush_gaps()
        for needed in frame.prefill_needed:
            active = self._runs_for(link, needed.request_id, needed.attempt)
            if active is not None:
                self._prefill_recovery.on_needed(active, needed)
        for end in frame.ends:
            active = self._active.get(end.request_id)
            if active is not None:
                self._on_end(link, active, end, now_ns)

    def _charge(self, active: ActiveRequest, end: RequestEnd) -> None:
        """Count the time of an attempt once, also of one that was moved away."""
        if end.attempt not in active.charged and not active.request.probe:
            active.charged.add(end.attempt)
            self._observer.charged(active, end.times)

    def _runs_for(self, link: WorkerLink, request_id: str, attempt: int) -> ActiveRequest | None:
        active = self._active.get(request_id)
        if active is not None and attempt >= active.record.attempt:
            return active
        self._stream_repair.cancel_ended(link, request_id, attempt)
        return None

    def _on_run(self, link: WorkerLink, active: ActiveRequest, run: TokenRun, now_ns: int) -> None:
        record = active.record
        if record.ended or run.attempt != record.attempt:
            return
        before_ns = record.last_token_ns
        result = record.on_run(run, now_ns)
        if result.gap:
            self._stream_repair.hole(link, active, run.choice)
            return
        if result.fresh_tokens:
            if not active.computed:
                active.computed = True
                self._book.computed(active.id)
            self.work.generated(active.id, result.fresh_tokens)
            self._observer.tokens(active, before_ns, now_ns, result.fresh_tokens)
        if result.stopped:
            self._cancel_at_worker(active, () if record.ended else (run.choice,))
        if record.ended:
            self._release(active)
        else:
            active.notify()

    def _on_end(
        self, link: WorkerLink, active: ActiveRequest, end: RequestEnd, now_ns: int
    ) -> None:
        record = active.record
        self._charge(active, end)
        if end.attempt != record.attempt:
            return
        record.times = end.times
        if active.cancelled_ns:
            self._observer.released(now_ns - active.cancelled_ns)
        if record.ended:  # for the client; now for the worker, too
            active.stop_timers()
            self._active.pop(active.id, None)
            if active.delivered_ns:
                self._observer.record_finished(active)
            return
        if not end.HasField("error"):
            if self._stream_repair.may_end_early(link, active):
                return
            error: BatonError = InternalError("the worker ended the request before its response")
            self._fail_placed(active, error)
            return
        error = error_from_wire(end.error)
        if isinstance(error, WorkerLostError):  # its engine died, its gRPC server still answers
            self._move(active, link.incarnation, f"{link.worker_id}: {error.message}", died=True)
            return
        movable = end.error.retryable and may_try_again(record)
        if movable and not isinstance(error, DeadlineError):
            # Another worker is better, but one that forgot the request may take it again.
            alone = not self._placer.eligible(record.to_place, link.incarnation)
            avoid = b"" if alone else link.incarnation
            self._retry(active, avoid, end.error.code, error)
        else:
            self._fail_placed(active, error)
