"""`baton certs`: a private CA and the certificates of a fleet, for trials."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from baton.config.network import fleet_host_name
from fleet.cli.common import exits_on, load_fleet_file

_LINES = """\
{folder}
has a CA, and certificates of the fleet and its routers until {until:%Y-%m-%d}.
Copy ca.pem, fleet.pem and fleet.key to the same folder of every host, and
router.pem and router.key to that of every router's host. Keep ca.key here.
Fleet file, with that folder's path:

pools:
  tls:
    certificate: {folder}/fleet.pem
    key: {folder}/fleet.key
    ca: {folder}/ca.pem
clients:
  tls:
    certificate: {folder}/router.pem
    key: {folder}/router.key

Clients verify the routers with ca.pem:
  curl --cacert {folder}/ca.pem https://…
  export BATON_CACERT={folder}/ca.pem
Renew the certificates, then copy them again; no restart is needed:
  baton certs {folder} --renew\
"""
_RENEWED = """\
{folder}
has new certificates until {until:%Y-%m-%d}. Copy fleet.pem and fleet.key to every
host, router.pem and router.key to every router's host. No restart is needed.\
"""


def certs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for keys and certificates.")
    ],
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Fleet file, for the fleet's name. Default: like `baton up`.", metavar="FILE"
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of a router or node; repeatable."),
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace the certificates; keep the CA.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, max=825, help="Validity in days.")] = 90,
) -> None:
    """Make a private CA and the certificates of a fleet and its routers, for trials.

    Keys are readable by this user only (mode 0600). Your own CA has to issue the same files: the
    fleet's certificate carries the DNS name FLEET.baton.internal, or `pools: {tls: {name: …}}`,
    and allows server and client authentication.
    """
    from fleet.cli import certificate_authority as authority

    folder = folder.resolve()
    hosts = host or []
    with exits_on(ValueError, OSError):
        if renew:
            authority.renew(folder, hosts, timedelta(days=days))
        else:
            _, config = load_fleet_file(file, None)
            tls = config.pools.tls
            name = (tls.name if tls is not None else None) or fleet_host_name(config.fleet)
            authority.make(folder, name, hosts, timedelta(days=days))
    until = authority.expires_on(folder / f"{authority.FLEET}.pem")
    typer.echo((_RENEWED if renew else _LINES).format(folder=folder, until=until))
