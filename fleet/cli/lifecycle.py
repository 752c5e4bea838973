"""`baton up` and `baton down`: start and stop a fleet on this machine."""

import contextlib
import json
import os
import shlex
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.config.clients import KEYS_IN_REDIS
from baton.config.fleet_file import FleetConfig
from baton.registry.redis_store import RegistryUnavailableError
from baton.telemetry.progress import Progress
from baton.telemetry.version import version
from fleet.cli.common import (
    NOT_RUNNING,
    FileArgument,
    emulated_note,
    exits_on,
    fail,
    load_fleet_file,
    read_fleet_file,
    show_error,
)
from fleet.local import state as fleet_state
from fleet.local.changes import Changes, changes, keys_digest
from fleet.local.checks.preflight import PortTakenError
from fleet.local.cluster_pools import RayCluster, call_cluster
from fleet.local.fleet_redis import LeaseTakenError
from fleet.local.http_trust import authority_for
from fleet.local.log_files import LastingConsole, terminal
from fleet.local.redis_server import RedisError
from fleet.local.signals import CHANGE_SIGNAL
from fleet.local.state import FleetState
from fleet.local.supervisor import START_LIMIT_S, FleetError, RayLostError, Supervisor
from fleet.pools.cluster_call import ClusterCall, ClusterReply
from fleet.pools.nodes import CapacityError
from loadtest.commands.option_groups import with_options

_DOWN_LIMIT_S = 16.0
_KILLED_LIMIT_S = 2.0
_REFUSALS = (
    *(FleetError, CapacityError, RedisError, PortTakenError, LeaseTakenError, ValueError),
    RegistryUnavailableError,
    OSError,  # such as a full disk; the message names the file
)
_POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class _Cluster:
    address: Annotated[
        str | None,
        typer.Option(help="Existing Ray cluster (`auto` or HOST:PORT). Default: a private Ray."),
    ] = None
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the fleet over from another `baton up`.")
    ] = False
    leave: Annotated[
        bool,
        typer.Option(
            "--leave",
            help="With --address: keep controller and workers running after a stop, for the next "
            "`up` to adopt; `baton down FILE --address` ends them.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class _Applied:
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show what would change in the running fleet, or with --address the nodes of the "
            "workers, and exit.",
        ),
    ] = False
    reconcile: Annotated[
        bool,
        typer.Option("--reconcile", help="Apply a changed file to the running fleet, and exit."),
    ] = False


_PRIVATE = _Cluster()
_START = _Applied()


@with_options()
def up(
    file: FileArgument = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the router. Default: BATON_PORT, else the file's.")
    ] = None,
    cluster: _Cluster = _PRIVATE,
    applied: _Applied = _START,
) -> None:
    """Start a fleet and run it in the foreground; Ctrl-C stops it.

    Starts Redis, Ray, the workers and a router on this machine, shows the progress, and prints the
    URL when the fleet is ready.

    `baton up FILE --reconcile` applies a changed file while the fleet serves: it adds, drains and
    restarts workers as needed. With --dry-run it only lists them.

    Examples: `baton up`, `baton up deploy/local-2x2.yaml`, `BATON_PORT=9000 baton up`.
    """
    config_file, config = load_fleet_file(file, port)
    console = LastingConsole(file=terminal(), highlight=False, soft_wrap=True)
    began_s = time.monotonic()
    serving = threading.Event()

    def say(line: str) -> None:
        """Print a line with the seconds of the start; once the fleet serves, with date and time."""
        stamp = f"{time.monotonic() - began_s:6.1f} s"
        if serving.is_set():
            stamp = datetime.now(UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        console.print(f"[dim]{stamp}[/]  {escape(line)}")

    def on_ready() -> None:
        _announce(console, supervisor, config)
        serving.set()

    if applied.reconcile or (applied.dry_run and cluster.address is None):
        reconcile_running(config_file, config, dry_run=applied.dry_run)
        return
    if applied.dry_run and cluster.address is not None:
        _show_plan(config, cluster.address)
        return
    file_again = config_file.absolute()  # before the supervisor changes the current folder
    supervisor = Supervisor(
        config,
        config_file,
        say,
        None if cluster.address is None else RayCluster(**asdict(cluster)),
        reread=lambda: read_fleet_file(file_again, port)[1],
    )
    try:
        supervisor.run(on_ready)
    except RayLostError as error:
        show_error(str(error))
        os._exit(1)
    except _REFUSALS as error:
        fail(str(error))


def _called(verb: Literal["plan", "clean"], config: FleetConfig, address: str) -> ClusterReply:
    call = ClusterCall(verb=verb, address=address, config_json=config.to_json())
    with exits_on(CapacityError):
        return call_cluster(call, Path(os.devnull))


def _show_plan(config: FleetConfig, address: str) -> None:
    places = _called("plan", config, address).places
    table = Table("worker", "node")
    for worker_id, node in places.items():
        table.add_row(worker_id, escape(node) or "[red]no node has room[/]")
    Console().print(table)
    raise typer.Exit(0 if all(places.values()) else 1)


def _announce(console: Console, supervisor: Supervisor, config: FleetConfig) -> None:
    name = config.lanes[0].model_names[0]
    url = supervisor.announced_url
    served = "; ".join(
        f"{lane.model_names[0]}, attached servers"
        if lane.pools.is_attached
        else f"{lane.model_names[0]}, {lane.pools.prefill} prefill + {lane.pools.decode} decode"
        for lane in config.lanes
    )
    asked: dict[str, Any] = {"prompt": "The capital of France is"}
    path = "completions"
    if supervisor.chats:
        asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        path = "chat/completions"
    body = {"model": name, **asked, "temperature": 0}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.has_keys else ""
    console.print(f"[bold green]Baton is ready[/] at [bold]{url}/v1[/] ({served})")
    timings = {lane.pools.engine.emulated for lane in config.lanes}
    for timing in sorted(filter(None, timings)):
        console.print(f"[bold yellow]{emulated_note(timing)}[/]")
    lines = [
        f"curl{_cacert(supervisor, config)} {url}/v1/{path}{key} "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        f"page: {url}/",
    ]
    if config.clients.api_keys_file == KEYS_IN_REDIS:
        lines.append("keys: baton keys create TENANT")
    if supervisor.chats:
        export = "OPENAI_API_KEY=YOUR_KEY " * config.has_keys
        apart = any(lane.pools.prefill for lane in config.lanes)
        mode = " --mode disaggregated" * apart  # shows a KV transfer
        lines.append(f"chat: {export}baton chat{mode}")
    lines.append("stop: Ctrl-C")
    for line in lines:
        console.print(f"  {line}", markup=False)


def _cacert(supervisor: Supervisor, config: FleetConfig) -> str:
    """Return the option by which curl trusts the router's certificate, if it needs one."""
    if (https := config.clients.tls) is None:
        return ""
    beside = Path(https.certificate).parent / "ca.pem"  # as `baton certs` writes it
    of_workers = [config.pools.tls.ca] if config.pools.tls is not None else []
    files = [str(beside), *of_workers, https.certificate]
    authority = authority_for(supervisor.url, files)
    if authority is None:
        return " --cacert CA_FILE"
    return f" --cacert {shlex.quote(authority)}" if authority else ""


def down(
    file: FileArgument = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster in which the file's fleet is ended, wherever it was started."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Stop all fleets of this user on this machine.")
    ] = False,
) -> None:
    """Stop a running fleet, and clean up after one that was killed.

    Without a file and without BATON_CONFIG: the only running fleet of this user on this machine.
    With --address: the file's fleet in that cluster, with its controller, workers and placement
    groups.
    """
    if address is not None:
        _clean_cluster(load_fleet_file(file, None)[1], address)
        return
    if every or (file is None and not os.environ.get("BATON_CONFIG")):
        states = fleet_state.load_all()
        running = sorted(state.name for state in states if state.running)
        if len(running) > 1 and not every:
            fail(
                f"{len(running)} fleets run here ({', '.join(running)}): name the file of one, or "
                "stop all with `baton down --all`"
            )
    else:
        fleet = load_fleet_file(file, None)[1].fleet
        states = [state for state in fleet_state.load_all() if state.fleet == fleet]
    if not states:
        typer.echo("nothing is running")
    results = [_bring_down(state) for state in states]
    raise typer.Exit(0 if all(results) else 1)


def _clean_cluster(config: FleetConfig, address: str) -> None:
    for state in fleet_state.load_all():
        if state.fleet == config.fleet:  # else its supervisor restarts what is ended here
            _bring_down(state)
    left = _called("clean", config, address).left
    typer.echo(f"{config.fleet}: removed from the cluster ({left} leftovers ended)")


def _bring_down(state: FleetState) -> bool:
    supervisor = state.supervisor.find()
    if supervisor is not None:
        with contextlib.suppress(psutil.Error):
            supervisor.terminate()
        deadline = time.monotonic() + _DOWN_LIMIT_S
        while state.running and time.monotonic() < deadline:
            time.sleep(0.1)
    ended = not state.running
    if not ended and supervisor is not None:
        with contextlib.suppress(psutil.Error):
            supervisor.kill()
            supervisor.wait(_KILLED_LIMIT_S)
    left = fleet_state.sweep(state.run_folder)
    fleet_state.forget_unless_followed(state)
    typer.echo(f"{state.name}: stopped" + (f" ({left} leftover processes ended)" if left else ""))
    return ended


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
