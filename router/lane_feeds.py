"""Sources of one lane, and the tasks that keep its parts current."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton.registry.admin_commands import Orders
from baton.registry.event_feed import EventFeed
from baton.registry.redis_store import Registry
from baton.registry.router_demands import RouterDemands
from baton.registry.shared_adapters import SharedAdapters
from baton.registry.workers import RegistryWatcher
from router.frontend.api.parts import RouterParts
from router.routing.peers.share_feed import DemandSource, ShareFeed
from router.routing.placement.index_feed import EventSource, IndexFeeder
from router.routing.requests.tickets import TicketFeed, TicketSource
from router.routing.workers.table import WorkerDirectory
from router.served_model import ServedModel
from router.settings import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSources:
    """Sources of one lane, shared with other routers through Redis. Only ``directory`` is required.

    Attributes:
        directory: List of the workers.
        events: KV events for the prefix index; None: routing without an index.
        adapters: Table of the adapters that were loaded at run time.
        tickets: Common order of the requests of all routers.
        demands: Demands of all routers, which share limits; None: separate limits.
        orders: Queue of admin commands for the lane's controller.
    """

    settings: RouterSettings
    model: ServedModel
    directory: WorkerDirectory
    events: EventSource | None = None
    adapters: SharedAdapters | None = None
    tickets: TicketSource | None = None
    demands: DemandSource | None = None
    orders: Orders | None = None

    @classmethod
    def of(cls, settings: RouterSettings, model: ServedModel, registry: Registry) -> "LaneSources":
        """Return the sources of a lane in its registry."""
        folder = settings.lane_dir
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        last_known = folder / "workers.json" if folder is not None else None
        return cls(
            settings=settings,
            model=model,
            directory=RegistryWatcher(registry, last_known),
            events=EventFeed(registry),
            adapters=SharedAdapters(registry),
            tickets=registry,
            demands=RouterDemands(registry),
            orders=Orders(registry),
        )


class LaneFeeds:
    """Tasks of one lane."""

    def __init__(self, parts: RouterParts, sources: LaneSources) -> None:
        gateway = parts.gateway
        count_failure = parts.observer.task_failed
        self.parts = parts
        self._sources = sources
        self._tickets = TicketFeed(gateway.tickets, sources.tickets, count_failure)
        self._shares = ShareFeed(
            gateway.router_id,
            gateway.admission,
            gateway.shares,
            gateway.pump,
            gateway.work.demand,
            sources.demands,
            count_failure,
            gateway.workers.last_turn,
            parts.observer.planned,
        )
        self._index = IndexFeeder(
            parts.prefix_index, sources.events, parts.metrics, gateway.workers.resting.refreshed
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tasks within the context; end all requests afterwards."""
        parts = self.parts
        folder = parts.settings.lane_dir
        adapters = parts.model.adapters
        file = folder / "adapters.json" if folder else None
        await adapters.start(self._sources.adapters, file, parts.observer.task_failed)
        parts.gateway.start()
        self._index.start()
        self._tickets.start()
        self._shares.start()
        try:
            yield
        finally:
            await self._tickets.close()
            await self._shares.close()
            await self._index.close()
            await adapters.close()
            await parts.grammars.close()
            await parts.gateway.close()
