"""`baton router`: a further router of a fleet that runs, on this host."""

import os
import sys
from typing import Annotated

import typer

from config.fleet_file import EMBEDDED
from fleet.cli.common import FileArgument, fail, load_fleet_file
from fleet.local import state as fleet_state
from fleet.local.fleet_token import FILE_VARIABLE, TOKEN_VARIABLE, TokenError, given_token


def router(
    file: FileArgument = None,
    host: Annotated[
        str | None, typer.Option(help="Where to listen, instead of the file's.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, instead of the file's. Also BATON_PORT.")
    ] = None,
) -> None:
    """Run one more router of a fleet, in the foreground, on any host that reaches its Redis.

    Routers share nothing but Redis and the workers: start as many as you like, behind a load
    balancer that asks /health/ready. Each needs the fleet's file and token: BATON_FLEET_TOKEN_FILE
    names a file that holds it (`baton up` keeps its own in ~/.local/state/baton/FLEET/fleet.token).
    """
    path, config = load_fleet_file(file, port)
    if config.redis == EMBEDDED:
        fail(f"{path}: redis = embedded belongs to one machine: a fleet with more has a URL there")
    try:
        token = given_token()
    except TokenError as error:
        fail(str(error))
    if token is None:
        fail(
            f"the fleet's token is needed: {FILE_VARIABLE}=FILE or {TOKEN_VARIABLE}, the same as "
            "that of `baton up`; without it no worker takes a request from this router"
        )
    environment = {
        **os.environ,
        TOKEN_VARIABLE: token,
        "BATON_REDIS_URL": config.redis,
        "BATON_STATE_DIR": str(fleet_state.state_folder(f"{config.fleet}-router-{config.port}")),
    }
    command = [sys.executable, "-m", "router", "--config", str(path), "--port", str(config.port)]
    os.execve(command[0], [*command, *(["--host", host] if host else [])], environment)  # noqa: S606
