"""What of the fleet's places is one router's, so that all of them together keep to the limits.

    tenant a  ── 40 at router 1, 0 at router 2 ─┐  of 64 places: a gets 32, all at router 1;
    tenant b  ── 60 at router 1, 60 at router 2 ┘  b gets 32, 16 at each: windows of 48 and 16

Places go to tenants first, in equal parts as far as they want them, and of a tenant's part each
router has as much as of its demand. So who sends to one router has no more than who sends to all.
What is left over, all routers may take in equal parts before they have told of it.

Sans-IO. Figures are those that routers told last, some hundred milliseconds ago: where demand jumps
at several at once, they are together above the limit until they have heard of each other, by what
their parts overlap. A router that nobody hears of any more is not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.registry.router_demands import RouterDemand, TenantDemand

SILENT_NS = 2_000_000_000
GONE_NS = 30_000_000_000


@dataclass(slots=True)
class _Other:
    demand: RouterDemand
    heard_ns: int  # when it last told something new


class Shares:
    """One router's part of the windows at all workers, and of the queue."""

    def __init__(self) -> None:
        self._others: dict[str, _Other] = {}
        self._live: list[RouterDemand] = []
        self._own = RouterDemand(beat=0)

    @property
    def routers(self) -> int:
        """How many there are, this one included."""
        return 1 + len(self._live)

    def hear(
        self, own: RouterDemand, others: Mapping[str, RouterDemand], now_ns: int
    ) -> dict[str, float]:
        """Take what routers told.

        Args:
            own: What this one told in the same exchange.
            others: By router.
            now_ns: Monotonic clock.

        Returns:
            Tokens that each tenant was served elsewhere since the last time.
        """
        served: dict[str, float] = {}
        for router_id, demand in others.items():
            known = self._others.get(router_id)
            if known is None:
                # What was told before this router looked may be of one that is long dead.
                self._others[router_id] = _Other(demand, now_ns)
            elif known.demand.beat != demand.beat:
                for tenant, told in demand.tenants.items():
                    before = known.demand.tenants.get(tenant, TenantDemand())
                    more = told.served_tokens - before.served_tokens
                    if more > 0:
                        served[tenant] = served.get(tenant, 0.0) + more
                self._others[router_id] = _Other(demand, now_ns)
        for router_id in self._others.keys() - others.keys():
            del self._others[router_id]
        self._live = [
            other.demand for other in self._others.values() if now_ns - other.heard_ns < SILENT_NS
        ]
        self._own = own
        return served

    def gone(self, now_ns: int) -> list[str]:
        """Routers that have told nothing new for long."""
        return [name for name, it in self._others.items() if now_ns - it.heard_ns > GONE_NS]

    def alone(self) -> None:
        """Nobody can be heard: limits are this router's own again."""
        self._live = []

    def window(self, total: int) -> int:
        """Sequences that this router may have at workers, of ``total`` that all may have."""
        if not self._live or not total:
            return total
        demands = [self._own, *self._live]
        wanted: dict[str, int] = {}
        for demand in demands:
            for tenant, told in demand.tenants.items():
                wanted[tenant] = wanted.get(tenant, 0) + told.running + told.waiting
        parts = _equal_parts(wanted, total)
        own = sum(
            parts[tenant] * (told.running + told.waiting) / wanted[tenant]
            for tenant, told in self._own.tenants.items()
            if wanted[tenant]
        )
        spare = max(total - sum(wanted.values()), 0) / len(demands)
        elsewhere = sum(told.running for demand in self._live for told in demand.tenants.values())
        return max(min(round(own + spare), total - elsewhere), 1)

    def queue_limit(self, total: int) -> int:
        """Requests that may wait here, of ``total`` that may wait at all routers."""
        elsewhere = sum(demand.queued for demand in self._live)
        return max(total // self.routers, total - elsewhere, 1)


def _equal_parts(wanted: Mapping[str, int], total: int) -> dict[str, float]:
    """``total`` in equal parts, but to nobody more than is wanted."""
    parts: dict[str, float] = {}
    left = float(total)
    open_ = len(wanted)
    for tenant, most in sorted(wanted.items(), key=lambda item: item[1]):
        parts[tenant] = min(float(most), left / open_)
        left = left - parts[tenant]
        open_ = open_ - 1
    return parts
