"""A request under way: its record, its placement, and the bell of the handler that waits for it."""

import asyncio
from typing import Any

from router.placement.cost import Candidate
from router.requests.record import RequestRecord
from router.requests.request import GenerationRequest

EXPLAINED_CANDIDATES = 32


class ActiveRequest:
    """One request from admission to its end.

    Args:
        record: What is known of it.
        wakeup: Set whenever there is news; flights of one HTTP request share it.
    """

    def __init__(self, record: RequestRecord, wakeup: asyncio.Event) -> None:
        self.record = record
        self.wakeup = wakeup
        self.decode_id: str | None = None  # the worker that holds it, once placed
        self.prefill_id: str | None = None
        self.admitted = False
        self.wants_prefill = False  # waits for a prefill worker to replace a lost one
        self.placed_ns = 0
        self.submitted_ns = 0
        self.cancelled_ns = 0
        self.delivered_ns = 0
        self.observed = False
        self.candidates: list[Candidate] = []  # the cheapest
        self.gaps_s: list[float] = []  # between tokens that came one by one, with a hand-off
        self.chosen: Candidate | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.repair_timer: asyncio.TimerHandle | None = None

    @property
    def request(self) -> GenerationRequest:
        """What was asked."""
        return self.record.request

    @property
    def id(self) -> str:
        """The request id."""
        return self.record.request.request_id

    def notify(self) -> None:
        """Tell the handler that there is news."""
        self.wakeup.set()

    def stop_timers(self) -> None:
        """No deadline and no repair limit any more."""
        for timer in (self.timer, self.repair_timer):
            if timer is not None:
                timer.cancel()
        self.timer = self.repair_timer = None

    def route_header(self) -> str:
        """The value of ``x-baton-route``."""
        route = self.record.route
        if route is None:
            prefill, decode, mode, cached = self.prefill_id, self.decode_id, "", 0
            mode = "disaggregated" if prefill else "colocated"
        else:
            prefill, decode = route.prefill_worker_id, route.decode_worker_id
            mode, cached = route.mode, route.cached_tokens
        return f"prefill={prefill or decode}; decode={decode}; mode={mode}; cached={cached}"

    def explain(self) -> dict[str, Any]:
        """For ``GET /fleet/requests/{id}``: decision, timeline, final route. No text, no tokens."""
        record, request = self.record, self.request
        route, times = record.route, record.times
        return {
            "id": self.id,
            "ticket": record.ticket,
            "priority": request.priority,
            "tenant": request.tenant,
            "user": request.user,
            "mode": request.mode,
            "adapter": request.adapter.name if request.adapter is not None else None,
            "attempts": record.attempt,
            "state": "ended" if record.ended else "running" if self.decode_id else "queued",
            "error": record.error.body()["error"] if record.error is not None else None,
            "seed": request.sampling.seed,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reasons": [choice.finish_reason for choice in record.choices],
            "candidates": [found.explain() for found in self.candidates],
            "chosen": self.chosen.explain() if self.chosen is not None else None,
            "route": None
            if route is None
            else {
                "prefill": route.prefill_worker_id or None,
                "decode": route.decode_worker_id,
                "mode": route.mode,
                "cached_tokens": route.cached_tokens,
            },
            "timeline": [
                {"event": event, "at_s": round((at_ns - request.arrived_ns) / 1e9, 6)}
                for event, at_ns in record.timeline
            ],
            "worker_times_s": None
            if times is None
            else {
                "queue": times.queue_ns / 1e9,
                "prefill": times.prefill_ns / 1e9,
                "transfer": times.transfer_ns / 1e9,
                "decode": times.decode_ns / 1e9,
                "transfer_bytes": times.transfer_bytes,
                "preemptions": times.preemptions,
                "computed_tokens": times.computed_tokens,
                "repaired_chunks": times.repaired_chunks,
            },
        }
