"""Policies of tenants: `baton tenants ls`, `set` and `delete`."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fleet.cli.common import JsonOption, fail
from fleet.cli.reach import HERE, FleetAddress, ask_router
from loadtest.commands.option_groups import with_options

_PATH = "/fleet/tenants"
_EVERYWHERE_S = 1.0  # routers follow a change within this time
_SWITCH: dict[str, bool | None] = {"on": True, "off": False, "default": None}

tenants_app = typer.Typer(
    help="Limit what tenants may use, at all routers of a fleet together.", no_args_is_help=True
)

_TenantArgument = Annotated[str, typer.Argument(help="Name of the tenant, as in `baton keys ls`.")]


@tenants_app.command("ls")
@with_options()
def ls(at: FleetAddress = HERE, as_json: JsonOption = False) -> None:
    """List the tenants that have limits, with their limits."""
    listed = ask_router(at.reach(), "GET", _PATH)
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    columns = [Column("tenant", overflow="fold", max_width=30), Column("limits", overflow="fold")]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for tenant in listed["tenants"]:
        table.add_row(escape(tenant["tenant"]), escape(_described(tenant)))
    console = Console(highlight=False)
    console.print(table)
    if listed.get("file"):
        console.print(f"from {escape(listed['file'])}", soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class _Limits:
    rpm: Annotated[int | None, typer.Option(help="Requests per minute; 0: no limit.")] = None
    tpm: Annotated[
        int | None, typer.Option(help="Tokens per minute, prompts and answers; 0: no limit.")
    ] = None
    tpd: Annotated[int | None, typer.Option(help="Tokens per day (UTC); 0: no limit.")] = None
    concurrent: Annotated[
        int | None, typer.Option(help="Requests at the same time; 0: no limit.")
    ] = None
    budget_tokens: Annotated[
        int | None, typer.Option(help="Tokens per calendar month (UTC); 0: no limit.")
    ] = None
    weight: Annotated[
        float | None,
        typer.Option(help="Part of a busy fleet, relative to other tenants; 0: the default, 1."),
    ] = None
    kv_share: Annotated[
        float | None,
        typer.Option(
            help="Part of the cached KV (0 to 1) above which it loses its own first; 0: none."
        ),
    ] = None
    models: Annotated[
        str | None,
        typer.Option(
            help="Models and adapters that it may use, separated by commas; '': all.",
            metavar="NAMES",
        ),
    ] = None
    slo_ttft_s: Annotated[
        float | None,
        typer.Option(help="Limit of the time to first token, as `slo: {ttft_s}`; 0: the fleet's."),
    ] = None
    slo_itl_s: Annotated[
        float | None, typer.Option(help="Limit of the mean ITL, as `slo: {itl_s}`; 0: the fleet's.")
    ] = None
    keep_s: Annotated[
        str | None,
        typer.Option(
            help="Seconds for which its stored responses, files and batches are kept, or "
            "`default`; 0: none is stored."
        ),
    ] = None
    log_text: Annotated[
        str | None,
        typer.Option(
            help="`off`: its texts are not logged, whatever its keys allow. Or `default`."
        ),
    ] = None

    def body(self) -> dict[str, Any]:
        """Return the limits that were given, as the router takes them."""
        plain = ("rpm", "tpm", "tpd", "concurrent", "weight", "kv_share")
        given = {name: getattr(self, name) for name in plain}
        body = {name: value or None for name, value in given.items() if value is not None}
        if self.budget_tokens is not None:
            body["budget"] = {"tokens": self.budget_tokens} if self.budget_tokens else None
        if self.models is not None:
            body["models"] = [
                name for name in map(str.strip, self.models.split(",")) if name
            ] or None
        body |= _latencies(self.slo_ttft_s, self.slo_itl_s)
        return body | _retention(self.keep_s) | _text_logging(self.log_text)


@tenants_app.command("set")
@with_options()
def set_(
    tenant: _TenantArgument, limits: _Limits, at: FleetAddress = HERE, as_json: JsonOption = False
) -> None:
    """Change limits of a tenant; those that are not given stay. Routers apply them on return."""
    body = limits.body()
    if not body:
        fail("give at least one limit, such as --rpm 600; `baton tenants set --help` lists them")
    policy = _changed("PUT", tenant, at, body)
    typer.echo(
        json.dumps(policy, indent=2)
        if as_json
        else f"{tenant}: {_described(policy) or 'no limits'}"
    )


def _latencies(ttft_s: float | None, itl_s: float | None) -> dict[str, Any]:
    given = {"ttft_s": ttft_s, "itl_s": itl_s}
    slo = {name: value for name, value in given.items() if value is not None}
    if not slo:
        return {}
    return {"slo": slo if all(slo.values()) else None}


def _retention(keep_s: str | None) -> dict[str, Any]:
    if keep_s is None:
        return {}
    if keep_s != "default" and not keep_s.isdigit():
        fail(f"--keep-s {keep_s}: use a number of seconds, or default")
    return {"keep_s": None if keep_s == "default" else int(keep_s)}


def _text_logging(log_text: str | None) -> dict[str, Any]:
    if log_text is None:
        return {}
    if log_text not in _SWITCH:
        fail(f"--log-text {log_text}: use on, off or default")
    return {"log_text": _SWITCH[log_text]}


@tenants_app.command("delete")
@with_options()
def delete(tenant: _TenantArgument, at: FleetAddress = HERE, as_json: JsonOption = False) -> None:
    """Delete a tenant's limits, responses, files, batches, logged texts and KV, for good.

    Prints a receipt. Revoke its keys first (`baton keys revoke`): they stay, and so do the sums of
    its use. Exits with 1 if something could not be deleted.
    """
    receipt = _changed("DELETE", tenant, at)
    if as_json:
        typer.echo(json.dumps(receipt, indent=2))
    else:
        Console(highlight=False, soft_wrap=True).print(escape(_receipt_text(receipt)))
    if receipt["not_deleted"]:
        raise typer.Exit(1)


def _receipt_text(receipt: Mapping[str, Any]) -> str:
    """Return the receipt as lines of text."""
    deleted = receipt["deleted"]
    blocks = ", ".join(f"{count:,} {tier}" for tier, count in deleted["kv_blocks"].items())
    lines = [
        f"{receipt['tenant']}: deleted at {receipt['time']}, deletion {receipt['deletion']}",
        f"  limits             {'removed' if receipt['limits'] else 'there were none'}",
        f"  stored responses   {deleted['responses']:,}",
        f"  files              {deleted['files']:,}",
        f"  batches            {deleted['batches']:,}",
        f"  texts in logs      {deleted['log_lines']:,} lines",
        f"  KV blocks          {blocks}",
        f"  confirmed by       {', '.join(receipt['confirmed_by'])}",
    ]
    if receipt["shared_cache"]:
        lines.append("  The KV of all tenants was erased: share_cache_between_tenants is true.")
    if receipt["valid_keys"]:
        lines.append(f"  {receipt['valid_keys']} API keys of the tenant stay valid (`baton keys`).")
    counts = [*deleted["kv_blocks"].values(), *(n for n in deleted.values() if isinstance(n, int))]
    if not (receipt["limits"] or receipt["valid_keys"] or any(counts)):
        lines.append("  Nothing of this tenant was found: check the name (`baton keys ls`).")
    lines += [f"  not deleted        {what}" for what in receipt["not_deleted"]]
    return "\n".join(lines)


def _text(value: int | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}"


def _described(policy: dict[str, Any]) -> str:
    """Return the fields of a policy that are set, as text."""
    parts = []
    for name, value in policy.items():
        if name in ("tenant", "used") or value is None:
            continue
        if name == "budget":
            parts.append(f"budget {value['tokens']:,} tokens a month")
        elif name == "models":
            parts.append(f"models {' '.join(value)}")
        elif name == "slo":
            parts.append(f"slo ttft {value['ttft_s']:g} s itl {value['itl_s']:g} s")
        elif isinstance(value, float):
            parts.append(f"{name} {value:g}")
        else:
            parts.append(f"{name} {_text(value)}")
    return ", ".join(parts)


def _changed(
    method: str, tenant: str, at: FleetAddress, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", tenant) is None:
        fail(f"TENANT {tenant!r}: must be 1 to 64 characters of letters, digits, '_', '.' and '-'")
    answer = ask_router(at.reach(), method, f"{_PATH}/{tenant}", body, 60.0)
    time.sleep(_EVERYWHERE_S)
    return answer
