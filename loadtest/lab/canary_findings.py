"""Table, plot and conclusion of the lab ``canary``."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.lab.results import Findings, Plot, Series


@dataclass(frozen=True, kw_only=True)
class MeasuredCandidate:
    """Canary that was tried.

    Attributes:
        kind: ``equal``, ``slow`` or ``wrong``.
        requests: Requests that it answered until its rollback, or until the end.
        out_s: Time until its rollback in seconds; None if it stayed.
        reason: Reason of the rollback.
        sent: Requests that clients sent in all.
        failed: Those of them that failed.
    """

    kind: str
    model: str
    requests: int
    out_s: float | None
    reason: str
    sent: int
    failed: int

    @property
    def is_right(self) -> bool:
        """True if a good candidate stayed, or a bad one was rolled back."""
        return (self.out_s is None) == (self.kind == "equal")


def findings_of(
    candidates: Sequence[MeasuredCandidate], *, rate: float, share: float, seconds: float
) -> Findings:
    """Return the results of all candidates.

    Args:
        candidates: Canaries in the order in which they were tried.
        rate: Requests per second to the name.
        share: Share of the canary.
        seconds: Length of the load of each.
    """
    parts = [
        f"{candidate.kind}: stayed"
        if candidate.out_s is None
        else f"{candidate.kind}: rolled back after {candidate.out_s:.1f} s and "
        f"{candidate.requests} of its requests"
        for candidate in candidates
    ]
    wrong = [candidate.kind for candidate in candidates if not candidate.is_right]
    verdict = f"Not as it should be: {', '.join(wrong)}." if wrong else "All as they should be."
    failed = sum(candidate.failed for candidate in candidates)
    sent = sum(candidate.sent for candidate in candidates)
    return Findings(
        parameters={
            "requests/s": rate,
            "share of the canary": share,
            "seconds of load for each": seconds,
        },
        columns=["candidate", "model", "rolled back after, s", "its requests until then", "reason"],
        rows=[
            [candidate.kind, candidate.model, candidate.out_s, candidate.requests, candidate.reason]
            for candidate in candidates
        ],
        plots=[
            Plot(
                title="Requests of each candidate until its rollback",
                x_label="candidate",
                y_label="requests",
                x=[float(place) for place in range(len(candidates))],
                labels=[candidate.kind for candidate in candidates],
                series=[
                    Series("requests", [float(candidate.requests) for candidate in candidates])
                ],
                caption="A candidate that stayed has all its requests.",
            )
        ],
        sentence=f"{'; '.join(parts)}. {verdict} {failed} of {sent} requests of clients failed.",
        notes=[
            "Latencies are compared from 100 requests of each model on.",
            "The time of `wrong` counts from its golden prompts on.",
        ],
    )
