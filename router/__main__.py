"""`python -m router --config FILE [--port N | --fd N]`: one router process.

With ``--fd`` it takes a socket that listens already, and whose holder outlives it: while a router
is started again, new connections wait in the socket's queue and are not refused.

SIGTERM and SIGINT end it within five seconds: no new connections; active requests end with an
error, and the workers are told to stop them. SIGUSR1 lets it end with its last answer, however long
that takes: another router has its place, on the same socket. Secrets come by environment
(``router/settings.py``).
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from config.fleet_file import ConfigError, load_config
from registry.kv_events import EventFeed
from registry.orders import Orders
from registry.redis_store import Registry
from registry.stored_responses import StoredResponses, StoreLimits
from registry.workers import RegistryWatcher
from router.app import Router
from router.http_server import server_config
from router.memory import allow_connections, collect_rarely, limit_arenas
from router.placement.index_feed import EventSource
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.workers.directory import WorkerDirectory
from telemetry.logs import set_up_logs
from telemetry.metrics import Metrics

_LOG = logging.getLogger("router")

_GRACE_S = 3
_RETIRED_S = 24 * 3600  # the longest that a request may last


def main() -> int:
    """Run a router until it is told to stop."""
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the fleet's YAML file")
    parser.add_argument("--port", type=int, help="instead of the one in the file")
    parser.add_argument("--host", help="instead of the one in the file")
    parser.add_argument("--fd", type=int, help="a socket that listens already, inherited")
    parser.add_argument("--ready-fd", type=int, help="where a byte is written once it listens")
    arguments = parser.parse_args()
    set_up_logs("text")
    overrides = {"host": arguments.host} if arguments.host else {}
    try:
        config = load_config(arguments.config, overrides, said_by="--host")
        settings = RouterSettings.from_config(config, port=arguments.port)
        set_up_logs(settings.logs.format)
        model = ServedModel.load(settings)
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    listening = None if arguments.fd is None else socket.socket(fileno=arguments.fd)
    allow_connections(settings.clients.max_connections)
    limit_arenas()
    collect_rarely()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, model, listening, arguments.ready_fd))
    return 0


class _Server(uvicorn.Server):
    """Stops on a signal, and then ends with code 0: uvicorn would raise the signal again."""

    def __init__(self, config: uvicorn.Config, ready_fd: int | None = None) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()
        self._ready_fd = ready_fd

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready_fd is not None and self.started:
            os.write(self._ready_fd, b"1")
            os.close(self._ready_fd)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGUSR1, self._retire)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _retire(self) -> None:
        self.config.timeout_graceful_shutdown = _RETIRED_S
        self.should_exit = True

    def _stop(self) -> None:
        self.should_exit = True
        self.stopping.set()


async def serve(
    settings: RouterSettings,
    model: ServedModel,
    listening: socket.socket | None = None,
    ready_fd: int | None = None,
) -> None:
    """Serve HTTP until a signal comes.

    Args:
        settings: Of the router.
        model: That it serves.
        listening: A socket that listens already; None: one of its own.
        ready_fd: Where a byte is written as soon as it takes connections.
    """
    if settings.emulated:
        _LOG.warning("EMULATED fleet (%s): answers are made up, no model runs", settings.emulated)
    registry = Registry(settings.redis_url, settings.fleet)
    state_dir = Path(settings.state_dir) if settings.state_dir else None
    last_known = state_dir / "workers.json" if state_dir is not None else None
    directory: WorkerDirectory = RegistryWatcher(registry, last_known)
    events: EventSource = EventFeed(registry)
    kept = settings.clients.stored_responses
    limits = StoreLimits(
        keep_s=kept.keep_s,
        tenant_bytes=kept.max_tenant_bytes,
        total_bytes=kept.max_total_bytes,
    )
    router = Router(
        settings,
        model,
        directory,
        events,
        shared_adapters=registry,
        shared_tickets=registry,
        stored_responses=StoredResponses(registry, limits),
        fleet_orders=Orders(registry),
    )
    metrics = router.parts.metrics
    registry.on_skipped = lambda _: metrics.inc("baton_registry_records_skipped")
    metrics.before_page.append(lambda: _show_registry(metrics, registry))
    server = _Server(
        server_config(
            router.app(),
            metrics,
            settings.clients,
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            timeout_graceful_shutdown=_GRACE_S,
        ),
        ready_fd,
    )
    async with router.parts.tasks.beside(_end_requests(server, router), "end requests"):
        await server.serve(None if listening is None else [listening])
    await registry.close()


def _show_registry(metrics: Metrics, registry: Registry) -> None:
    metrics.set("baton_registry_connected", registry.connected)
    metrics.count_up("baton_registry_errors", registry.errors)


async def _end_requests(server: _Server, router: Router) -> None:
    """After a signal, answers have a short time to finish; then they end with a typed error."""
    await server.stopping.wait()
    router.parts.gateway.stopping = True
    await asyncio.sleep(_GRACE_S - 1)
    router.parts.gateway.end_all()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
