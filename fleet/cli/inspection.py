"""Read-only commands: `baton status`, `baton logs` and `baton config check`."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleet.cli.common import (
    FileArgument,
    JsonOption,
    RemoteFleet,
    emulated_note,
    fail,
    get_json,
    known_fleet,
    load_fleet_file,
)
from fleet.cli.ray_config import config_import
from fleet.cli.reach import HERE, FleetAddress, order
from fleet.local import state as fleet_state
from fleet.local.checks import preflight
from fleet.local.checks.machine_fit import missing_files, missing_resources
from fleet.local.state import FleetState
from fleet.private_logs import logs_of
from loadtest.commands.option_groups import with_options


@with_options()
def status(
    at: FleetAddress = HERE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the response of /fleet.")] = False,
) -> None:
    """Show the workers: state, load, KV blocks, and the hand-offs.

    Exit code 0 if all workers are ready, 1 if some are not, 3 if no fleet is running.
    """
    state = at.reach()
    answer = get_json(state, "/fleet")
    workers = answer["workers"]
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        console = Console()
        console.print(f"[bold]{escape(state.name)}[/] at {state.url}/v1")
        if timing := answer.get("emulated"):
            console.print(f"[bold yellow]{emulated_note(timing)}[/]")
        console.print(_worker_table(workers))
        for worker in workers:
            if reason := worker.get("reason"):  # absent in older routers' responses
                console.print(escape(f"{worker['id']}: {reason}"))
        models = {one["model"]: one["model_version"] for one in workers if "model_version" in one}
        if len(models) > 1:  # ids of workers begin with the name
            shown = ", ".join(f"{name} ({version})" for name, version in models.items())
            console.print(escape(f"models: {shown}"))
        versions = Counter(version for one in workers if (version := one.get("version")))
        if len(versions) > 1:
            shown = ", ".join(f"{version} ({count})" for version, count in sorted(versions.items()))
            console.print(escape(f"versions of the workers: {shown}"))
        moved = answer["transfers"]
        console.print(
            f"hand-offs: {moved['count']}, {moved['bytes'] / 2**20:.1f} MiB, "
            f"{moved['failures']} failed"
        )
    raise typer.Exit(0 if all(worker["state"] == "ready" for worker in workers) else 1)


def _worker_table(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # fits into 80 columns
    blocks = "KV leased\n+cached"
    for name in ("worker", "role", "state", "epoch", "run", "wait", blocks, "process"):
        table.add_column(name, no_wrap=name not in ("worker", "process"), overflow="fold")
    colours = {"ready": "green", "dead": "red", "parked": "dim"}
    for worker in workers:
        blocks = worker["kv_blocks"]
        colour = colours.get(worker["state"], "yellow")
        table.add_row(
            escape(worker["id"]),
            escape(worker["role"]),
            f"[{colour}]{escape(worker['state'])}[/]",
            str(worker["epoch"]),
            *(str(worker[key]) for key in ("running", "waiting")),
            f"{blocks['leased']}+{blocks['cached']}/{blocks['total']}",
            escape(f"{worker['host']}:{worker['pid']}" if worker["pid"] else worker["host"] or "–"),
        )
    return table


@with_options()
def logs(
    worker: Annotated[
        str | None, typer.Argument(help="worker-0, router, controller or redis. Default: all.")
    ] = None,
    at: FleetAddress = HERE,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they are written.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Maximum lines per file.")] = 50,
) -> None:
    """Show the logs of a fleet's processes on all nodes, also after the fleet has stopped.

    --follow shows the files of this machine only, and ends at once if the fleet does not run.
    """
    state = known_fleet(at.fleet) if at.url is None else None
    if at.url is not None or (
        state is not None and state.running and state.on_cluster and not follow
    ):
        _remote_logs(at.reach(), worker, lines)
        return
    if state is not None:
        folder = Path(state.log_dir)
    else:
        _, config = load_fleet_file(None, None)
        folder = fleet_state.log_folder(config, at.fleet or config.fleet)
    files = logs_of(worker or "", folder)
    if not files:
        names = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) or "none yet"
        fail(f"no log of {worker or 'any process'} in {folder} (found: {names})")
    writing = follow and state is not None and state.running
    command = ["tail", "-n", str(lines), *(["-F"] if writing else []), *map(str, files)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _remote_logs(place: FleetState | RemoteFleet, worker: str | None, lines: int) -> None:
    logs_by_node = order(
        place, "logs", [worker] if worker else [], {"lines": lines}, timeout_s=30.0
    )
    if not any(logs_by_node.values()):
        fail(f"no node has a log of {worker or 'any process'}")
    for node, files in logs_by_node.items():
        for name, text in files.items():
            typer.echo(f"==> {node}: {name} <==\n{text}\n")


def config_check(file: FileArgument = None, as_json: JsonOption = False) -> None:
    """Check a fleet file and its model. Each error names its line.

    Also shows what `baton up` would miss on this machine: certificates, CPUs, memory, a GPU. The
    exit code is 1 if the file has an error; what this machine lacks is no error of the file.
    """
    config_file, config = load_fleet_file(file, None)
    models = []
    notes = []
    for lane in config.lanes:
        if lane.model.startswith("hub:"):
            typer.echo(f"looking for {lane.model} in the cache, then on the hub", err=True)
        try:
            model = preflight.describe_model(lane, whole=True)
        except ValueError as error:
            fail(f"{config_file}: model = {lane.model}: {error}")
        of_lane = f"{lane.model_names[0]}: " if config.models else ""
        models.append(f"{of_lane}{model.text}")
        notes += [model.warning] if model.warning else []
    notes += preflight.notes(config)
    missing = [*missing_files(config), *missing_resources(config)]
    if as_json:
        result = {"file": str(config_file), "models": models, "notes": notes, "missing": missing}
        typer.echo(json.dumps(result, indent=2))
        return
    for text in models:
        typer.echo(f"{config_file}: ok ({text})")
    for note in notes:
        typer.echo(f"note: {note}")
    for line in missing:
        typer.echo(f"not on this machine: {line}")


config_app = typer.Typer(help="Check and import fleet files.", no_args_is_help=True)
config_app.command("check")(config_check)
config_app.command("import")(config_import)
