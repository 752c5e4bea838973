"""Replaces a prefill worker that failed a request of a decode worker, or ends the request.

The decode worker keeps its reservation and sends ``PrefillNeeded``. The decision is in
``router/routing/requests/recovery_policy.py``.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic_ns

from batonpb.decode_pb2 import PrefillNeeded, PrefillReplacement, RouterFrame

from baton.types.errors import BatonError, TransferError, UnavailableError
from baton.wire.codecs import error_to_wire
from router.process_core import ProcessCore
from router.routing.placement.placer import Placer
from router.routing.placement.prefill_replacement import replace_prefill
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.dispatch import prefill_target, prefix_sources
from router.routing.requests.observer import Observer
from router.routing.requests.recovery_policy import after_prefill_failure
from router.routing.workers.slot import WorkerSlot
from router.routing.workers.table import WorkerTable


@dataclass(frozen=True, slots=True)
class PrefillRecovery:
    """Answers ``PrefillNeeded``, at once or when another prefill worker comes up.

    ``end`` ends a request whose worker has the error already.
    """

    core: ProcessCore
    workers: WorkerTable
    placer: Placer
    observer: Observer
    end: Callable[[ActiveRequest, BatonError], None]

    def on_needed(self, active: ActiveRequest, needed: PrefillNeeded) -> None:
        """Answer a decode worker, which may repeat its message after a broken stream."""
        record = active.record
        failed = needed.failed.incarnation
        if record.ended or needed.attempt != record.attempt:
            return
        if failed in active.repairs and self._repeat(active, failed):
            return
        if active.wants_prefill and failed == active.prefill_asked:
            return  # the answer comes with the next prefill worker
        active.prefill_asked = failed
        now_ns = monotonic_ns()
        record.note(f"prefill {needed.failed.worker_id} failed: {needed.reason.message}", now_ns)
        repair = after_prefill_failure(
            record,
            failed=failed,
            peer_died=needed.peer_died,
            others=[slot.incarnation for slot in self._prefills(active)],
            may_wait=now_ns < record.request.deadline_ns,
            unavailable=needed.reason.code == UnavailableError.code,
        )
        match repair.action:
            case "replace":
                self._try_replacement(active, avoid=failed)
            case "local":
                self.observer.metrics.inc("baton_fallbacks", reason="local prefill")
                self.placer.book.take_back(active.prefill_id, active.id)
                self.placer.computing.end(active.id)
                active.prefill_id = None
                self._answer(active, PrefillReplacement(compute_locally=True))
            case "wait":
                self._wait(active)
            case "refuse":
                self._refuse(active, repair.refusal or TransferError("the hand-off failed"))

    def _repeat(self, active: ActiveRequest, failed: bytes) -> bool:
        """Repeat the same answer; return False if the worker that it names is gone as well."""
        if failed != active.prefill_asked:
            return True  # an old message: its answer has failed and was followed by another
        answer = active.repairs[failed]
        if answer.HasField("prefill"):
            link = self.workers.link(answer.prefill.worker_id)
            if link is None or not link.live or link.incarnation != answer.prefill.incarnation:
                return False
        self._answer(active, answer)
        return True

    def on_live(self, active_requests: Iterable[ActiveRequest]) -> None:
        """Replace prefill workers of ``active_requests`` that wait, now that a worker came up."""
        for active in active_requests:
            if active.wants_prefill and not active.record.ended:
                self._try_replacement(active)

    def _prefills(self, active: ActiveRequest) -> list[WorkerSlot]:
        return [
            slot
            for slot in self.workers.usable
            if slot.role == "prefill" and slot.worker_id != active.decode_id
        ]

    def _try_replacement(self, active: ActiveRequest, avoid: bytes = b"") -> None:
        tried = {*active.record.failed_prefills, avoid}
        fit = [slot for slot in self._prefills(active) if slot.incarnation not in tried]
        best = replace_prefill(self.placer, active.request, active.prefill_id, fit)
        link = self.workers.link(best.worker_id) if best is not None else None
        if link is None:
            self._wait(active)
            return
        active.wants_prefill = False
        if active.repair_timer is not None:
            active.repair_timer.cancel()
            active.repair_timer = None
        active.prefill_id = link.worker_id
        active.record.note(f"prefill replaced by {link.worker_id}", monotonic_ns())
        self.observer.retried("prefill replaced")
        decode = self.workers.link(active.decode_id)
        pulls = decode.incarnation if decode is not None else b""
        token = self.core.fleet_token
        target = prefill_target(link, token, active, pulls)
        prefix = prefix_sources(active, self.workers, token, link)
        answer = PrefillReplacement(
            prefill=target, prefix=prefix[0] if prefix else None, prefix_then=prefix[1:]
        )
        self._answer(active, answer)
        link.ask()

    def _wait(self, active: ActiveRequest) -> None:
        if active.wants_prefill:
            return
        active.wants_prefill = True
        active.record.note("waits for another prefill worker", monotonic_ns())
        limit_s = self.core.settings.repair_wait_s
        loop = asyncio.get_running_loop()
        active.repair_timer = loop.call_later(limit_s, self._give_up, active, limit_s)

    def _give_up(self, active: ActiveRequest, limit_s: float) -> None:
        error = f"the prefill worker was lost and no other came up within {limit_s:g} s"
        self._refuse(active, TransferError(error))

    def _refuse(self, active: ActiveRequest, error: BatonError) -> None:
        if error.code == "poison_request":
            self.observer.metrics.inc("baton_poison_requests")
        self._answer(active, PrefillReplacement(refuse=error_to_wire(error)))
        self.end(active, error)

    def _answer(self, active: ActiveRequest, replacement: PrefillReplacement) -> None:
        link = self.workers.link(active.decode_id)
        if link is not None:
            replacement.request_id = active.id
            replacement.attempt = active.record.attempt
            active.repairs[active.prefill_asked] = replacement
            # A worker that only took no prompts for a while may be asked again, and say so again.
            active.repairs.pop(replacement.prefill.incarnation, None)
            link.send(RouterFrame(replacement=replacement))
