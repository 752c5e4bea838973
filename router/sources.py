"""Sources of a router: what it shares with the fleet through Redis."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from baton.registry.admin_commands import AdminCommands
from baton.registry.event_feed import EventFeed
from baton.registry.gates import SharedGates
from baton.registry.redis_store import Registry
from baton.registry.router_demands import RouterDemands
from baton.registry.shared_adapters import SharedAdapters
from baton.registry.shared_tables import SharedRoutes
from baton.registry.stored_responses import StoredResponses, StoreLimits
from baton.registry.workers import RegistryWatcher
from baton.tenants.audit.inbox import AuditInbox
from baton.tenants.audit.log import AuditLog
from baton.tenants.erasures import Erasures
from baton.tenants.quotas import SharedQuotas
from baton.tenants.shared_keys import SharedKeys
from baton.tenants.shared_limits import SharedLimits
from baton.tenants.usage.shared import SharedUsage
from router.settings import LaneSettings, ProcessSettings


class Sources:
    """Tables of the fleet that all lanes of a router use. A router without Redis has none.

    Attributes:
        keys: API keys of ``baton keys``, which count if the fleet requires keys.
        limits: Limits of tenants.
        quotas: Banks from which routers lease parts of the limits.
        usage: Usage of all routers and workers.
        erasures: Reports about deletions of tenants.
        routes: Aliases, canaries and shadows.
        gates: Evidence about canaries.
        responses: Responses for later turns.

    Args:
        export: Receives the entries of the audit log.
    """

    def __init__(
        self, settings: ProcessSettings, registry: Registry, export: Callable[[bytes], None]
    ) -> None:
        kept = settings.clients.stored_responses
        limits = StoreLimits(
            keep_s=kept.keep_s,
            tenant_bytes=kept.max_tenant_bytes,
            total_bytes=kept.max_total_bytes,
        )
        file = Path(settings.audit_file) if settings.audit_file else None
        self.keys = SharedKeys(registry)
        self.limits = SharedLimits(registry)
        self.quotas = SharedQuotas(registry)
        self.usage = SharedUsage(registry)
        self.erasures = Erasures(registry)
        self.audit = AuditLog(AuditInbox(registry), file, export)
        self.routes = SharedRoutes(registry)
        self.gates = SharedGates(registry)
        self.responses = StoredResponses(registry, limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTables:
    """Tables of the fleet that one lane uses. A router without Redis has none.

    Attributes:
        events: KV events for the prefix index.
        adapters: Table of the adapters that were loaded at run time.
        tickets: Common order of the requests of all routers.
        demands: Demands of all routers, which share limits.
        commands: Queue of admin commands for the lane's controller.
    """

    events: EventFeed
    adapters: SharedAdapters
    tickets: Registry
    demands: RouterDemands
    commands: AdminCommands

    @classmethod
    def of(cls, registry: Registry) -> Self:
        """Return the tables in the registry of a lane."""
        return cls(
            events=EventFeed(registry),
            adapters=SharedAdapters(registry),
            tickets=registry,
            demands=RouterDemands(registry),
            commands=AdminCommands(registry),
        )


class LaneSources(NamedTuple):
    """Sources of one lane: the list of its workers, and its tables; None without Redis."""

    directory: RegistryWatcher
    tables: LaneTables | None

    @classmethod
    def of(cls, process: ProcessSettings, settings: LaneSettings, registry: Registry) -> Self:
        """Return the sources of a lane in its registry."""
        folder = process.lane_dir(settings.fleet)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        last_known = folder / "workers.json" if folder is not None else None
        return cls(RegistryWatcher(registry, last_known), LaneTables.of(registry))
