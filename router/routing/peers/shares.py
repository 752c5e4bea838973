"""Share of one router in the fleet's places, so that all routers together keep to the limits.

    tenant a  ── 40 at router 1, 0 at router 2 ─┐  of 64 places: a gets 32, all at router 1;
    tenant b  ── 60 at router 1, 60 at router 2 ┘  b gets 32, 16 at each: windows of 48 and 16

Places go to tenants first, in parts by weight up to their demand, and each router gets the part of
a tenant's places that it has of the tenant's demand. So a tenant gains nothing by sending to all
routers. Places that are left over are split equally among the routers.

Sans-IO. Demands are some hundred milliseconds old. If demand jumps at several routers at once, they
exceed the limit by the overlap of their parts until the next exchange. A silent router is not
counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.registry.router_demands import RouterDemand, TenantDemand
from router.routing.admission.fair_queue import equal_weights

SILENT_NS = 2_000_000_000
GONE_NS = 30_000_000_000


@dataclass(slots=True)
class _Other:
    demand: RouterDemand
    updated_ns: int  # when its demand last changed


class Shares:
    """Share of one router in the windows at all workers, and in the queue.

    Args:
        weight_of: Function from a tenant to its weight, above 0.
    """

    def __init__(self, weight_of: Callable[[str], float] = equal_weights) -> None:
        self._weight_of = weight_of
        self._others: dict[str, _Other] = {}
        self._live: list[RouterDemand] = []
        self._own = RouterDemand(beat=0)
        self.known_routers = 1
        """Number of routers at the last exchange, also when no other is reachable now."""

    @property
    def routers(self) -> int:
        """Number of live routers, with this one."""
        return 1 + len(self._live)

    def update(
        self, own: RouterDemand, others: Mapping[str, RouterDemand], now_ns: int
    ) -> dict[str, float]:
        """Update the demands, and return the tokens that others have served each tenant since."""
        served: dict[str, float] = {}
        for router_id, demand in others.items():
            known = self._others.get(router_id)
            if known is None:
                # Demands from before this router's start may be of a router that is long dead.
                self._others[router_id] = _Other(demand, now_ns)
            elif known.demand.beat != demand.beat:
                for tenant, current in demand.tenants.items():
                    before = known.demand.tenants.get(tenant, TenantDemand())
                    more = current.served_tokens - before.served_tokens
                    if more > 0:
                        served[tenant] = served.get(tenant, 0.0) + more
                self._others[router_id] = _Other(demand, now_ns)
        for router_id in self._others.keys() - others.keys():
            del self._others[router_id]
        self._live = [
            other.demand for other in self._others.values() if now_ns - other.updated_ns < SILENT_NS
        ]
        self._own = own
        self.known_routers = self.routers
        return served

    def gone(self, now_ns: int) -> list[str]:
        """Return routers that have been silent for long."""
        return [name for name, it in self._others.items() if now_ns - it.updated_ns > GONE_NS]

    def alone(self) -> None:
        """Use the full limits for this router, as no other is reachable."""
        self._live = []

    def window(self, total: int) -> int:
        """Return the limit of running sequences here, of ``total`` for all routers."""
        if not self._live or not total:
            return total
        demands = [self._own, *self._live]
        wanted: dict[str, int] = {}
        for demand in demands:
            for tenant, its in demand.tenants.items():
                wanted[tenant] = wanted.get(tenant, 0) + its.running + its.waiting
        parts = _parts(wanted, total, self._weight_of)
        own = sum(
            parts[tenant] * (its.running + its.waiting) / wanted[tenant]
            for tenant, its in self._own.tenants.items()
            if wanted[tenant]
        )
        spare = max(total - sum(wanted.values()), 0) / len(demands)
        elsewhere = sum(its.running for demand in self._live for its in demand.tenants.values())
        return max(min(round(own + spare), total - elsewhere), 1)

    def queue_limit(self, total: int) -> int:
        """Return the limit of waiting requests here, of ``total`` for all routers."""
        elsewhere = sum(demand.queued for demand in self._live)
        return max(total // self.routers, total - elsewhere, 1)


def _parts(
    wanted: Mapping[str, int], total: int, weight_of: Callable[[str], float]
) -> dict[str, float]:
    parts: dict[str, float] = {}
    left = float(total)
    weights = {tenant: weight_of(tenant) for tenant in wanted}
    open_ = sum(weights.values())
    for tenant, most in sorted(wanted.items(), key=lambda item: item[1] / weights[item[0]]):
        parts[tenant] = min(float(most), left * weights[tenant] / max(open_, weights[tenant]))
        left = left - parts[tenant]
        open_ = open_ - weights[tenant]
    return parts
