"""Policies of tenants as requests use them."""

from collections.abc import Mapping
from types import MappingProxyType

from baton.types.limits import NO_LIMITS, Limits


class PolicyTable:
    """Current policies of all tenants at one router."""

    def __init__(self) -> None:
        self.all: Mapping[str, Limits] = MappingProxyType({})

    def replace(self, policies: Mapping[str, Limits]) -> None:
        """Use these policies from now on."""
        self.all = policies

    def of(self, tenant: str) -> Limits:
        """Return the policy of a tenant; one without limits if it has none."""
        return self.all.get(tenant, NO_LIMITS)

    def weight(self, tenant: str) -> float:
        """Return the weight of a tenant in queues."""
        weight = self.of(tenant).weight
        return 1.0 if weight is None else weight
