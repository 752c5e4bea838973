"""`python -m router --config FILE [--port N]`: one router process.

With ``--fd`` the router uses a listening socket of its parent process, which outlives the router:
while a router restarts, new connections wait in the socket's queue and are not rejected. Several
``--fd`` and ``--group FOLDER --routers N --index I`` start one of N routers that share a port
(`router.frontend.group`).

On SIGTERM and SIGINT the router exits within five seconds: it accepts no connections and cancels
active requests, which end with an error. On SIGUSR1 it exits when all its responses have ended.
Environment variables contain the secrets (``router/process_core.py``, ``router/settings.py``).
"""

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from starlette.types import ASGIApp

from baton.config.clients import ApiKeyConfig
from baton.config.load import ConfigError, load_config
from baton.registry.redis_store import Registry
from baton.telemetry.logs import set_up_logs
from baton.telemetry.metrics import Metrics
from baton.telemetry.otlp import LogExport
from baton.telemetry.process_memory import (
    ROUTER_OBJECTS,
    allow_connections,
    collect_rarely,
    limit_arenas,
)
from baton.wire.process_end import exit_process
from router.app import build_app
from router.frontend.group.any_router import AnyRouter
from router.frontend.group.member import Member
from router.frontend.group.past_pages import PastPages
from router.frontend.group.siblings import Siblings
from router.frontend.http.acceptor import MAX_HANDSHAKES
from router.frontend.http.certificate import LiveCertificate
from router.frontend.http.monitoring import monitoring
from router.frontend.http.places import capacity
from router.frontend.http.protocol import server_config
from router.frontend.http.server import RouterServer
from router.process import Process
from router.process_core import ProcessCore
from router.routing.reports.request_reports import past_reports
from router.served_model import ServedModel
from router.settings import LaneSettings
from router.sources import LaneSources, Sources
from router.tenants.access import api_keys_of

_LOG = logging.getLogger("router")

_GRACE_S = 3
_POLL_S = 1.0
_SWITCH_S = 0.0005  # of the interpreter, from a thread with a large body to the event loop
_OTHERS_S = 3.0  # after the first worker, the others are ready, too


def main() -> int:
    """Run a router until a signal stops it."""
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the fleet's YAML file")
    parser.add_argument("--port", type=int, help="port, instead of the one in the file")
    parser.add_argument("--host", help="address, instead of the one in the file")
    parser.add_argument(
        "--fd", type=int, action="append", default=[], help="descriptor of a listening socket"
    )
    parser.add_argument("--group", type=Path, help="folder of the routers that share the port")
    parser.add_argument("--routers", type=int, default=1, help="number of these routers")
    parser.add_argument("--index", type=int, default=0, help="index of this router, from 0")
    arguments = parser.parse_args()
    set_up_logs("text")
    overrides = {"host": arguments.host} if arguments.host else {}
    try:
        config = load_config(arguments.config, overrides, said_by="--host")
        core = ProcessCore.of(config, port=arguments.port)
        settings = core.settings
        api_keys = api_keys_of(config)
        set_up_logs(
            settings.logs.format, fields={"fleet": config.fleet, "router": str(arguments.index)}
        )
        if settings.https is not None:
            LiveCertificate(settings.https)  # reports an unusable certificate before the start
        lanes = [(lane, ServedModel.load(lane)) for lane in LaneSettings.of_lanes(config)]
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sockets = tuple(socket.socket(fileno=number) for number in arguments.fd)
    member = None
    if sockets and arguments.group is not None:
        member = Member(
            index=arguments.index,
            count=arguments.routers,
            folder=arguments.group,
            sockets=sockets,
        )
    handshakes = MAX_HANDSHAKES if settings.https else 0
    allow_connections(capacity(settings.clients.max_connections), handshakes)
    limit_arenas()
    collect_rarely(ROUTER_OBJECTS)
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(core, api_keys, lanes, sockets, member))
    return 0


def _grouped(app: ASGIApp, process: Process, member: Member) -> AnyRouter:
    metrics = process.metrics
    siblings = Siblings(member, process.observer.task_failed)
    past = PastPages(member.folder, member.index, metrics.together)
    return AnyRouter(app, siblings, past, metrics.together, metrics.exemplars, metrics.render)


async def serve(
    core: ProcessCore,
    api_keys: Mapping[str, ApiKeyConfig] | None,
    lanes: Sequence[tuple[LaneSettings, ServedModel]],
    sockets: Sequence[socket.socket] = (),
    member: Member | None = None,
) -> None:
    """Serve HTTP until a signal stops the router.

    With a ``member`` of a group, which selects one of ``sockets``, the port is shared.
    """
    settings = core.settings
    for timing in sorted({lane.emulated for lane, _ in lanes if lane.emulated}):
        _LOG.warning("EMULATED fleet (%s): responses are made up, no model runs", timing)
    registry = Registry(settings.redis_url, settings.fleet)
    export = LogExport("router")
    process = Process(
        core,
        api_keys,
        [
            (lane, model, LaneSources.of(settings, lane, registry.of_lane(lane.fleet)))
            for lane, model in lanes
        ],
        Sources(settings, registry, export.emit),
    )
    metrics = process.metrics
    _observe_registry(metrics, registry)
    app: ASGIApp = build_app(process)
    group = None
    if member is not None:
        app = group = _grouped(app, process, member)
        process.past_reports.file = member.folder / f"{member.index}.reports"
    options = _https_options(process)
    config = server_config(
        app,
        metrics,
        settings.clients,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        timeout_graceful_shutdown=_GRACE_S,
        **options,
    )
    server = RouterServer(
        config,
        group,
        leave_limit_s=settings.default_timeout_s,
        count_failure=process.observer.task_failed,
    )
    process.tasks.spawn(speed_up(process), "speed up")
    async with (
        monitoring(app, process, settings.clients.monitoring, **options),
        process.tasks.beside(_end_requests(server, process), "end requests"),
    ):
        await server.serve([member.own_socket] if member is not None else list(sockets) or None)
    ended = past_reports(process.lanes.newest_first(), process.refused.newest_first())
    process.past_reports.keep(ended)
    await registry.close()
    export.close()


def _https_options(process: Process) -> dict[str, Any]:
    """Return uvicorn's options for HTTPS with a certificate that follows its files."""
    if process.settings.https is None:
        return {}
    certificate = LiveCertificate(process.settings.https)
    process.tasks.keep(certificate.follow, "certificate")
    return {"ssl_context_factory": lambda *_: certificate.context}


def _observe_registry(metrics: Metrics, registry: Registry) -> None:
    def show() -> None:
        metrics.set("baton_registry_connected", registry.connected)
        metrics.count_up("baton_registry_errors", registry.errors)

    registry.on_skipped = lambda _: metrics.inc("baton_registry_records_skipped")
    metrics.before_page.append(show)


async def speed_up(process: Process) -> None:
    """Make long texts faster, but not while the workers of a new fleet start and need the CPUs."""
    lanes = list(process.lanes)
    rest_s = 0.0
    await asyncio.sleep(_POLL_S)
    while not any(lane.gateway.workers.usable for lane in lanes):
        await asyncio.sleep(_POLL_S)
        rest_s = _OTHERS_S
    await asyncio.sleep(rest_s)
    for lane in lanes:
        await asyncio.to_thread(lane.model.speed_up)


async def _end_requests(server: RouterServer, process: Process) -> None:
    """After a signal, let responses finish for a short time; then end them with an error."""
    await server.stopping.wait()
    gateways = [lane.gateway for lane in process.lanes]
    for gateway in gateways:
        gateway.stopping = True
    await asyncio.sleep(_GRACE_S - 1)
    for gateway in gateways:
        gateway.end_all()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    exit_process(main())
