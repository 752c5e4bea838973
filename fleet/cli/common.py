"""Helpers of all commands: the fleet file, this machine's fleets, errors."""

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from baton.config.fleet_file import FleetConfig
from baton.config.load import ConfigError, load_config
from baton.printable import printable_json
from fleet.local import state as fleet_state
from fleet.local.http_trust import trusted
from fleet.local.state import FleetState
from loadtest.reasons import http_reason

DEFAULT_FILE = Path("deploy/local.yaml")
_SHOWN_CHARS = 200
NOT_RUNNING = 3  # exit code, as systemctl's

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        help="Fleet file. Default: $BATON_CONFIG, else deploy/local.yaml.", metavar="FILE"
    ),
]


class RemoteFleet(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that is reached through one of its routers."""

    name: str
    url: str
    fleet_token: str  # an operator key, which has the same permissions
    certificate: str = ""  # empty: verified with this host's CAs


FleetOption = Annotated[
    str | None,
    typer.Option("--fleet", help="Name of the fleet; needed when several run on this machine."),
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load_fleet_file(file: Path | None, port: int | None) -> tuple[Path, FleetConfig]:
    """Read the fleet file like `read_fleet_file`, and exit with its error if it is invalid."""
    with exits_on(ConfigError):
        return read_fleet_file(file, port)


def read_fleet_file(file: Path | None, port: int | None) -> tuple[Path, FleetConfig]:
    """Return the fleet file's path and configuration, with the port from --port or BATON_PORT.

    Raises:
        ConfigError: The file is missing or invalid.
    """
    path = file or Path(os.environ.get("BATON_CONFIG") or DEFAULT_FILE)
    if path == DEFAULT_FILE and file is None and not path.exists():
        raise ConfigError(
            f"no fleet file: there is no {path} in this folder; give a FILE or set BATON_CONFIG "
            "(`echo 'fleet: mine' > fleet.yaml` writes one with all defaults)"
        )
    overrides: dict[str, object] = {}
    said_by = "--port"
    if port is not None:
        overrides["port"] = port
    elif text := os.environ.get("BATON_PORT"):
        said_by = "BATON_PORT"
        if "://" in text:
            note(f"BATON_PORT={text} is ignored: Kubernetes sets it for a Service named `baton`")
        else:
            overrides["port"] = int(text) if text.isdigit() else text
    return path, load_config(path, overrides, said_by=said_by)


def known_fleet(fleet: str | None) -> FleetState | None:
    """Return the selected fleet's state, running or not; None if there is none."""
    states = fleet_state.load_all()
    if fleet is not None:
        return next((state for state in states if state.name == fleet), None)
    running = [state for state in states if state.running]
    if len(running) > 1:
        names = ", ".join(state.name for state in running)
        fail(f"several fleets are running ({names}): select one with --fleet NAME")
    return next(iter(running or states), None)


def running_fleet(fleet: str | None) -> FleetState:
    """Return the selected fleet's state; exit with an error if it is not running."""
    state = known_fleet(fleet)
    if state is None or not state.running:
        running = ", ".join(each.name for each in fleet_state.load_all() if each.running)
        if running:
            fail(f"no fleet {fleet} is running on this machine (running: {running})", NOT_RUNNING)
        fail("no fleet is running on this machine: start one with `baton up`", NOT_RUNNING)
    return state


def get_json(state: FleetState | RemoteFleet, path: str, **parameters: str | int) -> Any:
    """Send a GET with the operator key to the router and return its JSON.

    Exits with an error if the router does not respond, or responds with a status other than 200.
    """
    try:
        answer = httpx.get(
            f"{state.url}{path}",
            params=parameters,
            headers=bearer(state.fleet_token),
            timeout=10.0,
            trust_env=False,
            verify=trusted(state.certificate),
        )
        if answer.status_code == HTTPStatus.NOT_FOUND:
            fail(f"{path}: {answer.json()['error']['message']}")
        return printable_json(answer.raise_for_status().json())
    except httpx.InvalidURL as error:
        fail(f"{state.url}{path[:_SHOWN_CHARS]}: {error}")
    except httpx.HTTPError as error:
        fail(f"{state.url}{path}: {http_reason(error)}; see `baton logs router`")


def bearer(key: str) -> dict[str, str]:
    """Return the authorization header for a key; empty without a key."""
    return {"authorization": f"Bearer {key}"} if key else {}


def emulated_note(timing: str) -> str:
    """Return the notice that is shown wherever an emulated fleet appears."""
    return f"EMULATED: no model runs, responses are synthetic; step times follow {timing}"


@contextlib.contextmanager
def exits_on(*errors: type[Exception]) -> Iterator[None]:
    """Print these errors of the block and exit."""
    try:
        yield
    except errors as error:
        fail(str(error))


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error and exit with this code."""
    show_error(message)
    raise typer.Exit(code)


def note(message: str) -> None:
    """Print a note to standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"note: {escape(message)}")


def line_markup(text: str) -> str:
    """Return a text for rich, without control characters: clients may have sent it."""
    return escape("".join(one if one.isprintable() else " " for one in text))


def show_error(message: str) -> None:
    """Print one line with the time to standard error."""
    stamp = datetime.now(UTC).astimezone().strftime("%H:%M:%S")
    shown = "\n".join(map(line_markup, message.split("\n")))
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[bold red]error[/] [dim]{stamp}[/] {shown}"
    )
    sys.stdout.flush()
