"""The queue before placement: bounded, ordered by (priority, ticket), honest. Sans-IO."""

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import ceil

from engine.core.errors import QueueFullError

_RATE_WINDOW_NS = 30_000_000_000
_MAX_RETRY_AFTER_S = 600.0


@dataclass(order=True, frozen=True, slots=True)
class Waiting:
    """A place in the queue. ``weight`` is how many sequences the request runs."""

    priority: int
    ticket: int
    request_id: str = field(compare=False)
    weight: int = field(compare=False, default=1)


class Admission:
    """Who waits, who runs, and how fast places become free.

    Args:
        max_waiting: Requests that may wait; one more is refused.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.running = 0  # sequences
        self._heap: list[Waiting] = []
        self._gone: set[str] = set()
        self._last_ticket = 0
        self._ends_ns: deque[int] = deque(maxlen=256)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._heap) - len(self._gone)

    def draw_ticket(self, now_us: int) -> int:
        """The next ticket number: rises always, and fairly beside the tickets of other routers.

        Args:
            now_us: Wall clock in microseconds; all that routers have in common.
        """
        self._last_ticket = max(self._last_ticket + 1, now_us)
        return self._last_ticket

    def offer(self, entry: Waiting, now_ns: int, *, expected_s: float) -> None:
        """Queue up.

        Args:
            entry: The request.
            now_ns: Monotonic clock.
            expected_s: How long one request is expected to take; used until ends were seen.

        Raises:
            QueueFullError: The queue is full.
        """
        if self.waiting >= self.max_waiting:
            raise QueueFullError(
                f"{self.waiting} requests are waiting, which is the limit (max_queued_requests)",
                retry_after_s=self.retry_after_s(now_ns, expected_s=expected_s),
            )
        heapq.heappush(self._heap, entry)

    def retry_after_s(self, now_ns: int, *, expected_s: float) -> float:
        """When a place is expected: the time in which the queue drains at its present rate."""
        rate = self.drain_per_s(now_ns)
        if rate <= 0:
            rate = max(self.running, 1) / max(expected_s, 1e-3)
        return float(min(max(ceil(self.waiting / rate), 1), _MAX_RETRY_AFTER_S))

    def drain_per_s(self, now_ns: int) -> float:
        """Requests that ended per second lately; 0 when too few did to tell."""
        while self._ends_ns and now_ns - self._ends_ns[0] > _RATE_WINDOW_NS:
            self._ends_ns.popleft()
        if len(self._ends_ns) < 2:
            return 0.0
        return len(self._ends_ns) * 1e9 / max(now_ns - self._ends_ns[0], 1)

    def pop(self, window: int) -> Waiting | None:
        """The next request that may run.

        Args:
            window: Sequences that may run at once. A request wider than the window runs alone.
        """
        while self._heap and self._heap[0].request_id in self._gone:
            self._gone.discard(heapq.heappop(self._heap).request_id)
        if not self._heap:
            return None
        weight = self._heap[0].weight
        if self.running and self.running + weight > window:
            return None
        self.running += weight
        return heapq.heappop(self._heap)

    def leave(self, request_id: str) -> None:
        """A waiting request goes away (cancelled, or its deadline passed)."""
        self._gone.add(request_id)
        if len(self._gone) * 2 > len(self._heap):  # keep the dead from piling up
            self._heap = [entry for entry in self._heap if entry.request_id not in self._gone]
            heapq.heapify(self._heap)
            self._gone.clear()

    def release(self, weight: int, now_ns: int) -> None:
        """A running request ended."""
        self.running -= weight
        self._ends_ns.append(now_ns)
