"""Requests that were refused before a worker could get them, for operators and clients to find."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

from router.routing.requests.call import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRequest:
    """A request that got an error in place of a response.

    Attributes:
        tenant: Its tenant; "" if its API key was not accepted.
        reason: Message of the error, as the client saw it.
        arrived_ns: Time of its arrival; ``refused_ns`` that of the error.
    """

    id: str
    client_id: str
    tenant: str
    endpoint: str
    status: int
    code: str
    reason: str
    arrived_ns: int
    refused_ns: int

    @property
    def elapsed_s(self) -> float:
        """Time from its arrival to the error."""
        return (self.refused_ns - self.arrived_ns) / 1e9

    @property
    def sentence(self) -> str:
        """Why it was refused."""
        return f"Refused with {self.status} {self.code}: {self.reason}"

    def line(self, now_ns: int) -> dict[str, Any]:
        """Return its line of the list, with the fields of a request that was placed."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "state": "refused",
            "status": self.status,
            "elapsed_s": round(self.elapsed_s, 6),
            "first_token_s": None,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "completion_tokens": 0,
            "prefill": None,
            "decode": None,
            "mode": None,
            "attempts": 0,
            "error": self.code,
            "regret_s": None,
            "cause": "refused",
            "sentence": self.sentence,
            "age_s": round((now_ns - self.arrived_ns) / 1e9, 6),
        }

    def report(self) -> dict[str, Any]:
        """Return its report, with the fields of a request that was placed."""
        nothing = (
            "ticket",
            "priority",
            "user",
            "mode",
            "adapter",
            "model",
            "seed",
            "expected_tokens",
            "session",
            "hints",
            "prompt_change",
            "chosen",
            "route",
        )
        unknown = ("regret_s", "better", "worker_times_s")
        lists = ("finish_reasons", "candidates", "prefix_from", "longest_gaps")
        return {
            **dict.fromkeys((*nothing, *unknown)),
            **{name: [] for name in lists},
            "id": self.id,
            "client_request_id": self.client_id or None,
            "tenant": self.tenant,
            "state": "refused",
            "status": self.status,
            "attempts": 0,
            "moves": 0,
            "spread": False,
            "error": {"code": self.code, "message": self.reason},
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "usual_gap_s": 0.0,
            "timeline": [{"event": f"refused: {self.code}", "at_s": round(self.elapsed_s, 6)}],
            "elapsed_s": round(self.elapsed_s, 6),
            "phases_s": {},
            "why": {"cause": "refused", "sentence": self.sentence, "cost_s": 0.0},
        }


class RefusedRequests:
    """The latest refused requests, of which the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._refusals: OrderedDict[str, RefusedRequest] = OrderedDict()

    def refused(self, call: Call) -> None:
        """Keep a call that no kept request reports."""
        error = call.error
        if error is None or call.is_kept:
            return
        self._refusals[call.id] = RefusedRequest(
            id=call.id,
            client_id=call.client_id,
            tenant=call.tenant,
            endpoint=call.endpoint,
            status=call.status,
            code=error.code,
            reason=error.message,
            arrived_ns=call.arrived_ns,
            refused_ns=monotonic_ns(),
        )
        while len(self._refusals) > self._limit:
            self._refusals.popitem(last=False)

    def get(self, name: str, tenant: str | None = None) -> RefusedRequest | None:
        """Return a request by its id, or the latest with this id of the client's.

        Args:
            name: Id that the router or the client gave.
            tenant: Its owner, or None for any.
        """
        refusal = self._refusals.get(name)
        if refusal is None:
            of_client = (each for each in self.newest_first(tenant) if each.client_id == name)
            return next(of_client, None)
        return refusal if tenant in (None, refusal.tenant) else None

    def newest_first(self, tenant: str | None = None) -> Iterator[RefusedRequest]:
        """Iterate over all, or those of a tenant."""
        newest = reversed(self._refusals.values())
        return (refusal for refusal in newest if tenant in (None, refusal.tenant))
