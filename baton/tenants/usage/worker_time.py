"""Time that one worker exists, which its fleet pays for whether it computes or not."""

import secrets
import time
from collections.abc import Callable

from baton.registry.redis_store import Registry
from baton.registry.types import Role
from baton.telemetry.metrics import Metrics
from baton.tenants.usage.feed import UsageFeed
from baton.tenants.usage.ledger import HOUR_S, WORKERS, Ledger, RowName
from baton.tenants.usage.shared import SharedUsage

_INTERVAL_S = 5.0  # a killed worker loses so much of its own time


class WorkerTime:
    """Clock of one worker, from its construction to `close`.

    Args:
        lane: Lane of the worker; empty in a fleet with one model.
    """

    def __init__(
        self,
        role: Role,
        registry: Registry,
        metrics: Metrics,
        count_failure: Callable[[str], None],
        lane: str = "",
    ) -> None:
        self._lane = lane
        self._role = role
        self._counted_ns = time.monotonic_ns()
        self._metrics = metrics
        self._feed = UsageFeed(
            Ledger(secrets.token_hex(8)),
            SharedUsage(registry),
            count_failure,
            interval_s=_INTERVAL_S,
            before_report=lambda _: self._count(),
        )

    def start(self) -> None:
        """Start reporting. Needs a running event loop."""
        self._feed.start()

    def change_role(self, role: Role) -> None:
        """Count the time from now on for another role."""
        self._count()
        self._role = role

    async def close(self) -> None:
        """Report the time until now, and stop."""
        await self._feed.close()

    def _count(self) -> None:
        now_ns = time.monotonic_ns()
        passed_ns = now_ns - self._counted_ns
        self._counted_ns = now_ns
        hour = int(time.time()) // HOUR_S
        self._feed.ledger.row(RowName(hour, WORKERS, self._lane, self._role)).worker_ns += passed_ns
        self._metrics.inc("baton_worker_seconds", passed_ns / 1e9, role=self._role)
