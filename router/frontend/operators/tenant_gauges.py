"""Gauges about limits of tenants and files of keys, set when metrics are requested."""

from time import monotonic_ns

from baton.config.secrets import ApiKeysFile
from baton.telemetry.metrics import Metrics
from baton.tenants.tenants_file import TenantsFile
from router.tenants.access import AccessControl
from router.tenants.quota import Quotas

_MOST_TENANTS = 80  # each has up to three series of a metric, of MAX_LABEL_SETS
_TOKENS = ("tpm", "tpd", "budget")


class TenantGauges:
    """Gauges of one router, for a bounded number of tenants."""

    def __init__(self) -> None:
        self._shown: set[tuple[str, str]] = set()
        self._tenants: set[str] = set()

    def update(self, metrics: Metrics, quotas: Quotas, access: AccessControl) -> None:
        """Set the gauges. Those of limits that no longer exist are 0."""
        now_ns = monotonic_ns()
        debt_tokens = 0
        gone = set(self._shown)
        for tenant in quotas.callers():
            standings = quotas.standing(tenant, now_ns)
            tokens = {kind: standings[kind] for kind in _TOKENS if kind in standings}
            debts = [standing.used - standing.limit for standing in tokens.values()]
            debt_tokens += max([0, *debts])
            if tenant not in self._tenants and len(self._tenants) >= _MOST_TENANTS:
                continue
            self._tenants.add(tenant)
            for kind, standing in tokens.items():
                gone.discard((tenant, kind))
                self._shown.add((tenant, kind))
                metrics.set("baton_quota_tokens", standing.used, tenant=tenant, kind=kind)
                metrics.set("baton_quota_limit_tokens", standing.limit, tenant=tenant, kind=kind)
        for tenant, kind in gone:
            metrics.set("baton_quota_tokens", 0, tenant=tenant, kind=kind)
            metrics.set("baton_quota_limit_tokens", 0, tenant=tenant, kind=kind)
        metrics.set("baton_quota_debt_tokens", debt_tokens)
        files = {"api_keys": access.api_keys, "tenants": access.policies.file}
        for name, file in files.items():
            if isinstance(file, ApiKeysFile | TenantsFile):
                metrics.set("baton_file_stale", file.is_stale, file=name)
