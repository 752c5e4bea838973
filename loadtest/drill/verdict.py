"""Judgement of a drill. Does no I/O.

- no wrong token: a response equals the golden one, a partial response is its beginning
- no hang: no request reaches the client's time limit
- one typed end: each request of the plan has exactly one, with the reason
- no leak: blocks, queues and quarantine are empty again, and the block equation holds
- recovery: time from the fault until requests succeed again
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from loadtest.client.records import CallRecord
from loadtest.drill.phases import PhaseFigures
from loadtest.metrics.summary import error_name

_TYPED_ERRORS = ("http_error", "stream_error")
_SHOWN = 3  # faults of one kind that a verdict names


class ShownWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of ``GET /fleet``, with the fields that drills check."""

    id: str
    role: str
    state: str
    epoch: int
    pid: int
    host: str
    address: str = ""
    kv_blocks: dict[str, int]
    running: int
    waiting: int

    def leaks(self) -> list[str]:
        """Return what an idle worker still holds, and blocks that do not add up."""
        leaks = [
            f"{self.id}: {count} {what}"
            for what, count in (
                ("blocks leased", self.kv_blocks["leased"]),
                ("blocks quarantined", self.kv_blocks["quarantined"]),
                ("requests running", self.running),
                ("requests waiting", self.waiting),
            )
            if count
        ]
        parts = sum(self.kv_blocks[k] for k in ("free", "cached", "leased", "quarantined"))
        if parts != self.kv_blocks["total"]:
            leaks.append(
                f"{self.id}: {parts} of {self.kv_blocks['total']} blocks are accounted for"
            )
        return leaks


class DrillOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a drill; ``faults`` is empty if it passed."""

    drill: str
    what_was_done: str
    requests: int
    ends: dict[str, int]
    errors: dict[str, int]  # by name, such as "503 no_workers"
    compared: int  # responses, whole or partial, compared with golden ones
    recovered_s: float | None  # after the fault; None if never
    faults: list[str]
    phases: list[PhaseFigures] = []  # of an overload with latency limits

    @property
    def passed(self) -> bool:
        """True if no fault was found."""
        return not self.faults


@dataclass
class DrillRun:
    """Load with a fault. Times are on the records' clock.

    Attributes:
        planned: Index of each request; those that have ended have ``records``.
        zero_s: Second 0 of the load, on the monotonic clock.
        faults: Faults that were found while the fault was injected.
        other_until_s: Requests that were sent before may have the answers of another model.
        undone: Why the fault was not injected.
    """

    planned: list[int]
    records: list[CallRecord] = field(default_factory=list)
    zero_s: float = 0.0
    fault_s: float = 0.0
    what_was_done: str = ""
    faults: list[str] = field(default_factory=list)
    other_until_s: float = 0.0
    undone: RuntimeError | None = None


def judge(
    name: str,
    run: DrillRun,
    golden: Mapping[int, str],
    workers: Sequence[ShownWorker],
    *,
    may_fail: bool,
    recovery_limit_s: float,
) -> DrillOutcome:
    """Judge a drill, which ``may_fail`` with typed errors before the start of a response.

    ``golden`` has the correct responses by index. Wrong tokens, hangs, silence and interrupted
    responses are always faults. ``workers`` is the state of the fleet some seconds after the last
    request.
    """
    records = run.records
    recovered_s = recovery_s(records, run.fault_s)
    faults = [
        *run.faults,
        *wrong_tokens([one for one in records if one.sent_s >= run.other_until_s], golden),
        *wrong_ends(run.planned, records, may_fail=may_fail),
        *left_behind(workers),
    ]
    if recovered_s is None:
        faults.append("no request after the fault succeeded")
    elif recovered_s > recovery_limit_s:
        faults.append(f"recovered after {recovered_s:.1f} s, limit {recovery_limit_s:g} s")
    return DrillOutcome(
        drill=name,
        what_was_done=run.what_was_done,
        requests=len(run.planned),
        ends=dict(Counter(record.end for record in records)),
        errors=dict(Counter(error_name(r) for r in records if r.end not in ("ok", "aborted"))),
        compared=sum(bool(record.answer) for record in records),
        recovered_s=recovered_s,
        faults=faults,
    )


def left_behind(workers: Sequence[ShownWorker]) -> list[str]:
    """Return what the workers of an idle fleet still hold, and workers that are not ready."""
    return [
        *(leak for worker in workers for leak in worker.leaks()),
        *(f"{w.id} is {w.state}" for w in workers if w.state != "ready"),
    ]


def recovery_s(records: Sequence[CallRecord], fault_s: float) -> float | None:
    """Return the time from the fault to the first success that no later failure follows.

    None if no request sent after the fault, and after the last failure, succeeded.
    """
    after = [r for r in records if r.intended_s >= fault_s and r.end != "aborted"]
    last_failed_s = max((r.intended_s for r in after if r.end != "ok"), default=fault_s)
    good = [r.ended_s for r in after if r.end == "ok" and r.intended_s >= last_failed_s]
    return min(good) - fault_s if good else None


def wrong_tokens(records: Sequence[CallRecord], golden: Mapping[int, str]) -> list[str]:
    """Return the responses that differ from the golden ones, or partial ones from their start."""
    wrong = []
    for record in records:
        answer = record.answer or ""
        right = golden[record.index]
        is_right = answer == right if record.end == "ok" else right.startswith(answer)
        if not is_right:
            wrong.append(f"#{record.index} ({record.end}) sent {answer!r} instead of {right!r}")
    return shortened("WRONG TOKENS", wrong)


def wrong_ends(
    planned: Sequence[int], records: Sequence[CallRecord], *, may_fail: bool
) -> list[str]:
    """Return the requests without exactly one end, or with one that is not allowed."""
    counts = Counter(record.index for record in records)
    faults = [f"request #{i} has {counts[i]} ends" for i in planned if counts[i] != 1]
    allowed = {"ok", "aborted"} | ({"http_error"} if may_fail else set())
    bad = [
        f"#{r.index} {r.end} {r.status or ''} {r.detail}".strip()
        for r in records
        if r.end not in allowed or (r.end in _TYPED_ERRORS and not r.detail)
    ]
    return [*faults, *shortened("bad end", bad)]


def shortened(kind: str, faults: list[str]) -> list[str]:
    """Return the first faults of one kind, and the number of the others."""
    shown = [f"{kind}: {fault}" for fault in faults[:_SHOWN]]
    more = len(faults) - _SHOWN
    return [*shown, f"{kind}: {more} more"] if more > 0 else shown
