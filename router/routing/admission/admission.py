"""Queue before placement: bounded, and fair between tenants. Sans-IO.

Priorities are strict: lower numbers run first. Within a priority tenants take turns
(``router/routing/admission/fair_queue.py``). A full queue is shared fairly as well: a tenant with
fewer requests in it than others takes the newest place of the tenant with most. Tenants have
weights: twice the weight is twice the part of the service and of the queue.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from math import ceil

from baton.registry.router_demands import TenantDemand
from baton.types.errors import QueueFullError
from router.routing.admission.fair_queue import FairQueue, Waiting, equal_weights

_RATE_WINDOW_NS = 30_000_000_000
_MAX_RETRY_AFTER_S = 600.0
_MOST_AHEAD_TOKENS = 65_536.0  # charged at most for service at other routers


class Admission:
    """Waiting requests, number of running ones, and rate of ends.

    Args:
        max_waiting: Limit of waiting requests at all routers together.
        weight_of: Function from a tenant to its weight, above 0.

    Attributes:
        limit: Limit of waiting requests at this router.
        overtook: Whether `pop` has last taken a request by the turn of its session or tier.
    """

    def __init__(self, max_waiting: int, weight_of: Callable[[str], float] = equal_weights) -> None:
        self._weight_of = weight_of
        self.max_waiting = self.limit = max_waiting
        self.overtook = False
        self.running = 0  # sequences
        self._running_of: Counter[str] = Counter()  # by tenant
        self._waiting_of: Counter[str] = Counter()  # sequences that wait, by tenant
        self._served_tokens: defaultdict[str, float] = defaultdict(float)
        self._levels: dict[int, FairQueue] = {}  # by priority; none is empty
        self._places: dict[str, Waiting] = {}  # by request
        self._of_tenant: Counter[str] = Counter()
        self._ends_ns: deque[int] = deque(maxlen=256)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._places)

    @property
    def head(self) -> Waiting | None:
        """The request that `pop` would take next."""
        return self._levels[min(self._levels)].head() if self._levels else None

    def offer(self, entry: Waiting, now_ns: int, *, expected_s: float) -> Waiting | None:
        """Add a request to the queue; return the place that it has taken over, if any.

        The request of that place ends with `refusal`. ``expected_s`` is the expected duration of a
        request, used until ends were seen.

        Raises:
            QueueFullError: The queue is full, and no tenant has more than its share in it.
        """
        loser = None
        if self.waiting >= self.limit:
            loser = self._loser(entry.tenant)
            if loser is None:
                raise self.refusal(entry.tenant, now_ns, expected_s=expected_s)
            self.leave(loser.request_id)
        self._level(entry.priority).push(entry)
        self._places[entry.request_id] = entry
        self._of_tenant[entry.tenant] += 1
        self._waiting_of[entry.tenant] += entry.weight
        return loser

    def _level(self, priority: int) -> FairQueue:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = FairQueue(self._weight_of)
        return level

    def _loser(self, newcomer: str) -> Waiting | None:
        """Return the newest place of the tenant with most, if ``newcomer`` stays below it."""
        held = {name: count / self._weight_of(name) for name, count in self._of_tenant.items()}
        most = max(held, key=held.__getitem__, default=newcomer)
        own = (self._of_tenant[newcomer] + 1) / self._weight_of(newcomer)
        if most == newcomer or held[most] <= own:
            return None
        lines = (self._levels[level].newest_of(most) for level in sorted(self._levels))
        return [place for place in lines if place is not None][-1]

    def refusal(self, tenant: str, now_ns: int, *, expected_s: float) -> QueueFullError:
        """Return the error for a tenant without a place."""
        own = self._of_tenant[tenant]
        return QueueFullError(
            f"the queue is full: {self.waiting} requests wait here, {own} of this tenant; "
            f"the limit for all routers is {self.max_waiting} (max_queued_requests)",
            retry_after_s=self.retry_after_s(tenant, now_ns, expected_s=expected_s),
        )

    def retry_after_s(self, tenant: str, now_ns: int, *, expected_s: float) -> float:
        """Return the time in which the tenant's part of the queue drains at the current rate.

        Waiting tenants share the rate by their weights.
        """
        rate = self.drain_per_s(now_ns)
        if rate <= 0:
            rate = max(self.running, 1) / max(expected_s, 1e-3)
        tenants = sum(map(self._weight_of, self._of_tenant)) / self._weight_of(tenant)
        ahead = min(self._of_tenant[tenant] * tenants, self.waiting)
        return float(min(max(ceil(ahead / rate), 1), _MAX_RETRY_AFTER_S))

    def drain_per_s(self, now_ns: int) -> float:
        """Return the recent rate of ended requests; 0 if too few have ended."""
        while self._ends_ns and now_ns - self._ends_ns[0] > _RATE_WINDOW_NS:
            self._ends_ns.popleft()
        if len(self._ends_ns) < 2:
            return 0.0
        return len(self._ends_ns) * 1e9 / max(now_ns - self._ends_ns[0], 1)

    def pop(self, window: int) -> Waiting | None:
        """Take the next request that fits into the window; a wider request runs alone."""
        if not self._levels:
            return None
        priority = min(self._levels)
        level = self._levels[priority]
        if self.running and self.running + level.head().weight > window:
            return None
        entry = level.pop()
        self.overtook = level.overtook
        self.running += entry.weight
        self._running_of[entry.tenant] += entry.weight
        self._served_tokens[entry.tenant] += entry.cost_tokens
        self._forget(entry)
        return entry

    def withdraw(self, entry: Waiting) -> None:
        """Undo `pop`: the request is not placed now."""
        self.running -= entry.weight
        _take(self._running_of, entry.tenant, entry.weight)
        self.charge(entry, 0.0)

    def resume(self, entry: Waiting) -> None:
        """Note that a withdrawn request is placed after all."""
        self.running += entry.weight
        self._running_of[entry.tenant] += entry.weight
        self.charge(entry, 2 * entry.cost_tokens)

    def is_over_share(self, tenant: str) -> bool:
        """Return whether a tenant runs more than its part, by weight, beside others."""
        if len(self._running_of) < 2:
            return False
        weights = sum(map(self._weight_of, self._running_of))
        return self._running_of[tenant] * weights > self.running * self._weight_of(tenant)

    def charge(self, entry: Waiting, cost_tokens: float) -> None:
        """Correct the cost of a request that was placed."""
        more_tokens = cost_tokens - entry.cost_tokens
        self._served_tokens[entry.tenant] += more_tokens
        level = self._levels.get(entry.priority)
        if level is not None:
            level.charge(entry.tenant, more_tokens)

    def demands(self) -> dict[str, TenantDemand]:
        """Return the demand of each tenant with requests here, for the other routers."""
        busy = self._running_of.keys() | self._waiting_of.keys()
        for tenant in self._served_tokens.keys() - busy:
            del self._served_tokens[tenant]  # starts over: a pause gives no credit and no debt
        return {
            tenant: TenantDemand(
                self._running_of[tenant], self._waiting_of[tenant], self._served_tokens[tenant]
            )
            for tenant in busy
        }

    def served_elsewhere(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for service at another router: it waits longer here."""
        for level in self._levels.values():
            level.charge(tenant, tokens, ahead=_MOST_AHEAD_TOKENS)

    def leave(self, request_id: str) -> None:
        """Remove a waiting request (cancelled, or its deadline passed); others are ignored."""
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
        """Note the end of a running request."""
        self.running -= weight
        _take(self._running_of, tenant, weight)
        self._ends_ns.append(now_ns)


def _take(counts: Counter[str], tenant: str, weight: int) -> None:
    counts[tenant] -= weight
    if not counts[tenant]:
        del counts[tenant]
