"""Running requests that this picker has placed, which the reports of workers count among others.

An attached server reports all that it runs, up to a few seconds late. The requests of this picker
count from their choice to their end, so they are left out of reports: as many as ran together at
any time since the report may have been made.
"""

from collections import Counter, defaultdict, deque

from batonpb.common_pb2 import WorkerStatus

_LATE_NS = 3_000_000_000
_FIELDS = (
    "running",
    "waiting",
    "answering",
    "answering_context",
    "coming_context",
    "queued_prompt_tokens",
    "queued_prompt_context",
)


class OwnLoad:
    """Sequences that run at each worker's server. Sans-IO."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._before: defaultdict[str, deque[tuple[int, int]]] = defaultdict(deque)

    def began(self, worker_id: str, sequences: int) -> None:
        """Count sequences at a worker."""
        self._running[worker_id] += sequences

    def ended(self, worker_id: str, sequences: int, now_ns: int) -> None:
        """Note their end; ``_before`` keeps decreasing numbers, each with its last moment."""
        before = self._before[worker_id]
        while before and before[-1][1] <= self._running[worker_id]:
            before.pop()
        before.append((now_ns, self._running[worker_id]))
        self._running[worker_id] -= sequences

    def most(self, worker_id: str, now_ns: int) -> int:
        """Return the largest number that ran together since a report may have been made."""
        before = self._before[worker_id]
        while before and before[0][0] < now_ns - _LATE_NS:
            before.popleft()
        return max(self._running[worker_id], before[0][1] if before else 0)

    def leave_out(self, worker_id: str, status: WorkerStatus, now_ns: int) -> None:
        """Leave this picker's sequences out of a report."""
        reported = status.answering + status.waiting
        kept = max(reported - self.most(worker_id, now_ns), 0) / (reported or 1)
        for field in _FIELDS:
            setattr(status, field, round(getattr(status, field) * kept))
