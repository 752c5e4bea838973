"""Requests that were refused before a worker could get them, for operators and clients to find."""

from collections import OrderedDict
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

from baton.types.errors import BatonError
from router.routing.reports.past_reports import PastReport
from router.routing.requests.call import Call

_ABSENT_OF_LINE = ("first_token_s", "prefill", "decode", "mode", "regret_s")
_ABSENT_OF_REPORT = (
    *("ticket", "priority", "user", "mode", "adapter", "model", "seed", "expected_tokens"),
    *("session", "hints", "prompt_change", "chosen", "route"),
    *("regret_s", "better", "worker_times_s"),
)
_EMPTY_OF_REPORT = ("finish_reasons", "candidates", "prefix_from", "longest_gaps")


def refusal(call: Call, error: BatonError, refused_ns: int) -> PastReport:
    """Return the report of a refused call, with the fields of a request that was placed."""
    elapsed_s = round((refused_ns - call.arrived_ns) / 1e9, 6)
    sentence = f"Refused with {call.status} {error.code}: {error.message}"
    both = {
        "id": call.id,
        "tenant": call.tenant,  # empty if its API key was not accepted
        "state": "refused",
        "status": call.status,
        "elapsed_s": elapsed_s,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "attempts": 0,
    }
    line = {"cached_tokens": 0, "error": error.code, "cause": "refused", "sentence": sentence}
    report: dict[str, Any] = {
        **dict.fromkeys(_ABSENT_OF_REPORT),
        **{name: [] for name in _EMPTY_OF_REPORT},
        "client_request_id": call.client_id or None,
        "moves": 0,
        "spread": False,
        "error": {"code": error.code, "message": error.message},
        "usual_gap_s": 0.0,
        "timeline": [{"event": f"refused: {error.code}", "at_s": elapsed_s}],
        "phases_s": {},
        "why": {"cause": "refused", "sentence": sentence, "cost_s": 0.0},
    }
    return PastReport(
        tenant=call.tenant,
        client_id=call.client_id,
        arrived_ns=call.arrived_ns,
        summary={**dict.fromkeys(_ABSENT_OF_LINE), **both, **line},
        report={**report, **both},
    )


class RefusedRequests:
    """The latest refused requests, of which the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._refusals: OrderedDict[str, PastReport] = OrderedDict()

    def refused(self, call: Call) -> None:
        """Keep a call that no kept request reports."""
        if call.error is None or call.is_kept:
            return
        self._refusals[call.id] = refusal(call, call.error, monotonic_ns())
        while len(self._refusals) > self._limit:
            self._refusals.popitem(last=False)

    def get(self, name: str, tenant: str | None = None) -> dict[str, Any] | None:
        """Return the report of a request by its id, or of the latest with this id of the client's.

        Args:
            name: Id that the router or the client gave.
            tenant: Its owner, or None for any.
        """
        known = self._refusals.get(name)
        if known is None:
            named = (each for each in self.newest_first(tenant) if each.client_id == name)
            known = next(named, None)
        return known.report if known is not None and tenant in (None, known.tenant) else None

    def newest_first(self, tenant: str | None = None) -> Iterator[PastReport]:
        """Iterate over all, or those of a tenant."""
        newest = reversed(self._refusals.values())
        return (each for each in newest if tenant in (None, each.tenant))
