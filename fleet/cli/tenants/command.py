"""Limits of tenants: `baton tenants ls`, `set` and `delete`."""

import json
import re
import time
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fleet.cli.common import FleetOption, fail
from fleet.cli.reach import KeyOption, UrlOption, ask_router, reach
from fleet.cli.tenants.receipt import receipt_text

_PATH = "/fleet/tenants"
_EVERYWHERE_S = 1.0  # routers follow a change within this time
_KINDS = ("rpm", "tpm", "tpd", "concurrent")
_SWITCH: dict[str, bool | None] = {"on": True, "off": False, "default": None}

tenants_app = typer.Typer(
    help="Limit what tenants may use, at all routers of a fleet together.", no_args_is_help=True
)

_JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_TenantArgument = Annotated[str, typer.Argument(help="Name of the tenant, as in `baton keys ls`.")]


@tenants_app.command("ls")
def ls(
    fleet: FleetOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
    as_json: _JsonOption = False,
) -> None:
    """List the tenants that have limits."""
    found = ask_router(reach(fleet, url, api_key), "GET", _PATH)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    columns = [Column("tenant", overflow="fold")]
    names = (*_KINDS, "keep_s", "log_text")
    columns += [Column(name, justify="right", no_wrap=True) for name in names]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for tenant in found["tenants"]:
        values = ["–" if tenant[name] is None else _text(tenant[name]) for name in names]
        table.add_row(escape(tenant["tenant"]), *values)
    Console().print(table)


@tenants_app.command("set")
def set_(
    tenant: _TenantArgument,
    rpm: Annotated[int | None, typer.Option(help="Requests per minute; 0: no limit.")] = None,
    tpm: Annotated[
        int | None, typer.Option(help="Tokens per minute, prompts and answers; 0: no limit.")
    ] = None,
    tpd: Annotated[int | None, typer.Option(help="Tokens per day (UTC); 0: no limit.")] = None,
    concurrent: Annotated[
        int | None, typer.Option(help="Requests at the same time; 0: no limit.")
    ] = None,
    keep_s: Annotated[
        str | None,
        typer.Option(
            help="Seconds for which its stored responses, files and batches are kept, or "
            "`default`; 0: none is stored."
        ),
    ] = None,
    log_text: Annotated[
        str | None,
        typer.Option(
            help="`off`: its texts are not logged, whatever its keys allow. Or `default`."
        ),
    ] = None,
    fleet: FleetOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
    as_json: _JsonOption = False,
) -> None:
    """Change limits of a tenant; limits that are not given stay. Routers apply them on return."""
    given = {"rpm": rpm, "tpm": tpm, "tpd": tpd, "concurrent": concurrent}
    body: dict[str, Any] = {
        name: value or None for name, value in given.items() if value is not None
    }
    if keep_s is not None:
        if keep_s != "default" and not keep_s.isdigit():
            fail(f"--keep-s {keep_s}: use a number of seconds, or default")
        body["keep_s"] = None if keep_s == "default" else int(keep_s)
    if log_text is not None:
        if log_text not in _SWITCH:
            fail(f"--log-text {log_text}: use on, off or default")
        body["log_text"] = _SWITCH[log_text]
    if not body:
        fail("give --rpm, --tpm, --tpd, --concurrent, --keep-s or --log-text")
    found = _changed("PUT", tenant, fleet, url, api_key, body)
    names = (*_KINDS, "keep_s", "log_text")
    limits = ", ".join(f"{name} {_text(found[name])}" for name in names if found[name] is not None)
    typer.echo(json.dumps(found, indent=2) if as_json else f"{tenant}: {limits or 'no limits'}")


@tenants_app.command("delete")
def delete(
    tenant: _TenantArgument,
    fleet: FleetOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
    as_json: _JsonOption = False,
) -> None:
    """Delete a tenant's limits, responses, files, batches, logged texts and KV, for good.

    Prints a receipt. Revoke its keys first (`baton keys revoke`): they stay, and so do the sums of
    its use. Exits with 1 if something could not be deleted.
    """
    found = _changed("DELETE", tenant, fleet, url, api_key)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console(highlight=False, soft_wrap=True).print(escape(receipt_text(found)))
    if found["not_deleted"]:
        raise typer.Exit(1)


def _text(value: int | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}"


def _changed(
    method: str,
    tenant: str,
    fleet: str | None,
    url: str | None,
    api_key: str,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", tenant) is None:
        fail(f"TENANT {tenant!r}: must be 1 to 64 characters of letters, digits, '_', '.' and '-'")
    found = ask_router(reach(fleet, url, api_key), method, f"{_PATH}/{tenant}", body, 60.0)
    time.sleep(_EVERYWHERE_S)
    return found
