"""After a stream lost frames: asks for what is missing, and calls off what nobody waits for.

Frames of one stream keep their order, so tokens are missing only when a stream broke. A resume asks
for them, and until its answer has come the worker goes on with what is new: runs that show the same
hole again, and perhaps the end. Neither is a reason to ask again.
"""

from collections import OrderedDict
from time import monotonic_ns

from batonpb.decode_pb2 import Cancel, Resume, RouterFrame

from router.routing.requests.active_request import ActiveRequest
from router.routing.workers.link import WorkerLink

_KEPT_STRANGERS = 4096
_ASK_AGAIN_NS = 1_000_000_000  # a resume that is answered at all is answered by then


class StreamRepair:
    """What this router has asked for, and what it has called off."""

    def __init__(self) -> None:
        self._called_off: OrderedDict[tuple[str, str, int], None] = OrderedDict()

    def on_live(self, link: WorkerLink) -> None:
        """A stream is open: what was said on the last one may not have arrived."""
        for key in [key for key in self._called_off if key[0] == link.worker_id]:
            del self._called_off[key]

    def resume(self, link: WorkerLink, active: ActiveRequest) -> None:
        """Ask for all that this router lacks of a request."""
        record = active.record
        now_ns = monotonic_ns()
        indices = record.next_indices
        active.resume_asked = (record.attempt, indices, now_ns)
        active.early_end = False
        record.note("resumed", now_ns)
        resume = Resume(request_id=active.id, attempt=record.attempt, next_index=indices)
        link.send(RouterFrame(resume=resume))

    def hole(self, link: WorkerLink, active: ActiveRequest, choice: int) -> None:
        """A run of ``choice`` begins behind what has come: ask, once for each hole."""
        if not self._asked(active, choice):
            self.resume(link, active)

    def may_end_early(self, link: WorkerLink, active: ActiveRequest) -> bool:
        """The worker has ended a request well, and a part of the answer is missing.

        Returns:
            Whether the part may still come. After a resume the worker says the end again, behind
            all that is missing: the second end without it is the worker's fault.
        """
        if active.early_end:
            return False
        unfinished = [c.index for c in active.record.choices if c.finish_reason is None]
        if not all(self._asked(active, choice) for choice in unfinished):
            self.resume(link, active)
        active.early_end = True
        return True

    def call_off(self, link: WorkerLink, request_id: str, attempt: int) -> None:
        """The worker runs a request, or an attempt of it, that is over here: tell it once."""
        key = (link.worker_id, request_id, attempt)
        if key in self._called_off:
            return
        self._called_off[key] = None
        if len(self._called_off) > _KEPT_STRANGERS:
            self._called_off.popitem(last=False)
        link.send(RouterFrame(cancel=Cancel(request_id=request_id, attempt=attempt)))

    @staticmethod
    def _asked(active: ActiveRequest, choice: int) -> bool:
        attempt, indices, asked_ns = active.resume_asked
        return (
            attempt == active.record.attempt
            and indices[choice] == active.record.choices[choice].next_index
            and monotonic_ns() - asked_ns < _ASK_AGAIN_NS
        )
