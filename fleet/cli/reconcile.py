"""`baton up --reconcile`: a fleet that runs here becomes what its file says now."""

import contextlib
import os
import time
from pathlib import Path

import typer

from baton.config.fleet_file import FleetConfig
from fleet.cli.common import NOT_RUNNING, fail
from fleet.local import state as fleet_state
from fleet.local.changes import Changes, changes, keys_digest
from fleet.local.signals import CHANGE_SIGNAL
from fleet.local.state import FleetState
from fleet.local.supervisor import START_LIMIT_S

_POLL_S = 0.25


def reconcile_running(config_file: Path, config: FleetConfig, *, dry_run: bool) -> None:
    """Show what has to change, and have the fleet's own `baton up` do it, or fail as it does.

    Args:
        config_file: The one that the fleet was started with.
        config: What it says now.
        dry_run: Only show it.
    """
    state = _running(config_file, config)
    plan = planned(state, config)
    if plan.refused:
        fail("; ".join(plan.refused))
    unfinished = state.change_problem if not plan.keys else ""
    for line in (f"to be tried again: {unfinished}",) if unfinished else plan.lines:
        typer.echo(line)
    supervisor = state.supervisor.find()
    if dry_run or not (plan.keys or unfinished) or supervisor is None:
        return
    supervisor.send_signal(CHANGE_SIGNAL)
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        now = fleet_state.load(state.name)
        if now is None or not now.running:
            fail("the fleet ended; see its output")
        if now.changes_done > state.changes_done:
            if now.change_problem:
                fail(now.change_problem)
            typer.echo("the fleet is as its file says")
            return
        time.sleep(_POLL_S)
    fail(f"the fleet is not there after {START_LIMIT_S:g} s: see `baton status`, `baton logs`")


def planned(state: FleetState, config: FleetConfig) -> Changes:
    """What a fleet that runs lacks of a configuration."""
    running = FleetConfig.model_validate_json(state.config_json)
    config = config.model_copy(update={"port": running.port})  # an option or BATON_PORT, then
    same_keys = keys_digest(config, state.run_folder) == state.keys_digest
    return changes(running, config, same_keys=same_keys)


def _running(config_file: Path, config: FleetConfig) -> FleetState:
    file = os.path.abspath(config_file)  # noqa: PTH100 - a link stays a link
    there = [state for state in fleet_state.load_all() if state.running]
    found = next((state for state in there if _same(state.config_file, file)), None)
    named = next((state for state in there if state.fleet == config.fleet), None)
    if found is None and named is not None:
        fail(f"fleet {config.fleet} runs from {named.config_file}, not from {file}: change that")
    if found is None:
        fail(
            f"no fleet runs here from {file}: `baton up` starts it, and adopts what runs in a "
            "cluster (with --address, --dry-run says where its workers would go)",
            NOT_RUNNING,
        )
    return found


def _same(file: str, other: str) -> bool:
    """Return whether two paths name one file."""
    with contextlib.suppress(OSError):
        return file == other or Path(file).samefile(other)
    return False
