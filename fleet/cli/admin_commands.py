"""Admin commands for a running fleet: `baton drain`, `restart`, `scale` and `nodes`."""

import json
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.config.fleet_file import FleetConfig
from baton.types.slo import Slo
from fleet.cli.common import JsonOption, RemoteFleet, fail, get_json, running_fleet, show_error
from fleet.cli.reach import HERE, FleetAddress, ModelOption, order
from fleet.local import state as fleet_state
from fleet.local.audited import audit_here
from fleet.local.router_process import group_folder, router_name, serving_pid
from fleet.local.state import FleetState, audit_file
from loadtest.commands.option_groups import with_options
from loadtest.simulator.cli import replay
from loadtest.simulator.setup import Setup

_MOVE_LIMIT_S = 15.0
_SHOWN_DECISIONS = 8
_POLL_S = 0.5

Workers = dict[str, dict[str, Any]]
"""Workers of ``GET /fleet`` by id."""


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Show each change and return when it is done; else exit code 1."
        ),
    ] = False
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="Seconds that --wait may take.")
    ] = 600.0


_AT_ONCE = _Waiting()


@with_options()
def drain(
    worker: Annotated[str | None, typer.Argument(help="Worker id, such as worker-1.")] = None,
    node: Annotated[
        str | None, typer.Option(help="Name or address of a node to close for workers.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Reopen the node.")] = False,
    waiting: _Waiting = _AT_ONCE,
    at: FleetAddress = HERE,
) -> None:
    """Stop one worker once its requests have ended, or move all workers off a node.

    `baton restart WORKER` starts a drained worker again. A node's workers move to other nodes one
    after another; `baton drain --node NODE --undo` reopens the node.
    """
    if (worker is None) == (node is None) or (undo and node is None):
        fail("use either `baton drain WORKER` or `baton drain --node NODE [--undo]`")
    place = at.reach()
    if worker is not None:
        before = _workers(place) if waiting.wait else {}
        order(place, "drain", [worker])
        typer.echo(f"{worker}: draining (`baton status`)")
        if waiting.wait:
            _wait(place, before, lambda now: now[worker]["state"] == "parked", waiting.timeout_s)
        return
    verb = "open" if undo else "close"
    moving = order(place, verb, arguments={"node": str(node)}, timeout_s=_MOVE_LIMIT_S)
    what = f"moving {', '.join(moving)}" if moving else "it has no workers"
    typer.echo(f"{node}: reopened" if undo else f"{node}: closed; {what} (`baton nodes`)")
    if waiting.wait and moving:
        before = _workers(place)
        _wait(place, before, lambda _: not _workers_on(place, str(node)), waiting.timeout_s)


@with_options()
def restart(
    worker: Annotated[
        str | None, typer.Argument(help="Worker id, or `routers`. Default: all workers.")
    ] = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="Restart one after another, each drained first.")
    ] = False,
    move: Annotated[bool, typer.Option("--move", help="Move each worker to another node.")] = False,
    waiting: _Waiting = _AT_ONCE,
    at: FleetAddress = HERE,
) -> None:
    """Restart workers at once, or with --rolling one after another without losing a request.

    Routers (`baton restart routers`, on their host) are always replaced one after another: the
    successor serves before the old router stops accepting, and the old one finishes its responses.
    """
    if worker in ("router", "routers"):
        _restart_routers(running_fleet(at.fleet), waiting.timeout_s if waiting.wait else 0.0)
        return
    workers = [worker] if worker else []
    place = at.reach()
    before = _workers(place) if waiting.wait else {}
    order(place, "roll" if rolling else "restart", workers, {"move": move})
    typer.echo(f"{worker or 'all workers'}: restarting{' one by one' if rolling else ''}")
    if waiting.wait:
        in_use = [name for name, shown in before.items() if shown["state"] != "parked"]
        _wait(
            place, before, lambda now: _renewed(workers or in_use, before, now), waiting.timeout_s
        )


def _restart_routers(state: FleetState, wait_s: float) -> None:
    supervisor = state.supervisor.find()
    if supervisor is None:
        fail(f"{state.name} is not running")
    before = _routers(state)
    supervisor.send_signal(signal.SIGUSR2)
    audit_here(audit_file(state.name), "restart", "routers", say=show_error)
    typer.echo("routers: restarting one by one")
    if wait_s:
        _wait_for_routers(state, before, wait_s)


def _routers(state: FleetState) -> list[int]:
    """Return the process id of the router that serves in each place."""
    group = group_folder(Path(state.run_folder))
    count = FleetConfig.model_validate_json(state.config_json).pools.router_count
    return [serving_pid(group, index) for index in range(count)]


def _wait_for_routers(state: FleetState, before: list[int], timeout_s: float) -> None:
    """Show each router that was replaced; exit with code 1 if one was not."""
    waiting = dict(enumerate(before))
    deadline_s = time.monotonic() + timeout_s
    while True:
        pids = _routers(state)
        for index, old in list(waiting.items()):
            if pids[index] not in (0, old):
                typer.echo(f"{router_name(index)} was replaced")
                del waiting[index]
        if not waiting:
            return
        now = fleet_state.load(state.name)
        if now is None or not now.running:
            fail("the fleet exited; see the output of its `baton up`")
        if now.rolls_failed > state.rolls_failed:
            fail(f"{now.roll_problem}; the present routers keep serving (`baton logs router`)")
        if time.monotonic() > deadline_s:
            fail(f"not done after {timeout_s:g} s; it goes on (`baton status`)")
        time.sleep(_POLL_S)


@with_options()
def scale(
    sizes: Annotated[
        list[str], typer.Argument(help="prefill=N, decode=N, auto or hold", metavar="POOL=N...")
    ],
    waiting: _Waiting = _AT_ONCE,
    model: ModelOption = None,
    at: FleetAddress = HERE,
) -> None:
    """Change the number of workers in the pools, or let the planner change their roles.

    With `auto` the planner changes roles by the load, within the limits of `slo` in the fleet
    file, and sizes within `pools.auto`; `hold` stops it. `baton plan` shows its decisions.

    Workers change their role first, without a restart; then surplus ones are drained and missing
    ones started. Example: `baton scale prefill=3 decode=5`. The sizes apply until the fleet is
    stopped, or started with another file.
    """
    arguments: dict[str, int | str | bool] = {}
    if sizes in (["auto"], ["hold"]):
        order(at.reach(), "scale", arguments={"roles": sizes[0]}, model=model)
        typer.echo(f"roles: {sizes[0]} (`baton plan`)")
        return
    for size in sizes:
        role, _, count = size.partition("=")
        if role not in ("prefill", "decode") or not count.isdigit():
            fail(f"{size}: use prefill=N and decode=N, or auto, or hold")
        arguments[role] = int(count)
    place = at.reach()
    before = _workers(place, model) if waiting.wait else {}
    answer = order(place, "scale", [], arguments, _MOVE_LIMIT_S, model) or {}
    for worker_id, role in answer.get("turned", {}).items():
        typer.echo(f"{worker_id}: {role} from now on")
    if behind := answer.get("routers_behind"):
        fail(f"routers that do not follow yet: {', '.join(behind)} (`baton status`)")
    typer.echo(f"{', '.join(sizes)}: scaling (`baton status`)")
    if waiting.wait:
        _wait(place, before, lambda now: _has_sizes(arguments, now), waiting.timeout_s, model)


def _workers(place: FleetState | RemoteFleet, model: str | None = None) -> Workers:
    """Return the workers of one model, or of all."""
    workers = get_json(place, "/fleet")["workers"]
    return {worker["id"]: worker for worker in workers if model in (None, worker.get("model"))}


def _workers_on(place: FleetState | RemoteFleet, node: str) -> list[str]:
    nodes = order(place, "nodes", timeout_s=_MOVE_LIMIT_S)
    return [
        name
        for each in nodes
        if node in (each["name"], each["address"])
        for name in each["workers"]
    ]


def _renewed(names: Iterable[str], before: Workers, now: Workers) -> bool:
    """Return whether these workers are ready in a later life than before."""
    return all(
        name in now
        and now[name]["state"] == "ready"
        and now[name]["epoch"] > before.get(name, {"epoch": 0})["epoch"]
        for name in names
    )


def _has_sizes(sizes: dict[str, int | str | bool], now: Workers) -> bool:
    """Return whether the pools have so many workers, all of them ready."""
    kept = [worker for worker in now.values() if worker["state"] not in ("dead", "parked")]
    states = {
        role: [worker["state"] for worker in kept if worker["role"] == role] for role in sizes
    }
    return all(states[role] == ["ready"] * int(count) for role, count in sizes.items())


def _wait(
    place: FleetState | RemoteFleet,
    before: Workers,
    done: Callable[[Workers], bool],
    timeout_s: float,
    model: str | None = None,
) -> None:
    """Show the changes of workers until ``done``; exit with code 1 if the time is over."""
    shown = {name: _shown(worker) for name, worker in before.items()}
    deadline_s = time.monotonic() + timeout_s
    while True:
        now = _workers(place, model)
        for name, worker in now.items():
            line = _shown(worker, before.get(name))
            if shown.get(name) != line:
                shown[name] = line
                typer.echo(f"{name}: {line}")
        if done(now):
            return
        if time.monotonic() > deadline_s:
            fail(f"not done after {timeout_s:g} s; it goes on (`baton status`)")
        time.sleep(_POLL_S)


def _shown(worker: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    why = worker["reason"].removesuffix("; restarting")  # that is its state here
    reason = f" ({why})" if why else ""
    state = worker["state"]
    if state == "dead":  # as the command ordered; the router knows no process yet
        begun = before is not None and worker["epoch"] > before["epoch"]
        state = "starting" if begun else "stopped"
    return f"{worker['role']}, {state}, epoch {worker['epoch']}{reason}"


@dataclass(frozen=True, kw_only=True)
class _Replay:
    trace: Annotated[
        Path | None,
        typer.Option("--replay", help="Simulate this trace instead: Mooncake JSONL or Azure CSV."),
    ] = None
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers at the start (replay).")] = 4
    decode: Annotated[int, typer.Option(min=1, help="Decode workers at the start (replay).")] = 4
    slo_ttft_s: Annotated[float, typer.Option(min=0.001, help="slo.ttft_s (replay).")] = 10.0
    slo_itl_s: Annotated[float, typer.Option(min=0.0001, help="slo.itl_s (replay).")] = 0.05
    speed: Annotated[
        float, typer.Option(min=0.001, help="Divisor of the gaps between arrivals (replay).")
    ] = 1.0
    batch: Annotated[int, typer.Option(min=1, help="Sequences per worker (replay).")] = 64
    kv_tokens: Annotated[int, typer.Option(min=1024, help="Pool size (replay).")] = 2_050_048
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N requests (replay).")
    ] = None

    def setup(self) -> Setup:
        """Return the parameters of the simulation."""
        return Setup(
            prefill_workers=self.prefill,
            decode_workers=self.decode,
            slo=Slo(ttft_s=self.slo_ttft_s, itl_s=self.slo_itl_s),
            speed=self.speed,
            max_batch_requests=self.batch,
            prefill_kv_tokens=self.kv_tokens,
            decode_kv_tokens=self.kv_tokens,
        )


@with_options()
def plan(
    replayed: _Replay,
    model: ModelOption = None,
    at: FleetAddress = HERE,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: the response of /fleet/planner, or of a replay."),
    ] = False,
) -> None:
    """Show what the planner does, or would do, and why.

    `baton scale auto` lets it act. With --replay no fleet is needed: a trace is simulated with the
    planner and with the fixed split. `baton simulate TRACE --plan auto` has more options.
    """
    if replayed.trace is not None:
        replay(replayed.trace, replayed.setup(), replayed.limit, as_json=as_json)
        return
    planned = order(at.reach(), "plan", model=model)
    if as_json:
        typer.echo(json.dumps(planned, indent=2))
        return
    console = Console()
    meaning = "it acts" if planned["mode"] == "auto" else "it only decides"
    console.print(f"planner: {planned['mode']} ({meaning})")
    if planned["reason"]:
        console.print(escape(planned["reason"]))
    for decided in planned["decisions"][:_SHOWN_DECISIONS]:
        console.print(escape(_described(decided)))
    if planned["decisions"] and (figures := planned["decisions"][0]["decision"].get("figures")):
        table = Table("figure", "value", box=SIMPLE_HEAD)
        for name, value in figures.items():
            table.add_row(name, f"{value:g}")
        console.print(table)


def _described(decided: dict[str, Any]) -> str:
    decision = decided["decision"]
    at = time.strftime("%H:%M:%S", time.localtime(decided["at"]))
    if decision["type"] == "nothing":
        return f"{at}  {decision['reason']}"
    note = ""
    if not decided["done"]:
        refused = decided["refused"]
        note = f" (refused: {refused})" if refused else " (not made)"
    what = f"prefill={decision.get('prefill')} decode={decision.get('decode')}"
    if decision["type"] == "turn":
        what = f"{decision['worker_id']} → {decision['role']}"
    return f"{at}  {what}{note}: {decision['reason']}"


@with_options()
def nodes(at: FleetAddress = HERE, as_json: JsonOption = False) -> None:
    """Show the nodes of the cluster and their workers."""
    shown = order(at.reach(), "nodes", timeout_s=_MOVE_LIMIT_S)
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return
    gpus = any(node.get("gpus") for node in shown)
    titles = ["node", "address", "state", "CPUs", "free", *["GPUs", "free"] * gpus, "workers"]
    table = Table(*titles, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = column.header not in ("node", "workers")
        column.overflow = "fold"
    for node in shown:
        marks = ["head"] * node["head"] + ["closed"] * node["closed"]
        marks += [f"for {role}" for role in node["roles"]]
        numbers = ("cpus", "free_cpus", *("gpus", "free_gpus") * gpus)
        named = (escape(node["name"]), escape(node["address"]), ", ".join(marks) or "open")
        table.add_row(
            *named, *(f"{node[name]:g}" for name in numbers), ", ".join(node["workers"]) or "–"
        )
    Console().print(table)
