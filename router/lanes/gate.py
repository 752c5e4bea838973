"""Gates of canaries and shadows at one router: evidence, and the decision to end one. Pure.

    ended ──▶ fresh ──take──▶ (Redis adds up all routers) ──confirmed──▶ judge ──▶ reason
                └──────────── (Redis does not answer) ────────────▶ judge_alone ──▶ reason
    round_due ──▶ (one router runs golden prompts) ──▶ on_round ──▶ reason

A shadow has ``compared`` in place of ``ended``. Every router judges the same sums, so they decide
alike. A reason is final: the shell takes the canary out of the table that all routers share.

Latencies do not end a shadow. Its copies arrive when clients have their answers, which are closer
together than the requests were, so that they wait longer at an equal model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.types.gates import Evidence, GoldenRound, Tally
from baton.types.routes import NameRoute, RouteTable
from router.lanes.comparison import bucket_of, too_many_errors, too_slow
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.call import Call

EVERY_REQUESTS = 20
"""Requests of a canary after which its golden prompts run again."""
EVERY_NS = 5 * 10**9
"""Time after which they run again."""
FAILED_ROUNDS = 3
"""Rounds in a row without an answer after which a canary is taken out."""
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a request: whether the fleet failed it, and its latencies, if it has any."""

    failed: bool
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(slots=True)
class Gate:
    """Gate of the canary or shadow of one name."""

    name: str
    entry: NameRoute
    totals: Evidence = field(default_factory=Evidence)
    last_round: GoldenRound | None = None
    reason: str = ""
    _fresh: Evidence = field(default_factory=Evidence)
    _sent: Evidence = field(default_factory=Evidence)
    _is_sent: bool = False
    _number: int = 0
    _due_ns: int = 0
    _due_requests: int = 0
    _failed_rounds: int = 0

    def ended(self, model: str, outcome: Outcome) -> None:
        """Take the end of a request for the name, which ``model`` has answered."""
        if not self.entry.canary or model not in (self.entry.canary, self.entry.target):
            return  # a fallback, or a request without a copy
        _count(self._fresh.canary if model == self.entry.canary else self._fresh.stable, outcome)

    def compared(self, copy: Outcome, answered: Outcome, *, same: bool | None) -> None:
        """Take the end of a copy that the shadow has run, and that of the client's request.

        ``same`` is whether both answers have the same tokens; None if they need not.
        """
        tally = self._fresh.canary
        _count(tally, copy)
        _count(self._fresh.stable, answered)
        if same is not None:
            tally.same += same
            tally.different += not same

    def take(self) -> tuple[int, Evidence]:
        """Return the next evidence for Redis with its number; the same until `confirmed`."""
        if not self._is_sent:
            self._is_sent = True
            self._number += 1
            self._sent = self._fresh
            self._fresh = Evidence()
        return self._number, self._sent

    def confirmed(self) -> None:
        """Record that Redis has added the evidence of the last call of `take`."""
        self._is_sent = False
        self._sent = Evidence()

    def judge(self, totals: Evidence) -> str:
        """Return the reason to take the canary out by the sums of all routers; empty: none."""
        self.totals = totals
        return self._judged(totals)

    def judge_alone(self) -> str:
        """Return the same by the last sums, and what only this router has counted since."""
        sums = Evidence()
        for evidence in (self.totals, self._sent, self._fresh):
            sums.canary.add(evidence.canary)
            sums.stable.add(evidence.stable)
        return self._judged(sums)

    def _judged(self, totals: Evidence) -> str:
        canary = totals.canary
        stable = totals.stable
        reason = too_many_errors(canary, stable)
        if not reason and self.entry.canary:
            slow = too_slow("TTFT", canary.ttft, stable.ttft)
            reason = slow or too_slow("ITL", canary.itl, stable.itl)
        return self._decided(reason)

    def round_due(self, now_ns: int) -> bool:
        """Return whether golden prompts should run now; if so, they count as begun."""
        requests = self.totals.canary.requests
        if now_ns < self._due_ns and requests < self._due_requests:
            return False
        self._due_ns = now_ns + EVERY_NS
        self._due_requests = requests + EVERY_REQUESTS
        return True

    def on_round(self, golden: GoldenRound) -> str:
        """Return the reason to take the canary out by a round of golden prompts; empty: none."""
        self.last_round = golden
        self._failed_rounds = self._failed_rounds + 1 if golden.failed else 0
        for prompt, problem in golden.wrong.items():
            return self._decided(f"golden prompt {prompt!r}: {problem}")
        if self._failed_rounds >= FAILED_ROUNDS:
            prompt, problem = next(iter(golden.failed.items()))
            return self._decided(f"golden prompt {prompt!r} has no answer: {problem}")
        return ""

    def _decided(self, reason: str) -> str:
        """Keep the first reason, as plain text of one line, which fits a header."""
        plain = reason.encode("ascii", "replace").decode()
        shown = "".join(letter if letter.isprintable() else "?" for letter in plain)[:_LONGEST]
        self.reason = self.reason or shown
        return self.reason


def _count(tally: Tally, outcome: Outcome) -> None:
    tally.requests += 1
    tally.errors += outcome.failed
    for counts, took_s in ((tally.ttft, outcome.ttft_s), (tally.itl, outcome.itl_s)):
        if took_s is not None:
            bucket = bucket_of(took_s)
            counts[bucket] = counts.get(bucket, 0) + 1


class GateBook:
    """Gates of all names with a canary or a shadow."""

    def __init__(self) -> None:
        self._gates: dict[str, Gate] = {}

    def __iter__(self) -> Iterator[Gate]:
        return iter(list(self._gates.values()))

    def get(self, name: str) -> Gate | None:
        """Return the gate of a name."""
        return self._gates.get(name)

    def follow(self, table: RouteTable) -> None:
        """Begin gates of new canaries and shadows, and drop those of ended ones."""
        kept: dict[str, Gate] = {}
        for name, entry in table.names.items():
            if not entry.candidate:
                continue
            gate = self._gates.get(name)
            if gate is None or gate.entry.since_ms != entry.since_ms:
                gate = Gate(name, entry)
            gate.entry = entry
            kept[name] = gate
        self._gates = kept

    def ended(self, call: Call) -> None:
        """Weigh a call for a name with a canary, unless the client caused its outcome."""
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
