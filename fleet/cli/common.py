"""What commands share: the fleet file, the fleets of this machine, and how a command fails."""

import os
import sys
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from baton.config.fleet_file import ConfigError, FleetConfig, load_config
from fleet.local import state as fleet_state
from fleet.local.http_trust import trusted
from fleet.local.state import FleetState

DEFAULT_FILE = Path("deploy/local.yaml")
NOT_RUNNING = 3  # exit code, as systemctl's

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        help="Fleet file. Default: $BATON_CONFIG, else deploy/local.yaml.", metavar="FILE"
    ),
]


class Reachable(Protocol):
    """A fleet's router, and a key that is an operator's there."""

    @property
    def url(self) -> str:
        """Of the router."""

    @property
    def fleet_token(self) -> str:
        """The key."""

    @property
    def certificate(self) -> str:
        """Of the router, if it is on this host and speaks HTTPS."""


FleetOption = Annotated[
    str | None, typer.Option("--fleet", help="Which fleet, when several run on this machine.")
]


def load_fleet_file(file: Path | None, port: int | None) -> tuple[Path, FleetConfig]:
    """The same as `read_fleet_file`; the command fails where the file is wrong."""
    try:
        return read_fleet_file(file, port)
    except ConfigError as error:
        fail(str(error))


def read_fleet_file(file: Path | None, port: int | None) -> tuple[Path, FleetConfig]:
    """The fleet file and what it says, with the port from the option or BATON_PORT.

    Raises:
        ConfigError: It cannot be used.
    """
    path = file or Path(os.environ.get("BATON_CONFIG") or DEFAULT_FILE)
    overrides: dict[str, object] = {}
    said_by = "--port"
    if port is not None:
        overrides["port"] = port
    elif text := os.environ.get("BATON_PORT"):
        said_by = "BATON_PORT"
        overrides["port"] = int(text) if text.isdigit() else text
    return path, load_config(path, overrides, said_by=said_by)


def known_fleet(fleet: str | None) -> FleetState | None:
    """The fleet that is meant, running or not."""
    states = fleet_state.load_all()
    if fleet is not None:
        return next((state for state in states if state.name == fleet), None)
    running = [state for state in states if state.running]
    if len(running) > 1:
        names = ", ".join(state.name for state in running)
        fail(f"several fleets are running ({names}): choose one with --fleet NAME")
    return next(iter(running or states), None)


def running_fleet(fleet: str | None) -> FleetState:
    """The fleet that is meant; the command fails where it is not running."""
    state = known_fleet(fleet)
    if state is None or not state.running:
        fail("no fleet is running here: `baton up` starts one", NOT_RUNNING)
    return state


def get_json(state: Reachable, path: str, **parameters: str | int) -> Any:
    """What the fleet's router answers to a GET with the fleet's own token, an operator's.

    The command fails where the router does not answer, or with another status than 200.
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
        return answer.raise_for_status().json()
    except httpx.HTTPError as error:
        fail(f"{state.url}{path}: {error}; see `baton logs router`")


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key; none for an empty one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def emulated_note(timing: str) -> str:
    """What is said wherever an emulated fleet is shown."""
    return f"EMULATED: no model runs, answers are made up; steps last as in {timing}"


def fail(message: str, code: int = 1) -> NoReturn:
    """Show an error and end with this exit code."""
    show_error(message)
    raise typer.Exit(code)


def show_error(message: str) -> None:
    """One line on standard error, with the time."""
    stamp = datetime.now(UTC).astimezone().strftime("%H:%M:%S")
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[bold red]error[/] [dim]{stamp}[/] {escape(message)}"
    )
    sys.stdout.flush()
