"""Repairs after lost frames: requests missing tokens, and cancels requests that have ended here.

Frames of one stream keep their order, so tokens are missing only after a broken stream. A resume
requests them. Until it is answered the worker sends new tokens, which show the same hole again, and
perhaps the end. Neither is a reason to request it again.
"""

from collections import OrderedDict
from time import monotonic_ns

from batonpb.decode_pb2 import Cancel, Resume, RouterFrame

from router.routing.requests.active_request import ActiveRequest
from router.routing.workers.link import WorkerLink

_KEPT_CANCELS = 4096
_ASK_AGAIN_NS = 1_000_000_000  # within which a worker answers a resume, if at all


class StreamRepair:
    """Resumes that this router has requested, and requests that it has cancelled."""

    def __init__(self) -> None:
        self._cancelled: OrderedDict[tuple[str, str, int], None] = OrderedDict()

    def on_live(self, link: WorkerLink) -> None:
        """Note a new stream: messages on the previous one may be lost."""
        for key in [key for key in self._cancelled if key[0] == link.worker_id]:
            del self._cancelled[key]

    def resume(self, link: WorkerLink, active: ActiveRequest) -> None:
        """Request all that this router lacks of a request."""
        record = active.record
        now_ns = monotonic_ns()
        indices = record.next_indices
        active.resume_asked = (record.attempt, indices, now_ns)
        active.early_end = False
        record.note("resumed", now_ns)
        resume = Resume(request_id=active.id, attempt=record.attempt, next_index=indices)
        link.send(RouterFrame(resume=resume))

    def hole(self, link: WorkerLink, active: ActiveRequest, choice: int) -> None:
        """Request missing tokens of ``choice``, once per hole."""
        if not self._asked(active, choice):
            self.resume(link, active)

    def may_end_early(self, link: WorkerLink, active: ActiveRequest) -> bool:
        """Handle the good end of a request with missing tokens.

        Returns:
            Whether they may still arrive. After a resume the worker repeats the end after all
            missing tokens: a second end without them is a fault of the worker.
        """
        if active.early_end:
            return False
        unfinished = [c.index for c in active.record.choices if c.finish_reason is None]
        if not all(self._asked(active, choice) for choice in unfinished):
            self.resume(link, active)
        active.early_end = True
        return True

    def cancel_ended(self, link: WorkerLink, request_id: str, attempt: int) -> None:
        """Cancel, once, a request or an attempt that a worker runs and that has ended here."""
        key = (link.worker_id, request_id, attempt)
        if key in self._cancelled:
            return
        self._cancelled[key] = None
        if len(self._cancelled) > _KEPT_CANCELS:
            self._cancelled.popitem(last=False)
        link.send(RouterFrame(cancel=Cancel(request_id=request_id, attempt=attempt)))

    @staticmethod
    def _asked(active: ActiveRequest, choice: int) -> bool:
        attempt, indices, asked_ns = active.resume_asked
        return (
            attempt == active.record.attempt
            and indices[choice] == active.record.choices[choice].next_index
            and monotonic_ns() - asked_ns < _ASK_AGAIN_NS
        )
