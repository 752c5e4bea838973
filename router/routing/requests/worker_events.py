"""Events of the workers of a lane: what they report, and what happens to requests when they die.

A frame, a death or a broken stream is handled at once. A fault in one request ends only that one.
"""

import logging
from time import monotonic_ns

from batonpb.decode_pb2 import RequestEnd, Submission, TokenRun, WorkerFrame

from baton.types.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    UnavailableError,
    WorkerLostError,
)
from baton.wire.codecs import error_from_wire
from router.routing.requests.active_request import ActiveRequest, as_error
from router.routing.requests.gateway import Gateway
from router.routing.requests.prefill_recovery import PrefillRecovery
from router.routing.requests.recovery_policy import after_worker_death, may_try_again
from router.routing.requests.stream_repair import StreamRepair
from router.routing.workers.link import WorkerLink

_LOG = logging.getLogger(__name__)


class WorkerEvents:
    """Listener of all links of a lane, for the requests of its gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._prefill_recovery = PrefillRecovery(
            gateway.core, gateway.workers, gateway.placer, gateway.observer, gateway.fail
        )
        self._stream_repair = StreamRepair()
        gateway.workers.on_turn = self._on_turn

    def on_live(self, link: WorkerLink, *, same_life: bool) -> None:
        """Resume the requests of a live worker, or place waiting ones on it."""
        gateway = self._gateway
        gateway.workers.note_live(link)
        self._stream_repair.on_live(link)
        if same_life:
            for active in gateway.held_by(link.worker_id):
                ended = active.record.ended
                if not ended:
                    self._stream_repair.resume(link, active)
                choices = tuple(c.index for c in active.record.choices if c.finish_reason)
                # The first cancel, of all choices or of some, may have been lost.
                if ended and (active.cancelled_ns or active.record.error is not None):
                    gateway.send_cancel(active)
                elif choices and not ended:
                    gateway.send_cancel(active, choices)
        self._on_turn()

    def _on_turn(self) -> None:
        """Place requests that wait for a worker of a role."""
        self._prefill_recovery.on_live(list(self._gateway.active.values()))
        self._gateway.pump()

    def on_broken(self, link: WorkerLink, kind: str) -> None:
        """Count a broken stream, which is being reopened."""
        self._gateway.observer.metrics.inc("baton_stream_errors", kind=kind)

    def on_dead(self, link: WorkerLink, incarnation: bytes, reason: str, *, died: bool) -> None:
        """Place the requests of a dead worker again, or end them."""
        gateway = self._gateway
        _LOG.warning("worker is dead to this router: worker=%s: %s", link.worker_id, reason)
        gateway.observer.metrics.inc("baton_stream_errors", kind="dead")
        gateway.workers.note_dead(link)
        gateway.prefix_index.forget(incarnation)
        gateway.book.forget(link.worker_id)
        for active in gateway.held_by(link.worker_id):
            if active.record.ended:
                gateway.expire_lingering(active)
            else:
                self._move(active, incarnation, f"{link.worker_id}: {reason}", died=died)

    def _move(self, active: ActiveRequest, dead: bytes, reason: str, *, died: bool) -> None:
        gateway = self._gateway
        active.record.note(f"worker lost: {reason}", monotonic_ns())
        error = after_worker_death(active.record, dead=dead, reason=reason, died=died)
        if gateway.stopping:
            error = UnavailableError("the fleet is stopping")
        if error is not None:
            if error.code == "poison_request":
                gateway.observer.metrics.inc("baton_poison_requests")
            active.decode_id = None
            gateway.fail_placed(active, error)
            return
        self._retry(active, dead, "worker lost", WorkerLostError(f"the worker was lost: {reason}"))

    def _retry(self, active: ActiveRequest, avoid: bytes, why: str, otherwise: BatonError) -> None:
        gateway = self._gateway
        if not gateway.placer.eligible(active.record.to_place, avoid):
            active.decode_id = None
            gateway.fail_placed(active, otherwise)
            return
        gateway.observer.retried(why, goes_on=active.record.can_go_on)
        gateway.placer.release(active.id)
        gateway.place(active, avoid, why)

    def _move_away(self, link: WorkerLink) -> None:
        gateway = self._gateway
        leaves = UnavailableError(f"{link.worker_id} is leaving")
        for active in gateway.held_by(link.worker_id):
            pinned = active.request.pinned is not None
            if active.record.ended or pinned or not may_try_again(active.record):
                continue
            if gateway.placer.could_place(active.record.to_place, link.incarnation):
                active.record.note(f"{link.worker_id} is leaving", monotonic_ns())
                gateway.send_cancel(active)
                self._retry(active, link.incarnation, "worker leaving", leaves)

    def on_submit_failed(self, link: WorkerLink, submission: Submission, reason: str) -> None:
        """Retry or fail a request whose submission did not arrive."""
        gateway = self._gateway
        active = gateway.active.get(submission.request_id)
        if active is None or active.record.ended or active.record.attempt != submission.attempt:
            return
        error = UnavailableError(f"{link.worker_id} did not take the request: {reason}")
        gateway.send_cancel(active)  # the worker may have it, and only the reply be lost
        if may_try_again(active.record):
            self._retry(active, link.incarnation, "submit failed", error)
        else:
            gateway.fail_placed(active, error)

    def on_frame(self, link: WorkerLink, frame: WorkerFrame) -> None:
        """Handle the results of one worker step. A fault in one request ends only that one."""
        gateway = self._gateway
        now_ns = monotonic_ns()
        if frame.HasField("status"):
            if gateway.on_report is not None:
                gateway.on_report(link.worker_id, frame.status, now_ns)
            gateway.workers.note_transfers(link, frame.status.transfers)
            gateway.tickets.seen(frame.status.highest_ticket)
            if gateway.workers.leaves(link, now_ns) and not gateway.stopping:
                self._move_away(link)
        if frame.HasField("transfers"):
            gateway.workers.note_transfers(link, frame.transfers)
        for route in frame.routes:
            active = gateway.active.get(route.request_id)
            if active is not None:
                active.record.on_route(route, now_ns)
        for run in frame.tokens:
            active = self._runs_for(link, run.request_id, run.attempt)
            if active is not None:
                try:
                    self._on_run(link, active, run, now_ns)
                except Exception as fault:  # noqa: BLE001 - logged there
                    gateway.finish(active, as_error(active, fault))
        gateway.observer.flush_gaps()
        for needed in frame.prefill_needed:
            active = self._runs_for(link, needed.request_id, needed.attempt)
            if active is not None:
                self._prefill_recovery.on_needed(active, needed)
        for end in frame.ends:
            active = gateway.active.get(end.request_id)
            if active is not None:
                self._on_end(link, active, end, now_ns)
        if frame.HasField("status"):  # it shows the load behind these tokens and ends
            gateway.book.reported(link.worker_id, now_ns - frame.status.load_age_ns)

    def _runs_for(self, link: WorkerLink, request_id: str, attempt: int) -> ActiveRequest | None:
        active = self._gateway.active.get(request_id)
        if active is not None and attempt >= active.record.attempt:
            return active
        self._stream_repair.cancel_ended(link, request_id, attempt)
        return None

    def _on_run(self, link: WorkerLink, active: ActiveRequest, run: TokenRun, now_ns: int) -> None:
        gateway = self._gateway
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
                gateway.placer.computed(active.id, now_ns)
            gateway.work.generated(active.id, result.fresh_tokens)
            gateway.observer.tokens(active, before_ns, now_ns, result.fresh_tokens)
        if result.stopped:
            gateway.cancel_at_worker(active, () if record.ended else (run.choice,))
        if record.ended:
            gateway.release(active)
        else:
            active.wakeup.set()

    def _on_end(
        self, link: WorkerLink, active: ActiveRequest, end: RequestEnd, now_ns: int
    ) -> None:
        gateway = self._gateway
        record = active.record
        # The time of an attempt counts once, also of one that was moved away.
        if end.attempt not in active.charged and not active.request.probe:
            active.charged.add(end.attempt)
            gateway.observer.charged(active, end.times)
        if end.attempt != record.attempt:
            return
        record.times = end.times
        if active.cancelled_ns:
            took_s = (now_ns - active.cancelled_ns) / 1e9
            gateway.observer.metrics.observe("baton_release_seconds", took_s)
        if record.ended:  # for the client; now for the worker, too
            active.stop_timers()
            gateway.active.pop(active.id, None)
            if active.delivered_ns:
                gateway.observer.record_finished(active)
            return
        if not end.HasField("error"):
            if self._stream_repair.may_end_early(link, active):
                return
            error: BatonError = InternalError("the worker ended the request before its response")
            gateway.fail_placed(active, error)
            return
        error = error_from_wire(end.error)
        if isinstance(error, WorkerLostError):  # its engine died, its gRPC server still answers
            self._move(active, link.incarnation, f"{link.worker_id}: {error.message}", died=True)
            return
        movable = end.error.retryable and may_try_again(record)
        if movable and not isinstance(error, DeadlineError):
            # Another worker is better, but one that forgot the request may take it again.
            alone = not gateway.placer.eligible(record.to_place, link.incarnation)
            avoid = b"" if alone else link.incarnation
            self._retry(active, avoid, end.error.code, error)
        else:
            gateway.fail_placed(active, error)
