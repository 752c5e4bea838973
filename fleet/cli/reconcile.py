"""`baton up --reconcile`: apply a changed fleet file to the fleet that runs here."""

import contextlib
import os
import time
from pathlib import Path

import typer
from pydantic import ValidationError

from baton.config.fleet_file import FleetConfig
from baton.telemetry.progress import Progress
from baton.telemetry.version import version
from fleet.cli.common import NOT_RUNNING, fail
from fleet.local import state as fleet_state
from fleet.local.changes import Changes, changes, keys_digest
from fleet.local.signals import CHANGE_SIGNAL
from fleet.local.state import FleetState
from fleet.local.supervisor import START_LIMIT_S

_POLL_S = 0.25


def reconcile_running(config_file: Path, config: FleetConfig, *, dry_run: bool) -> None:
    """Print the changes, signal the fleet's `baton up` to apply them, and wait for the result."""
    state = _running(config_file, config)
    plan = planned(state, config)
    if plan.refused:
        fail("; ".join(plan.refused))
    unfinished = state.change_problem if not plan.keys else ""
    for line in (f"retrying: {unfinished}",) if unfinished else plan.lines:
        typer.echo(line)
    supervisor = state.supervisor.find()
    if dry_run or not (plan.keys or unfinished) or supervisor is None:
        return
    supervisor.send_signal(CHANGE_SIGNAL)
    progress = Progress(typer.echo)
    progress.awaited = "`baton up`"
    with progress.shown():
        _wait_until_changed(state, progress)
    typer.echo("the fleet matches its file")


def _wait_until_changed(before: FleetState, progress: Progress) -> None:
    """Show what the change waits for until it is done; exit with an error if it fails."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        now = fleet_state.load(before.name)
        if now is None or not now.running:
            fail("the fleet exited; see the output of its `baton up`")
        if now.changes_done > before.changes_done:
            if now.change_problem:
                fail(now.change_problem)
            return
        if now.change_awaits and now.change_awaits != progress.awaited:
            progress.awaited = now.change_awaits
            progress.say(f"waiting for {progress.awaited}")
        time.sleep(_POLL_S)
    fail(
        f"the change is not complete after {START_LIMIT_S:g} s: see `baton status` and `baton logs`"
    )


def planned(state: FleetState, config: FleetConfig) -> Changes:
    """Return the changes that make a running fleet match a configuration."""
    try:
        running = FleetConfig.model_validate_json(state.config_json)
    except ValidationError as error:
        fail(
            f"the supervisor of {state.fleet} runs another version of Baton, whose settings this "
            f"one ({version()}) cannot read: {error.errors()[0]['msg']}. Use that version, or stop "
            "the fleet and start it again"
        )
    config = config.model_copy(update={"port": running.port})  # may come from --port or BATON_PORT
    same_keys = keys_digest(config, state.run_folder) == state.keys_digest
    return changes(running, config, same_keys=same_keys)


def _running(config_file: Path, config: FleetConfig) -> FleetState:
    file = os.path.abspath(config_file)  # noqa: PTH100 - a link stays a link
    there = [state for state in fleet_state.load_all() if state.running]
    running = next((state for state in there if _same(state.config_file, file)), None)
    named = next((state for state in there if state.fleet == config.fleet), None)
    if running is None and named is not None:
        fail(
            f"fleet {config.fleet} runs from {named.config_file}, not from {file}: edit and pass "
            "that file"
        )
    if running is None:
        fail(
            f"no fleet runs here from {file}: start it with `baton up`, which also adopts workers "
            "that run in a cluster (--address with --dry-run shows their nodes)",
            NOT_RUNNING,
        )
    return running


def _same(file: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return file == other or Path(file).samefile(other)
    return False
