"""`baton certs`: a private CA and the certificates that a fleet needs, for trials."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from baton.config.network import fleet_host_name
from fleet.cli.common import fail, load_fleet_file

_LINES = """\
{folder} has a CA, a certificate for the fleet (until {until:%Y-%m-%d}) and one for its routers.
Every host needs ca.pem, fleet.pem and fleet.key at the same place, routers' hosts router.pem and
router.key too. ca.key stays here. In the fleet file, with that place instead of {folder}:

pools:
  tls: {{certificate: {folder}/fleet.pem, key: {folder}/fleet.key, ca: {folder}/ca.pem}}
clients:
  tls: {{certificate: {folder}/router.pem, key: {folder}/router.key}}

Clients:  curl --cacert {folder}/ca.pem …, baton --cacert {folder}/ca.pem status --url https://…
Renewal:  baton certs {folder} --renew, and copy again: nothing has to be restarted\
"""


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where they go.")],
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Fleet file, for the fleet's name. Default: as for `up`.", metavar="FILE"
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of a router or node; once for each."),
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Sign anew with the CA that is there.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, max=825, help="How long they are valid.")] = 90,
) -> None:
    """Make a private CA and certificates for a fleet and its routers, for trials.

    Keys are for this user alone (mode 0600). Those who run a CA of their own need the same files
    from it: the fleet's certificate carries the DNS name FLEET.baton.internal, or the one in
    `pools: {tls: {name: …}}`, and may be shown by servers and by clients.
    """
    from fleet.cli.certs import authority  # needs `cryptography`, which loads a library

    folder = folder.resolve()
    hosts = host or []
    try:
        if renew:
            authority.renew(folder, hosts, timedelta(days=days))
        else:
            _, config = load_fleet_file(file, None)
            tls = config.pools.tls
            name = (tls.name if tls is not None else None) or fleet_host_name(config.fleet)
            authority.make(folder, name, hosts, timedelta(days=days))
    except (ValueError, OSError) as error:
        fail(str(error))
    until = authority.expires_on(folder / f"{authority.FLEET}.pem")
    typer.echo(_LINES.format(folder=folder, until=until))
