"""`baton router`: a further router of a fleet that runs, on this host."""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from baton.config.fleet_file import EMBEDDED, FleetConfig
from baton.config.secrets import SecretError
from fleet.cli.common import FileArgument, fail, load_fleet_file
from fleet.local import state as fleet_state
from fleet.local.fleet_token import FILE_VARIABLE, TOKEN_VARIABLE, given_token
from fleet.local.preflight import PortTakenError
from fleet.local.router_process import RouterFailedError, RouterProcesses
from fleet.local.signals import StopSignal

_POLL_S = 0.25
_STOP_LIMIT_S = 8.0


def router(
    file: FileArgument = None,
    host: Annotated[
        str | None, typer.Option(help="Where to listen, instead of the file's.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, instead of the file's. Also BATON_PORT.")
    ] = None,
) -> None:
    """Run more routers of a fleet, in the foreground, on any host that reaches its Redis.

    As many as the file's `pools.routers` says, behind one port. Routers share nothing but Redis and
    the workers: run them on as many hosts as you like, behind a load balancer that asks
    /health/ready. Each needs the fleet's file and token: BATON_FLEET_TOKEN_FILE names a file that
    holds it (`baton up` keeps its own in ~/.local/state/baton/FLEET/fleet.token).
    """
    path, config = load_fleet_file(file, port)
    if config.redis == EMBEDDED:
        fail(f"{path}: redis = embedded belongs to one machine: a fleet with more has a URL there")
    if host is not None and (problem := config.clients.plain_text_problem(host)):
        fail(f"--host {host}: {problem}")
    try:
        token = given_token(config)
    except SecretError as error:
        fail(str(error))
    if token is None:
        fail(
            f"the fleet's token is needed: {FILE_VARIABLE}=FILE, {TOKEN_VARIABLE} or `pools: "
            "{token_file: …}`, the same as that of `baton up`; without it no worker takes a "
            "request from this router"
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
    """Until a signal ends it. SIGUSR2 replaces them one by one."""
    signals = StopSignal()
    logs = fleet_state.log_folder(config, config.fleet)
    try:
        routers = RouterProcesses(config.host, config.port, config.pools.router_count)
    except PortTakenError as error:
        fail(str(error))
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        signals.install()
        signals.starting_done()
        routers.start(path, environment, Path(folder), logs)
        typer.echo(f"{routers.count} routers at port {routers.port}, logs in {logs}")
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
