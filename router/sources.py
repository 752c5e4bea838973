"""Sources of a router: what it shares with the fleet through Redis."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from baton.registry.admin_commands import AdminCommands
from baton.registry.event_feed import EventFeed
from baton.registry.gates import SharedGates
from baton.registry.redis_store import Registry
from baton.registry.router_demands import RouterDemands
from baton.registry.shared_adapters import SharedAdapters
from baton.registry.shared_routes import SharedRoutes
from baton.registry.stored_responses import StoredResponses, StoreLimits
from baton.registry.workers import RegistryWatcher
from baton.tenants.audit.inbox import AuditInbox
from baton.tenants.audit.log import AuditLog
from baton.tenants.erasures import Erasures
from baton.tenants.quotas import SharedQuotas
from baton.tenants.shared_keys import SharedKeys
from baton.tenants.shared_limits import SharedLimits
from baton.tenants.usage.shared import SharedUsage
from router.routing.peers.share_feed import DemandSource
from router.routing.placement.index_feed import EventSource
from router.routing.requests.tickets import TicketSource
from router.routing.workers.table import WorkerDirectory
from router.settings import LaneSettings, ProcessSettings
from router.tenants.quota_feed import QuotaSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Tables of the fleet that all lanes of a router use. A router runs without any of them.

    Attributes:
        keys: API keys of ``baton keys``, which count if the fleet requires keys.
        limits: Limits of tenants; None: there are none.
        quotas: Banks from which routers lease parts of the limits.
        usage: Usage of all routers and workers; None: this router's is not exported.
        erasures: Reports about deletions of tenants; None: tenants cannot be deleted.
        routes: Aliases and canaries; None: names lead to the models of these names.
        gates: Evidence about canaries; None: no canary is rolled back automatically.
        responses: Responses for later turns; None: responses are not stored.
    """

    keys: SharedKeys | None = None
    limits: SharedLimits | None = None
    quotas: QuotaSource | None = None
    usage: SharedUsage | None = None
    erasures: Erasures | None = None
    audit: AuditLog | None = None
    routes: SharedRoutes | None = None
    gates: SharedGates | None = None
    responses: StoredResponses | None = None

    @classmethod
    def of(
        cls, settings: ProcessSettings, registry: Registry, export: Callable[[bytes], None]
    ) -> Self:
        """Return the sources in a registry; ``export`` receives the entries of the audit log."""
        kept = settings.clients.stored_responses
        limits = StoreLimits(
            keep_s=kept.keep_s,
            tenant_bytes=kept.max_tenant_bytes,
            total_bytes=kept.max_total_bytes,
        )
        file = Path(settings.audit_file) if settings.audit_file else None
        return cls(
            keys=SharedKeys(registry),
            limits=SharedLimits(registry),
            quotas=SharedQuotas(registry),
            usage=SharedUsage(registry),
            erasures=Erasures(registry),
            audit=AuditLog(AuditInbox(registry), file, export),
            routes=SharedRoutes(registry),
            gates=SharedGates(registry),
            responses=StoredResponses(registry, limits),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSources:
    """Sources of one lane. Only ``directory`` is required.

    Attributes:
        directory: List of the workers.
        events: KV events for the prefix index; None: routing without an index.
        adapters: Table of the adapters that were loaded at run time.
        tickets: Common order of the requests of all routers.
        demands: Demands of all routers, which share limits; None: separate limits.
        commands: Queue of admin commands for the lane's controller.
    """

    directory: WorkerDirectory
    events: EventSource | None = None
    adapters: SharedAdapters | None = None
    tickets: TicketSource | None = None
    demands: DemandSource | None = None
    commands: AdminCommands | None = None

    @classmethod
    def of(cls, process: ProcessSettings, settings: LaneSettings, registry: Registry) -> Self:
        """Return the sources of a lane in its registry."""
        folder = process.lane_dir(settings.fleet)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        last_known = folder / "workers.json" if folder is not None else None
        return cls(
            directory=RegistryWatcher(registry, last_known),
            events=EventFeed(registry),
            adapters=SharedAdapters(registry),
            tickets=registry,
            demands=RouterDemands(registry),
            commands=AdminCommands(registry),
        )
