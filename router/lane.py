"""One model in a router's process, with its own workers and queue."""

import contextlib
import time
from collections.abc import AsyncIterator

from baton.registry.router_demands import PlannedSizes
from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from baton.types.lanes import split_version
from router.process_core import ProcessCore
from router.routing.checks.grammars import GrammarChecker
from router.routing.checks.images import Images
from router.routing.peers.share_feed import ShareFeed
from router.routing.placement.index_feed import IndexFeeder
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.reports.worker_cells import WorkerCells
from router.routing.requests.gateway import Gateway
from router.routing.requests.observer import Observer
from router.routing.requests.readiness import Prober
from router.routing.requests.tickets import TicketFeed
from router.routing.requests.worker_events import WorkerEvents
from router.served_model import ServedModel
from router.settings import LaneSettings
from router.sources import LaneSources, LaneTables


class Lane:
    """A model, its workers and requests, and the tasks that keep its tables current.

    Attributes:
        created: Start of the lane in Unix seconds.
        metrics: Metrics of the process, for what concerns this model.

    Args:
        core: Part of the process that the lane uses.
        observer: Observer of the process, with whose gauges those of the lane are added up.
        tasks: Tasks of the process.
    """

    def __init__(
        self,
        core: ProcessCore,
        settings: LaneSettings,
        model: ServedModel,
        sources: LaneSources,
        observer: Observer,
        tasks: BackgroundTasks,
    ) -> None:
        self.core = core
        self.settings = settings
        self.model = model
        self.sources = sources
        self.created = int(time.time())
        name = model.names[0]
        self.metrics = metrics = observer.metrics.of_model(name, model.max_context_tokens)
        _show(metrics, settings, model)
        self.observer = Observer(metrics, observer)
        self.prefix_index = PrefixIndex()
        self.gateway = gateway = Gateway(
            core, settings, model.tokenizer, sources.directory, self.prefix_index, self.observer
        )
        self.observer.fitted = lambda worker_id: (
            link.status if (link := gateway.workers.link(worker_id)) is not None else None
        )
        self.worker_cells = WorkerCells(gateway.workers)
        self.grammars = GrammarChecker(model.vocabulary, metrics)
        self.images = Images(model, gateway.workers, core.settings.clients.images)
        self.prober = Prober(gateway, core.settings, tasks)
        self._feeds = self._feeds_of(sources.tables) if sources.tables is not None else []

    def _feeds_of(self, tables: LaneTables) -> "list[TicketFeed | ShareFeed | IndexFeeder]":
        """Return the tasks that keep the lane's parts equal to Redis."""
        gateway = self.gateway
        count_failure = self.observer.task_failed
        shares = ShareFeed(gateway, tables.demands, count_failure, self.planned)
        refreshed = gateway.workers.resting.refreshed
        index = IndexFeeder(self.prefix_index, tables.events, self.observer.metrics, refreshed)
        return [index, TicketFeed(gateway.tickets, tables.tickets, count_failure), shares]

    def planned(self, plan: PlannedSizes) -> None:
        """Follow the controller, which reports whether the model is unloaded."""
        gateway = self.gateway
        gateway.asleep = bool(plan.asleep)
        gateway.starts_from_zero = self.settings.starts_from_zero and not plan.asleep
        if plan.asleep == "abort":
            for active in list(gateway.active.values()):
                gateway.abort(active)
        self.observer.planned(plan)

    @property
    def is_loaded(self) -> bool:
        """True if the lane should have workers: an operator has not unloaded its model."""
        return any(slot.is_kept for slot in self.gateway.workers)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tasks within the context; end all requests afterwards."""
        folder = self.core.settings.lane_dir(self.settings.fleet)
        adapters = self.model.adapters
        file = folder / "adapters.json" if folder else None
        tables = self.sources.tables
        shared = tables.adapters if tables is not None else None
        await adapters.start(shared, file, self.observer.task_failed)
        self.gateway.start(WorkerEvents(self.gateway))
        for feed in self._feeds:
            feed.start()
        try:
            yield
        finally:
            for feed in self._feeds:
                await feed.close()
            await adapters.close()
            await self.grammars.close()
            await self.images.close()
            await self.gateway.close()


def _show(metrics: Metrics, settings: LaneSettings, model: ServedModel) -> None:
    timing = settings.emulated
    kind = settings.external or ("emulated" if timing else "real")
    metrics.set("baton_engine_info", 1, engine=kind, timing=timing)
    name = model.names[0]
    number = str(split_version(name)[1])
    metrics.set("baton_model_info", 1, model=name, version=model.version, number=number)
