"""The queue before placement: bounded, and fair between tenants. Sans-IO.

Priorities are strict: lower numbers run first. Among equals tenants take turns
(``router/routing/requests/fair_queue.py``). A full queue is shared fairly as well: a tenant with
fewer requests in it than others takes the newest place of the tenant that has most.
"""

from collections import Counter, defaultdict, deque
from math import ceil

from baton.registry.router_demands import TenantDemand
from baton.types.errors import QueueFullError
from router.routing.requests.fair_queue import FairQueue, Waiting

_RATE_WINDOW_NS = 30_000_000_000
_MAX_RETRY_AFTER_S = 600.0
_MOST_AHEAD_TOKENS = 65_536.0  # that service at other routers counts against a tenant


class Admission:
    """The requests that wait, how many run, and how fast they end.

    Args:
        max_waiting: Requests that may wait at all routers together; one more is refused.

    Attributes:
        limit: Of these, how many may wait at this one.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = self.limit = max_waiting
        self.running = 0  # sequences
        self._running_of: Counter[str] = Counter()  # by tenant
        self._waiting_of: Counter[str] = Counter()  # the same of those that wait
        self._served_tokens: defaultdict[str, float] = defaultdict(float)
        self._levels: dict[int, FairQueue] = {}  # by priority; none is empty
        self._places: dict[str, Waiting] = {}  # by request
        self._of_tenant: Counter[str] = Counter()
        self._ends_ns: deque[int] = deque(maxlen=256)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._places)

    def offer(self, entry: Waiting, now_ns: int, *, expected_s: float) -> Waiting | None:
        """Queue up.

        Args:
            entry: The request.
            now_ns: Monotonic clock.
            expected_s: How long one request is expected to take; used until ends were seen.

        Returns:
            The place that ``entry`` has taken over, if any: its request ends with `refusal`.

        Raises:
            QueueFullError: The queue is full, and no tenant has more in it than its share.
        """
        loser = None
        if self.waiting >= self.limit:
            loser = self._loser(entry.tenant)
            if loser is None:
                raise self.refusal(entry.tenant, now_ns, expected_s=expected_s)
            self.leave(loser.request_id)
        self._levels.setdefault(entry.priority, FairQueue()).push(entry)
        self._places[entry.request_id] = entry
        self._of_tenant[entry.tenant] += 1
        self._waiting_of[entry.tenant] += entry.weight
        return loser

    def _loser(self, newcomer: str) -> Waiting | None:
        """The newest place of the tenant with most, if ``newcomer`` stays below it even then."""
        ranked = self._of_tenant.most_common(1)
        if not ranked or ranked[0][1] <= self._of_tenant[newcomer] + 1:
            return None
        lines = (self._levels[level].newest_of(ranked[0][0]) for level in sorted(self._levels))
        return [place for place in lines if place is not None][-1]

    def refusal(self, tenant: str, now_ns: int, *, expected_s: float) -> QueueFullError:
        """The error for a tenant without a place."""
        own = self._of_tenant[tenant]
        return QueueFullError(
            f"{self.waiting} requests are waiting here, {own} of them this tenant's; the limit of "
            f"all routers is {self.max_waiting} (max_queued_requests)",
            retry_after_s=self.retry_after_s(tenant, now_ns, expected_s=expected_s),
        )

    def retry_after_s(self, tenant: str, now_ns: int, *, expected_s: float) -> float:
        """When a place is expected: the time in which the tenant's part drains at its present rate.

        Tenants that wait share the rate.
        """
        rate = self.drain_per_s(now_ns)
        if rate <= 0:
            rate = max(self.running, 1) / max(expected_s, 1e-3)
        ahead = min(self._of_tenant[tenant] * len(self._of_tenant), self.waiting)
        return float(min(max(ceil(ahead / rate), 1), _MAX_RETRY_AFTER_S))

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
        if not self._levels:
            return None
        priority = min(self._levels)
        level = self._levels[priority]
        if self.running and self.running + level.head().weight > window:
            return None
        entry = level.pop()
        self.running += entry.weight
        self._running_of[entry.tenant] += entry.weight
        self._served_tokens[entry.tenant] += entry.cost_tokens
        self._forget(entry)
        return entry

    def charge(self, entry: Waiting, cost_tokens: float) -> None:
        """A request was placed, and what it costs is known better now."""
        more_tokens = cost_tokens - entry.cost_tokens
        self._served_tokens[entry.tenant] += more_tokens
        level = self._levels.get(entry.priority)
        if level is not None:
            level.charge(entry.tenant, more_tokens)

    def demands(self) -> dict[str, TenantDemand]:
        """What there is to do for each tenant that has anything here, for the other routers."""
        busy = self._running_of.keys() | self._waiting_of.keys()
        for tenant in self._served_tokens.keys() - busy:
            del self._served_tokens[
                tenant
            ]  # it begins anew: a pause earns nothing and owes nothing
        return {
            tenant: TenantDemand(
                self._running_of[tenant], self._waiting_of[tenant], self._served_tokens[tenant]
            )
            for tenant in busy
        }

    def served_elsewhere(self, tenant: str, tokens: float) -> None:
        """Another router has served a tenant: where it waits here, it waits longer."""
        for level in self._levels.values():
            level.charge(tenant, tokens, ahead=_MOST_AHEAD_TOKENS)

    def leave(self, request_id: str) -> None:
        """A waiting request goes away (cancelled, or its deadline passed); others are ignored."""
        entry = self._places.get(request_id)
        if entry is not None:
            self._levels[entry.priority].remove(entry)
            self._forget(entry)

    def _forget(self, entry: Waiting) -> None:
        del self._places[entry.request_id]
        self._of_tenant[entry.tenant] -= 1
        if not self._of_tenant[entry.tenant]:
            del self._of_tenant[entry.tenant]
        _take(self._waiting_of, entry.tenant, entry.weight)
        if not self._levels[entry.priority]:
            del self._levels[entry.priority]

    def release(self, weight: int, now_ns: int, tenant: str = "default") -> None:
        """A running request ended."""
        self.running -= weight
        _take(self._running_of, tenant, weight)
        self._ends_ns.append(now_ns)


def _take(counts: Counter[str], tenant: str, weight: int) -> None:
    counts[tenant] -= weight
    if not counts[tenant]:
        del counts[tenant]
