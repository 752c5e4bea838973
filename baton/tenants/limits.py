"""Policy of a tenant: its limits at all routers of a fleet together, its models and its weight."""

from typing import Annotated, Any

import msgspec

from baton.types.slo import Slo

_Seconds = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000_000)]
_Model = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Amount of one calendar month (UTC)."""

    tokens: _Count


class Limits(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Policy of one tenant; None: no limit, or the fleet's value.

    Attributes:
        rpm: Requests per minute.
        tpm: Tokens per minute, of prompts and answers.
        tpd: Tokens per day (UTC).
        concurrent: Requests at the same time.
        budget: Amount per calendar month (UTC).
        weight: Part of the fleet under saturation, relative to other tenants; None: 1.
        models: Names of the models and adapters that its requests may name.
        slo: Latencies of its requests, in place of the fleet's.
        kv_share: Part of a worker's cached blocks above which it loses its own blocks first.
        keep_s: Time that stored responses, files and batches are kept, if shorter than the
            fleet's; 0: none is stored.
        log_text: False: its texts are not logged, whatever its keys allow.
    """

    rpm: _Count | None = None
    tpm: _Count | None = None
    tpd: _Count | None = None
    concurrent: _Count | None = None
    budget: Budget | None = None
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=1000)] | None = None
    models: Annotated[tuple[_Model, ...], msgspec.Meta(min_length=1, max_length=1000)] | None = None
    slo: Slo | None = None
    kv_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None

    keep_s: _Seconds | None = None
    log_text: bool | None = None

    @property
    def amounts(self) -> dict[str, int]:
        """Amounts that routers count, by name."""
        amounts = {
            "rpm": self.rpm,
            "tpm": self.tpm,
            "tpd": self.tpd,
            "concurrent": self.concurrent,
            "budget": self.budget.tokens if self.budget is not None else None,
        }
        return {name: amount for name, amount in amounts.items() if amount is not None}

    def fields(self) -> dict[str, Any]:
        """Return all fields as JSON values, also those that are None."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in self.__struct_fields__}


NO_LIMITS = Limits()
