"""Outcomes of the requests that canaries and their predecessors have answered."""

from router.lanes.gate import GateBook, Outcome
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.call import Call


class Canaries:
    """Passes the outcomes of calls to the gates of their names."""

    def __init__(self, gates: GateBook) -> None:
        self._gates = gates

    def ended(self, call: Call) -> None:
        """Weigh a call, unless the client caused its outcome."""
        routed = call.requests[0].routed if call.requests else None
        gate = self._gates.get(routed.requested) if routed is not None else None
        if gate is None or routed is None or 400 <= call.status < 500:
            return
        failed = call.status >= 500 or any(error.status >= 500 for error in call.errors)
        if failed or not call.active:
            gate.ended(routed.model, Outcome(failed))
        else:
            gate.ended(routed.model, outcome_of(call.active[0]))


def outcome_of(active: ActiveRequest) -> Outcome:
    """Return the outcome of an answered request, with its latencies if it has generated tokens."""
    record = active.record
    if active.request.pooling or not record.first_token_ns:
        return Outcome(failed=False)
    later = record.completion_tokens // active.request.sampling.n - 1
    return Outcome(
        failed=False,
        ttft_s=(record.first_token_ns - active.request.arrived_ns) / 1e9,
        itl_s=(record.last_token_ns - record.first_token_ns) / 1e9 / later if later > 0 else None,
    )
