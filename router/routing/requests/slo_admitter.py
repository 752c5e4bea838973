"""Admits the requests that have latency limits: asks the gate, and again for those that wait."""

import asyncio
from collections.abc import Callable
from time import monotonic_ns

from baton.types.block_hashes import HASH_BYTES
from baton.types.errors import SloUnreachableError
from baton.types.geometry import BLOCK_TOKENS
from baton.types.slo import Slo
from router.request import GenerationRequest
from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import Waiting
from router.routing.admission.slo_gate import GateRequest, SloDecision, SloGate
from router.routing.placement.placer import Placer, Quote
from router.routing.requests.active_request import ActiveRequest
from router.routing.workers.table import WorkerTable
from router.settings import LaneSettings

_ASK_S = 0.1  # between two questions for the lane of late requests

Place = Callable[[ActiveRequest, Waiting, Quote | None], None]
Refuse = Callable[[ActiveRequest, SloUnreachableError], None]


class SloAdmitter:
    """Shell of a router's gate.

    Args:
        place: Places an admitted request; without a quote, placement chooses anew.
        refuse: Ends a request that is not placed.
    """

    def __init__(
        self,
        settings: LaneSettings,
        workers: WorkerTable,
        placer: Placer,
        admission: Admission,
        place: Place,
        refuse: Refuse,
    ) -> None:
        self.gate = SloGate(settings.window_requests, settings.max_queued_requests)
        self._workers = workers
        self._placer = placer
        self._admission = admission
        self._place = place
        self._refuse = refuse
        self._late: dict[str, tuple[ActiveRequest, Waiting, Slo]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, active: ActiveRequest, entry: Waiting, slo: Slo) -> None:
        """Place a request that the queue has given its turn, let it wait, or refuse it."""
        self._ask(active, entry, slo, late=False)

    def leave(self, request_id: str) -> bool:
        """Forget a request that has ended; return whether it waited here."""
        self.gate.leave(request_id)
        return self._late.pop(request_id, None) is not None

    @property
    def waiting(self) -> int:
        """Number of late requests that wait."""
        return len(self._late)

    @property
    def _computing(self) -> int:
        """Number of workers that compute prompts."""
        roles = [slot.role for slot in self._workers.usable]
        return roles.count("prefill") or len(roles)

    def _ask(self, active: ActiveRequest, entry: Waiting, slo: Slo, *, late: bool) -> None:
        request = active.request
        try:
            quote = self._placer.quote(request)
        except Exception:  # noqa: BLE001 - placed without a quote, it fails again and is ended
            self._placed(active, entry, None)
            return
        now_ns = monotonic_ns()
        prompt_tokens = request.sampling.n * len(request.prompt)
        prediction = self.gate.predict(
            quote.placement.chosen, prompt_tokens, self._placer.answer_tokens
        )
        caller = _caller(request, quote.hashes)
        waited_s = (now_ns - request.arrived_ns) / 1e9
        over_share = self._admission.is_over_share(request.tenant)
        asked = GateRequest(active.id, slo, waited_s, caller, over_share)
        verdict = self.gate.judge(asked, prediction, workers=self._computing, now_ns=now_ns)
        if verdict is SloDecision.PLACE:
            active.predicted_step_s = prediction.step_s
            self._placed(active, entry, quote)
            return
        if not late:
            self._admission.withdraw(entry)
            self._late[active.id] = (active, entry, slo)
            active.admitted = False
        if verdict is SloDecision.REFUSE:
            after_s = self.gate.retry_after_s(prediction, self._computing, now_ns, caller)
            self._refuse_now(active, slo, after_s)
            return
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_ASK_S, self._ask_again)

    def _placed(self, active: ActiveRequest, entry: Waiting, quote: Quote | None) -> None:
        if self.leave(active.id):
            self._admission.resume(entry)
        self._place(active, entry, quote)

    def _refuse_now(self, active: ActiveRequest, slo: Slo, retry_after_s: float) -> None:
        self.leave(active.id)
        error = SloUnreachableError(
            f"the fleet is too busy to begin the response within {slo.ttft_s:g} s at "
            f"{slo.itl_s:g} s per token (slo), and {self.waiting} late requests wait already",
            retry_after_s=retry_after_s,
        )
        self._refuse(active, error)

    def _ask_again(self) -> None:
        self._timer = None
        now_ns = monotonic_ns()
        for request_id in self.gate.expired(now_ns):
            active, _, slo = self._late[request_id]
            self._refuse_now(active, slo, self.gate.expire(request_id, self._computing, now_ns))
        for request_id in self.gate.next():
            if request_id in self._late:
                self._ask(*self._late[request_id], late=True)
        if self._late and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_ASK_S, self._ask_again)

    def close(self) -> None:
        """Stop asking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _caller(request: GenerationRequest, hashes: bytes) -> tuple[str, bytes, tuple[int, ...]]:
    """Return by what a client is recognised that sends its request again: tenant and prompt."""
    whole = len(hashes) // HASH_BYTES * BLOCK_TOKENS
    return request.tenant, hashes[-HASH_BYTES:], tuple(request.hashed[whole:])
