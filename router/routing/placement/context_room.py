"""Attached servers whose context has room for a prompt: their contexts may have other lengths."""

from collections.abc import Iterable, Set

from router.request import GenerationRequest
from router.routing.placement.cost import Candidate
from router.routing.workers.slot import WorkerSlot


def with_room(
    request: GenerationRequest,
    expected_tokens: int,
    slots: list[WorkerSlot],
    all_slots: Iterable[WorkerSlot],
) -> list[WorkerSlot]:
    """Return those of some servers with room for the prompt and ``expected_tokens`` of a response.

    If there is none, those with room for the prompt. If none of all servers has that, all: one of
    them tells the client.
    """
    length = len(request.prompt)
    for tokens in (length + expected_tokens, length + 1):
        if rooms := [slot for slot in slots if _context_tokens(slot) >= tokens]:
            return rooms
    return [] if any(_context_tokens(slot) > length for slot in all_slots) else slots


def is_among(chosen: Candidate, rooms: Set[str]) -> bool:
    """Return whether a placement is on these workers."""
    return {chosen.computes.worker_id, chosen.decode.worker_id} <= rooms


def _context_tokens(slot: WorkerSlot) -> int:
    return slot.link.capabilities.max_context_tokens if slot.link is not None else 0
