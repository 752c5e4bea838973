"""API keys of a fleet: `baton keys create`, `ls`, `rotate`, `revoke` and `import`.

Keys are made here. The router receives their SHA-256, so that a secret is on this terminal only.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from baton.config.clients import ApiKeyConfig
from baton.config.secrets import SecretError, read_api_keys
from baton.tenants.key_record import KeyRecord, issue, new_key
from fleet.cli.common import JsonOption, exits_on, fail
from fleet.cli.reach import HERE, FleetAddress, ask_router
from loadtest.commands.option_groups import with_options

_PATH = "/fleet/keys"
_EVERYWHERE_S = 1.0  # routers follow a change within this time
_IMPORTED_AT_ONCE = 500
_STALE_S = 5.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

keys_app = typer.Typer(
    help="Issue, list, rotate and revoke API keys. Routers store hashes only.", no_args_is_help=True
)

_IdArgument = Annotated[str, typer.Argument(help="Id of the key, the second part of its text.")]


@dataclass(frozen=True, kw_only=True)
class _Rights:
    role: Annotated[
        Literal["tenant", "operator", "metrics"],
        typer.Option(
            help="`operator` may also read metrics and manage the fleet, `metrics` only read them."
        ),
    ] = "tenant"
    adapters: Annotated[
        Literal["shared", "own"],
        typer.Option(help="`own` lets the tenant load LoRA adapters from its folder."),
    ] = "shared"
    min_priority: Annotated[int, typer.Option(help="Lowest, most urgent priority.")] = 0
    log_text: Annotated[
        bool, typer.Option("--log-text", help="Log prompts and responses of the tenant.")
    ] = False
    slo_ttft_s: Annotated[
        float | None, typer.Option(help="Limit of the time to first token, with --slo-itl-s.")
    ] = None
    slo_itl_s: Annotated[
        float | None, typer.Option(help="Limit of the mean ITL, with --slo-ttft-s.")
    ] = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``ApiKeyConfig``."""
        fields = asdict(self)
        slo = {"ttft_s": fields.pop("slo_ttft_s"), "itl_s": fields.pop("slo_itl_s")}
        return fields if slo == {"ttft_s": None, "itl_s": None} else {**fields, "slo": slo}


@keys_app.command("create")
@with_options()
def create(
    tenant: Annotated[str, typer.Argument(help="Tenant that owns the requests of the key.")],
    given: _Rights,
    expires: Annotated[
        str | None,
        typer.Option("--expires", help="Lifetime, such as 90d, 12h or 30m. Default: none."),
    ] = None,
    at: FleetAddress = HERE,
    as_json: JsonOption = False,
) -> None:
    """Issue an API key and print it. It is shown once; routers accept it when this returns."""
    try:
        rights = ApiKeyConfig.model_validate({"tenant": tenant, **given.fields()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        fail(f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}")
    key = new_key()
    body = {"keys": [_sent(issue(key, _dumped(rights)), _seconds(expires, "--expires"))]}
    made = ask_router(at.reach(), "POST", _PATH, body)["keys"][0]
    time.sleep(_EVERYWHERE_S)
    _print_key(key, made, as_json=as_json)


@keys_app.command("ls")
@with_options()
def ls(at: FleetAddress = HERE, as_json: JsonOption = False) -> None:
    """List the issued API keys. Keys in the fleet file have no id and are not listed."""
    listed = ask_router(at.reach(), "GET", _PATH)
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    columns = [Column("id", no_wrap=True), Column("tenant", overflow="fold")]
    names = ("role", "state", "created", "expires", "last used")
    columns += [Column(name, no_wrap=True) for name in names]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for key in sorted(listed["keys"], key=lambda key: (key["tenant"], key["created"])):
        days = (_day(key["created"]), _day(key["expires"]), key["last_used"] or "–")
        table.add_row(key["id"], escape(key["tenant"]), key["role"], key["state"], *days)
    Console().print(table)
    age_s = listed["age_s"]
    if age_s is None or age_s > _STALE_S:
        age = "an unknown time" if age_s is None else f"{age_s:.0f} s"
        Console(stderr=True).print(f"Redis is unavailable: state of {age} ago")


@keys_app.command("rotate")
@with_options()
def rotate(
    key_id: _IdArgument,
    overlap: Annotated[
        str, typer.Option(help="Time for which the old key stays valid, such as 24h or 0s.")
    ] = "24h",
    expires: Annotated[
        str | None, typer.Option("--expires", help="Lifetime. Default: that of the old key.")
    ] = None,
    at: FleetAddress = HERE,
    as_json: JsonOption = False,
) -> None:
    """Issue a successor of an API key and print it. The old key expires after the overlap."""
    key = new_key()
    sent = _sent(issue(key, {}), _seconds(expires, "--expires"))
    body = {
        "id": sent["id"],
        "sha256": sent["sha256"],
        "expires_s": sent["expires_s"],
        "overlap_s": _seconds(overlap, "--overlap") or 0,
    }
    place = at.reach()
    made = ask_router(place, "POST", f"{_PATH}/{_checked(key_id)}/rotate", body)
    time.sleep(_EVERYWHERE_S)
    _print_key(key, made["new"], as_json=as_json)
    if not as_json:
        Console(stderr=True).print(f"{key_id} expires {_moment(made['old']['expires'])}")


@keys_app.command("revoke")
@with_options()
def revoke(key_id: _IdArgument, at: FleetAddress = HERE, as_json: JsonOption = False) -> None:
    """Revoke an API key for good. Every router refuses it when this returns.

    Running responses finish. Without Redis, the routers of one host refuse it: repeat the command
    with the --url of each other host, whose routers otherwise learn of it when Redis answers.
    """
    revoked = ask_router(at.reach(), "DELETE", f"{_PATH}/{_checked(key_id)}")
    if revoked["everywhere"]:
        time.sleep(_EVERYWHERE_S)
    else:
        where = "this router and the others of its host"
        note = f"Redis is unavailable: revoked at {where}; elsewhere when Redis answers"
        Console(stderr=True, highlight=False, soft_wrap=True).print(note)
    typer.echo(json.dumps(revoked, indent=2) if as_json else f"{key_id}: revoked")


@keys_app.command("import")
@with_options()
def import_(
    file: Annotated[
        Path, typer.Argument(help="File of `key: tenant` lines, as `clients.api_keys_file`.")
    ],
    at: FleetAddress = HERE,
    as_json: JsonOption = False,
) -> None:
    """Issue the API keys in a file under new ids, so that the lines can be removed.

    Clients keep their keys. A key that was imported before is left as it is.
    """
    with exits_on(SecretError):
        lines = read_api_keys(str(file))
    records = [_sent(issue(key, _dumped(rights)), None) for key, rights in lines.items()]
    place = at.reach()
    added = 0
    for begin in range(0, len(records), _IMPORTED_AT_ONCE):
        body = {"keys": records[begin : begin + _IMPORTED_AT_ONCE]}
        added += ask_router(place, "POST", _PATH, body)["added"]
    time.sleep(_EVERYWHERE_S)
    if as_json:
        typer.echo(json.dumps({"added": added, "known": len(records) - added}))
    else:
        typer.echo(f"{added} imported, {len(records) - added} already known (`baton keys ls`)")


def _sent(record: KeyRecord, expires_s: float | None) -> dict[str, Any]:
    return {
        "id": record.id,
        "sha256": record.sha256,
        "rights": record.rights,
        "expires_s": expires_s,
        "by_hash": record.by_hash,
    }


def _dumped(rights: ApiKeyConfig) -> dict[str, Any]:
    return rights.model_dump(mode="json", exclude_defaults=True)


def _checked(key_id: str) -> str:
    """Return an id; a whole key, which would get into the router's log, is refused."""
    if re.fullmatch(r"[a-z0-9]{12}", key_id) is None:
        fail("KEY_ID must have 12 characters of a-z and 0-9, as in `baton keys ls`; not the key")
    return key_id


def _seconds(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    form = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if form is None:
        fail(f"{option} {text}: use a number and a unit, such as 90d, 24h, 30m or 10s")
    return float(form[1]) * _UNITS_S[form[2]]


def _print_key(key: str, made: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"key": key, **made}, indent=2))
        return
    typer.echo(key)
    expires = f"expires {_moment(made['expires'])}" if made["expires"] else "no expiry"
    note = (
        f"id {made['id']}, tenant {made['tenant']}, role {made['role']}, {expires}\n"
        "the key is not shown again"
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(escape(note))


def _moment(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _day(unix_s: int | None) -> str:
    return _moment(unix_s)[:10] if unix_s else "–"
