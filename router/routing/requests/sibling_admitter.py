"""Lets requests wait whose prefix is being computed for another one, and places them then."""

import asyncio
from collections.abc import Callable
from time import monotonic_ns

from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import Waiting
from router.routing.peers.work_counter import WorkCounter
from router.routing.placement.computing_prompts import SiblingWaits
from router.routing.placement.placer import Placer, Quote
from router.routing.requests.active_request import ActiveRequest
from router.settings import LaneSettings

_LOOK_S = 0.02  # between two looks at the prefix index

Admit = Callable[[ActiveRequest, Waiting, Quote | None], None]


class SiblingAdmitter:
    """Shell of a router's ``SiblingWaits``.

    Args:
        admit: Places a request or asks the gate; without a quote, placement chooses anew.
    """

    def __init__(
        self,
        settings: LaneSettings,
        placer: Placer,
        admission: Admission,
        work: WorkCounter,
        admit: Admit,
    ) -> None:
        self._placer = placer
        self._admission = admission
        self._work = work
        self._admit = admit
        self._waits = SiblingWaits(placer.computing, settings.max_queued_requests)
        self._waiting: dict[str, tuple[ActiveRequest, Waiting]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def leave(self, request_id: str) -> bool:
        """Forget a request that has ended; return whether it waited here."""
        self._waits.leave(request_id)
        return self._waiting.pop(request_id, None) is not None

    def admit(self, active: ActiveRequest, entry: Waiting) -> None:
        """Admit a request that the queue has given its turn, or let it wait."""
        if not self._placer.computing:
            self._resume(active, entry, None)
            return
        try:
            may_spread = active.id not in self._waiting
            quote = self._placer.quote(active.request, may_spread=may_spread)
        except Exception:  # noqa: BLE001 - placed without a quote, it fails again and is ended
            self._resume(active, entry, None)
            return
        now_ns = monotonic_ns()
        cheapest = quote.placement.candidates[0]
        awaited = self._waits.ask(active.request, cheapest, quote.hashes, now_ns)
        if awaited is None:
            self._resume(active, entry, quote)
            return
        if active.id not in self._waiting:
            self._waiting[active.id] = (active, entry)
            self._admission.withdraw(entry)
            active.admitted = False
            self._work.placed(active.id, awaited.rest_tokens)
            active.record.note(f"waits for the prefix of {awaited.request_id}", now_ns)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _resume(self, active: ActiveRequest, entry: Waiting, quote: Quote | None) -> None:
        if self.leave(active.id):
            self._admission.resume(entry)
            active.admitted = True
        self._admit(active, entry, quote)

    def _look(self) -> None:
        self._timer = None
        for request_id in self._waits.due(monotonic_ns()):
            if request_id in self._waiting:  # the end of another one may have placed it
                self.admit(*self._waiting[request_id])
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
