"""Listener for monitoring: what scrapers and probes read, on a port that is not the clients'.

It needs no key and answers nothing else; on loopback no web page can read it by a DNS name of its
own. A call is passed to the router's application with the fleet token, and without the caller's
headers but two: a caller gains no rights by them. Routers of one host share the port, and each
answers for all.
"""

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.config.clients import ClientLimitsConfig
from baton.config.network import MonitoringConfig, is_loopback
from baton.telemetry.metrics import Metrics
from router.frontend.http.protocol import server_config
from router.frontend.http.server import RouterServer
from router.frontend.http.web_pages import PROBES, OwnNames
from router.process import Process

_PATHS = frozenset({"/metrics", "/load", "/fleet/targets"})
_KEPT = (b"accept", b"host")  # the targets have the address that the caller used
_LIMITS = ClientLimitsConfig(max_connections=64)


def _only_monitoring(app: ASGIApp, process: Process, host: str) -> ASGIApp:
    token = process.core.fleet_token
    names = OwnNames(host, process.settings.clients.hosts)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in _PATHS | PROBES or scope["method"] not in ("GET", "HEAD"):
            await PlainTextResponse("see /metrics, /fleet/targets and /health\n", 404)(
                scope, receive, send
            )
            return
        headers = [field for field in scope["headers"] if field[0] in _KEPT]
        if scope["path"] in _PATHS:
            if is_loopback(host) and Headers(scope=scope).get("host", "") not in names:
                text = "Host must be an address, or a name in `clients: {hosts: [NAME]}`\n"
                await PlainTextResponse(text, 403)(scope, receive, send)
                return
            headers.append((b"authorization", b"Bearer " + token.shown.encode()))
        await app({**scope, "headers": headers, "query_string": b""}, receive, send)

    return answer


@contextlib.asynccontextmanager
async def monitoring(
    app: ASGIApp, process: Process, config: MonitoringConfig | None, **tls: Any
) -> AsyncIterator[int]:
    """Serve the monitoring port within the context; yield its number, 0 without one.

    Raises:
        OSError: The port is taken.
    """
    if config is None:
        yield 0
        return
    # Metrics of its own: connections of this port are not those of clients.
    options = server_config(
        _only_monitoring(app, process, config.host),
        Metrics("router"),
        _LIMITS,
        lifespan="off",
        **tls,
    )
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    shared = hasattr(socket, "SO_REUSEPORT")
    address = (config.host, config.port)
    listener = socket.create_server(address, family=family, reuse_port=shared)
    failed = process.observer.task_failed
    server = RouterServer(options, count_failure=failed, handshakes=_LIMITS.max_connections)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
    serving = process.tasks.spawn(server.serve([listener]), "monitoring")
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        await serving
        listener.close()
