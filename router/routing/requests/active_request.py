"""Active request: its record, its placement, and the event that wakes its HTTP handler."""

import asyncio
import logging
from typing import Any, Protocol

from batonpb.decode_pb2 import PrefillReplacement

from baton.types.errors import BatonError, InternalError
from router.request import GenerationRequest
from router.routing.placement.placer import Placement
from router.routing.placement.regret import Regret
from router.routing.requests.record import RequestRecord
from router.routing.requests.token_gaps import TokenGaps

_LOG = logging.getLogger(__name__)


class Wakeup(Protocol):
    """Notification of news: an `asyncio.Event`, or a stream that writes by itself."""

    def set(self) -> None:
        """Signal that the request has new events."""


class ActiveRequest:
    """Request from admission to its end. The requests of one HTTP call share a ``wakeup``."""

    def __init__(self, record: RequestRecord, wakeup: Wakeup) -> None:
        self.record = record
        self.wakeup = wakeup
        self.placement: Placement | None = None  # the latest; kept when a later attempt fails
        self.decode_id: str | None = None  # the worker that holds it, once placed
        self.prefill_id: str | None = None
        self.placed_ns = 0  # of the last placement before the first token
        self.predicted_step_s = 0.0  # by the gate; 0: it was not asked
        self.computed = False  # the current attempt has yielded a token
        self.admitted = False
        self.awaited_start = False  # it arrived while no worker was ready
        self.wants_prefill = False  # waits for a prefill worker to replace a lost one
        self.submitted_ns = 0
        self.cancelled_ns = 0
        self.delivered_ns = 0
        self.observed = False
        self.status = 0  # of the HTTP response, once it has ended; 499 if the client left
        self.gaps_s: list[float] = []  # between tokens that arrived one by one, after a hand-off
        self.gaps = TokenGaps()
        self.exposed_s = 0.0  # known at the end, like the regret
        self.regret: Regret | None = None
        self.summary: dict[str, Any] | None = None  # for the list of requests, once it has ended
        self.timer: asyncio.TimerHandle | None = None
        self.repair_timer: asyncio.TimerHandle | None = None
        # Of the last resume: attempt (never 0), next index of each choice, time.
        self.resume_asked: tuple[int, list[int], int] = (0, [], 0)
        self.charged: set[int] = set()  # attempts whose worker time is counted
        self.early_end = False  # the worker has ended it, and a resume must fill a hole
        self.prefill_asked = b""  # the incarnation that failed this attempt last
        # Answers to ``PrefillNeeded`` of this attempt, by the incarnation that failed.
        self.repairs: dict[bytes, PrefillReplacement] = {}

    @property
    def request(self) -> GenerationRequest:
        """Request of the client, as admitted."""
        return self.record.request

    @property
    def id(self) -> str:
        """Id of the request."""
        return self.record.request.request_id

    def take_placement(self, placement: Placement) -> None:
        """Begin an attempt on these workers."""
        self.placement = placement
        self.decode_id = placement.decode_id
        self.prefill_id = placement.prefill_id
        if not self.record.begun:
            self.placed_ns = placement.placed_ns
        self.computed = False
        self.wants_prefill = False
        self.early_end = False
        self.prefill_asked = b""
        self.repairs = {}

    def stop_timers(self) -> None:
        """Cancel the deadline and the timeout of waiting for a prefill worker."""
        for timer in (self.timer, self.repair_timer):
            if timer is not None:
                timer.cancel()
        self.timer = self.repair_timer = None

    def route_header(self) -> str:
        """Return the value of ``x-baton-route``."""
        route = self.record.route
        if route is None:
            prefill = self.prefill_id
            decode = self.decode_id
            cached = 0
            mode = "disaggregated" if prefill else "colocated"
        else:
            prefill = route.prefill_worker_id
            decode = route.decode_worker_id
            mode = route.mode
            cached = route.cached_tokens
        return f"prefill={prefill or decode}; decode={decode}; mode={mode}; cached={cached}"

    def explain(self) -> dict[str, Any]:
        """Return decision, timeline and final route, without text and tokens."""
        record = self.record
        request = self.request
        placement = self.placement
        route = record.route
        times = record.times
        return {
            "id": self.id,
            "client_request_id": request.client_id or None,
            "ticket": record.ticket,
            "priority": request.priority,
            "tenant": request.tenant,
            "user": request.user,
            "mode": request.mode,
            "adapter": request.adapter.name if request.adapter is not None else None,
            "model": request.routed._asdict() if request.routed is not None else None,
            "attempts": record.attempt,
            "moves": record.moves,
            "state": "ended" if record.ended else "running" if self.decode_id else "queued",
            "status": self.status or None,
            "error": record.error.body()["error"] if record.error is not None else None,
            "expected_tokens": request.expected_tokens or None,
            "session": request.session._asdict() if request.session else None,
            "hints": request.hints.explain() or None,
            "prompt_change": change.explain() if (change := request.prompt_change) else None,
            "seed": request.sampling.seed,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reasons": [choice.finish_reason for choice in record.choices],
            "candidates": [c.explain() for c in placement.candidates] if placement else [],
            "chosen": placement.chosen.explain() if placement else None,
            "spread": placement.spread if placement else False,
            "prefix_from": [one.described() for one in placement.prefix] if placement else [],
            "route": None
            if route is None
            else {
                "prefill": route.prefill_worker_id or None,
                "decode": route.decode_worker_id,
                "mode": route.mode,
                "cached_tokens": route.cached_tokens,
            },
            "regret_s": round(self.regret.seconds, 6) if self.regret else None,
            "better": self.regret.best.explain() if self.regret and self.regret.seconds else None,
            "usual_gap_s": round(self.gaps.usual_s, 6),
            "longest_gaps": [
                {
                    "gap_s": round(gap.seconds, 6),
                    "before_token": gap.before_token,
                    "at_s": round((gap.ended_ns - request.arrived_ns) / 1e9, 6),
                }
                for gap in self.gaps.longest
            ],
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


def as_error(active: ActiveRequest, fault: Exception) -> BatonError:
    """Return the error that the client gets for ``fault``; the log has the rest."""
    if isinstance(fault, BatonError):
        return fault
    _LOG.error("failed inside the router: request=%s", active.id, exc_info=fault)
    return InternalError("the router failed; see its log")
