"""Another prefill worker for a prompt whose first one failed. Sans-IO."""

from collections.abc import Sequence

from baton.types.geometry import context_tokens
from router.request import GenerationRequest
from router.routing.placement.booked_load import Booking
from router.routing.placement.cost import WorkerLoad
from router.routing.placement.placer import Placer
from router.routing.placement.worker_load import LoadReader
from router.routing.workers.slot import WorkerSlot


def replace_prefill(
    placer: Placer, request: GenerationRequest, before_id: str | None, slots: Sequence[WorkerSlot]
) -> WorkerLoad | None:
    """Book a prompt, in place of ``before_id``, at the one of ``slots`` with the fewest tokens."""
    now_ns = placer.clock_ns()
    loads = [LoadReader(placer.book).of(slot, 0) for slot in slots]
    best = min(loads, key=lambda load: load.queued_tokens, default=None)
    if best is not None:
        placer.computing.move(request.request_id, best, now_ns)
        placer.book.take_back(before_id, request.request_id)
        tokens = len(request.prompt)
        context = context_tokens(0, tokens)
        booking = Booking(tokens=tokens, context=context, streams=0, at_ns=now_ns)
        placer.book.book(best.worker_id, request.request_id, booking)
    return best
