"""`baton epp`: an endpoint picker for gateways in front of attached servers."""

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from fleet.cli import certificate_authority as authority
from fleet.cli import lifecycle
from fleet.cli.common import FileArgument, fail, load_fleet_file, note
from fleet.cli.serve import file_of
from fleet.local import state as fleet_state
from fleet.local.checks.preflight import PortTakenError, claim_port


def epp(
    file: FileArgument = None,
    attach: Annotated[
        list[str] | None,
        typer.Option(help="URL of a running vLLM server, in place of FILE; repeatable."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of the servers with --attach, as in `baton serve`.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="With --attach: file with the servers' key.")
    ] = None,
    grpc_port: Annotated[int, typer.Option(help="Port for gateways.")] = 9002,
    plain_text: Annotated[bool, typer.Option("--plain-text", help="No TLS for gateways.")] = False,
) -> None:
    """Choose attached servers for a gateway, in the foreground; Ctrl-C ends only Baton.

    Serves Envoy's external processing protocol, as an endpoint picker of the Gateway API inference
    extension: the gateway asks for each request, and sends it to the server that is chosen. The
    certificate is that of `clients: {tls: …}`, or a new one, which gateways cannot verify.

    Example: `baton epp --attach http://10.0.0.1:8000 --attach http://10.0.0.2:8000`.
    """
    path, config = load_fleet_file(file_of(attach, model, key_file) if attach else file, None)
    if not config.is_attached or config.pools.router_count > 1:
        fail(f"{path}: an endpoint picker is one router, and needs `pools: vllm: servers`")
    try:
        port = claim_port(config.host, grpc_port)
    except PortTakenError as error:
        fail(f"--grpc-port: {error}")
    os.environ["BATON_PICKER"] = str(port)
    if not plain_text:
        tls = config.clients.tls
        files = (tls.certificate, tls.key) if tls is not None else _made(config.fleet)
        os.environ["BATON_PICKER_TLS"] = os.pathsep.join(files)
    note(f"gateways: gRPC at {config.host} port {port}{'' if plain_text else ', with TLS'}")
    lifecycle.up(file=path)


def _made(fleet: str) -> tuple[str, str]:
    """Make a certificate, and return its file and that of its key."""
    folder = fleet_state.state_folder(fleet) / "picker"
    shutil.rmtree(folder, ignore_errors=True)
    authority.make(folder, fleet, [], timedelta(days=825))
    return str(folder / f"{authority.ROUTER}.pem"), str(folder / f"{authority.ROUTER}.key")
