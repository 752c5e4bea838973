"""Audit log of a fleet: `baton audit ls` and `verify`, on the host of the supervisor."""

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding

from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.tenants.audit.chain import ChainHead, verify
from baton.tenants.audit.file import NAME
from baton.tenants.audit.inbox import AuditInbox
from fleet.cli.common import FleetOption, fail, line_markup
from fleet.local import state as fleet_state

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

audit_app = typer.Typer(
    help="Show and verify the log of changes, on the host where `baton up` ran.",
    no_args_is_help=True,
)


@audit_app.command("ls")
def ls(
    since: Annotated[
        str | None, typer.Option(help="Age such as 2h or 7d, or a time in ISO 8601. Default: all.")
    ] = None,
    fleet: FleetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines of the log.")] = False,
) -> None:
    """List the entries, the newest last. The fleet need not run."""
    begin = _begin(since)
    fields = [_fields(line) for line in _lines(_file(fleet))]
    entries = [one for one in fields if datetime.fromisoformat(one["time"]) >= begin]
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(entry))
        return
    console = Console(highlight=False)
    for one in entries:
        at = datetime.fromisoformat(one["time"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        origin = f" from {one['from']}" if one["from"] else ""
        console.print(
            f"[dim]{at}[/]  {line_markup(one['who'] + origin)}: [bold]{line_markup(one['verb'])}[/]"
            f" {line_markup(one['what'])}".rstrip(),
            soft_wrap=True,
        )
        for change in _changes(one["before"], one["after"]):
            console.print(Padding(line_markup(change), (0, 0, 0, 4), expand=False))


@audit_app.command("verify")
def verify_(fleet: FleetOption = None) -> None:
    """Check that no line was changed, removed, inserted or moved; exit with 1 otherwise.

    A cut end, and a change of the last line, are found while the fleet runs: Redis has the number
    and the hash of the last line.
    """
    path = _file(fleet)
    known, note = _known_head(path.parent.name)
    verdict = verify(_lines(path), known)
    if verdict.broken_line:
        fail(f"{path}:{verdict.broken_line}: {verdict.problem}")
    last = f", last SHA-256 {verdict.head.sha256}" if verdict.lines else ""
    typer.echo(f"{path}: {verdict.lines} lines are valid{last}{note}")


def _known_head(name: str) -> tuple[ChainHead | None, str]:
    """Return the head in Redis, and a note if there is none."""
    state = fleet_state.load(name)
    if state is None:
        return None, "; the end is not verified: the fleet is not running"

    async def ask() -> ChainHead | None:
        registry = Registry(state.redis_url, state.fleet)
        try:
            return await AuditInbox(registry).head()
        finally:
            await registry.close()

    try:
        head = asyncio.run(ask())
    except RegistryUnavailableError as error:
        return None, f"; the end is not verified: {error}"
    return head, "" if head is not None else "; the end is not verified: Redis has no record of it"


def _file(fleet: str | None) -> Path:
    logs = sorted(fleet_state.home().glob(f"*/{NAME}"))
    if fleet is not None:
        logs = [path for path in logs if path.parent.name == fleet]
    if not logs:
        fail(f"no audit log in {fleet_state.home()}: it is on the host where `baton up` ran")
    if len(logs) > 1:
        names = ", ".join(path.parent.name for path in logs)
        fail(f"several fleets have an audit log ({names}): select one with --fleet NAME")
    return logs[0]


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        fail(f"{path}: {error.strerror}")


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(line)
        datetime.fromisoformat(fields["time"])
        return fields
    except (ValueError, KeyError, TypeError):
        fail("a line is no entry: use `baton audit verify`")


def _begin(since: str | None) -> datetime:
    if since is None:
        return datetime.min.replace(tzinfo=UTC)
    form = re.fullmatch(r"(\d{1,9})([smhd])", since)
    if form is not None:
        return datetime.now(UTC) - timedelta(seconds=int(form[1]) * _UNITS_S[form[2]])
    try:
        at = datetime.fromisoformat(since)
    except ValueError:
        fail(f"--since {since}: use an age such as 2h or 7d, or a time such as 2026-11-26T08:00")
    return at if at.tzinfo is not None else at.astimezone()


def _changes(before: Any, after: Any) -> list[str]:
    """Return one line for each field that an entry changed."""
    if not all(isinstance(value, dict) for value in (before, after) if value is not None):
        return [" → ".join(_text(value) for value in (before, after) if value is not None)]
    old: dict[str, Any] = before or {}
    new: dict[str, Any] = after or {}
    lines = []
    for name in dict.fromkeys((*old, *new)):
        values = [_text(fields[name]) for fields in (old, new) if name in fields]
        lines.append(f"{name}: {' → '.join(values)}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)
