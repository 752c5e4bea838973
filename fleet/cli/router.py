"""`baton router`: more routers of a running fleet, on this host."""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from baton.config.fleet_file import EMBEDDED, FleetConfig
from baton.config.secrets import SecretError
from fleet.cli.common import FileArgument, exits_on, fail, load_fleet_file
from fleet.local import state as fleet_state
from fleet.local.checks.preflight import PortTakenError
from fleet.local.fleet_token import FILE_VARIABLE, TOKEN_VARIABLE, given_token
from fleet.local.router_process import RouterFailedError, RouterProcesses
from fleet.local.signals import StopSignal

_POLL_S = 0.25
_STOP_LIMIT_S = 8.0


def router(
    file: FileArgument = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: `host` of the file.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port. Default: BATON_PORT, else `port` of the file.")
    ] = None,
) -> None:
    """Run more routers of a fleet in the foreground, on any host that reaches its Redis.

    `pools.routers` of the file is their number; they share one port. Routers share only Redis and
    the workers: run them on any number of hosts, behind a load balancer that probes /health/ready.
    Each needs the fleet's file and its token, in the file that BATON_FLEET_TOKEN_FILE names
    (`baton up` keeps its own in ~/.local/state/baton/FLEET/fleet.token).
    """
    path, config = load_fleet_file(file, port)
    if config.redis == EMBEDDED:
        fail(f"{path}: redis = embedded serves one machine only: set `redis:` to a server's URL")
    if host is not None and (problem := config.clients.plain_text_problem(host)):
        fail(f"--host {host}: {problem}")
    with exits_on(SecretError):
        token = given_token(config)
    if token is None:
        fail(
            "no fleet token: workers would reject this router's requests. Set "
            f"{FILE_VARIABLE}=FILE, {TOKEN_VARIABLE} or `pools: {{token_file: …}}` to the token of "
            "`baton up`"
        )
    environment = {
        **token.environment,
        "BATON_REDIS_URL": config.redis,
        "BATON_STATE_DIR": str(fleet_state.state_folder(f"{config.fleet}-router-{config.port}")),
    }
    if config.pools.router_count > 1:
        overrides = {"host": host} if host else {}
        _keep_several(path, config.model_copy(update=overrides), environment)
        return
    command = [sys.executable, "-P", "-m", "router", "--config", str(path)]
    command += ["--port", str(config.port), *(["--host", host] if host else [])]
    os.execve(command[0], command, environment)  # noqa: S606


def _keep_several(path: Path, config: FleetConfig, environment: Mapping[str, str]) -> None:
    """Run routers until a signal ends this process. SIGUSR2 replaces them one by one."""
    signals = StopSignal()
    logs = fleet_state.log_folder(config, config.fleet)
    with exits_on(PortTakenError):
        routers = RouterProcesses(config.host, config.port, config.pools.router_count)
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        signals.install()
        signals.starting_done()
        routers.start(path, environment, Path(folder), logs)
        typer.echo(f"{routers.count} routers on port {routers.port}, logs in {logs}")
        try:
            while not signals.wait(_POLL_S):
                if signals.take_new_routers():
                    routers.roll()
                routers.keep(typer.echo)
        except RouterFailedError as error:
            fail(f"{error}; see {logs / error.log}.log")
        finally:
            routers.begin_stop()
            routers.finish_stop(_STOP_LIMIT_S)
