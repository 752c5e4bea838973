"""Admin commands for a running fleet: `baton drain`, `restart`, `scale` and `nodes`."""

import json
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleet.audit.local import audit_here
from fleet.cli.common import FleetOption, fail, running_fleet, show_error
from fleet.cli.reach import KeyOption, UrlOption, order, reach
from fleet.local.state import FleetState, audit_file
from loadtest.simulator.cli import replay
from loadtest.simulator.simulation import Setup
from router.request import Slo

_MOVE_LIMIT_S = 15.0
_SHOWN_DECISIONS = 8


def drain(
    worker: Annotated[str | None, typer.Argument(help="Worker id, such as worker-1.")] = None,
    node: Annotated[
        str | None, typer.Option(help="Name or address of a node to close for workers.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Reopen the node.")] = False,
    fleet: FleetOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
) -> None:
    """Stop one worker once its requests have ended, or move all workers off a node.

    `baton restart WORKER` starts a drained worker again. A node's workers move to other nodes one
    after another; `baton drain --node NODE --undo` reopens the node.
    """
    if (worker is None) == (node is None) or (undo and node is None):
        fail("use either `baton drain WORKER` or `baton drain --node NODE [--undo]`")
    place = reach(fleet, url, api_key)
    if worker is not None:
        order(place, "drain", [worker])
        typer.echo(f"{worker}: draining (`baton status`)")
        return
    verb = "open" if undo else "close"
    moving = order(place, verb, arguments={"node": str(node)}, timeout_s=_MOVE_LIMIT_S)
    what = f"moving {', '.join(moving)}" if moving else "it has no workers"
    typer.echo(f"{node}: reopened" if undo else f"{node}: closed; {what} (`baton nodes`)")


def restart(
    worker: Annotated[
        str | None, typer.Argument(help="Worker id, or `routers`. Default: all workers.")
    ] = None,
    fleet: FleetOption = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="Restart one after another, each drained first.")
    ] = False,
    move: Annotated[bool, typer.Option("--move", help="Move each worker to another node.")] = False,
    url: UrlOption = None,
    api_key: KeyOption = "",
) -> None:
    """Restart workers at once, or with --rolling one after another without losing a request.

    Routers (`baton restart routers`, on their host) are always replaced one after another: the
    successor serves before the old router stops accepting, and the old one finishes its responses.
    """
    if worker in ("router", "routers"):
        _restart_routers(running_fleet(fleet))
        return
    workers = [worker] if worker else []
    place = reach(fleet, url, api_key)
    order(place, "roll" if rolling else "restart", workers, {"move": move})
    typer.echo(f"{worker or 'all workers'}: restarting{' one by one' if rolling else ''}")


def _restart_routers(state: FleetState) -> None:
    supervisor = state.supervisor.find()
    if supervisor is None:
        fail(f"{state.name} is not running")
    supervisor.send_signal(signal.SIGUSR2)
    audit_here(audit_file(state.name), "restart", "routers", say=show_error)
    typer.echo("routers: restarting one by one")


def scale(
    sizes: Annotated[
        list[str], typer.Argument(help="prefill=N, decode=N, auto or hold", metavar="POOL=N...")
    ],
    fleet: FleetOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
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
        order(reach(fleet, url, api_key), "scale", arguments={"roles": sizes[0]})
        typer.echo(f"roles: {sizes[0]} (`baton plan`)")
        return
    for size in sizes:
        role, _, count = size.partition("=")
        if role not in ("prefill", "decode") or not count.isdigit():
            fail(f"{size}: use prefill=N and decode=N, or auto, or hold")
        arguments[role] = int(count)
    place = reach(fleet, url, api_key)
    answer = order(place, "scale", arguments=arguments, timeout_s=_MOVE_LIMIT_S) or {}
    for worker_id, role in answer.get("turned", {}).items():
        typer.echo(f"{worker_id}: {role} from now on")
    if behind := answer.get("routers_behind"):
        fail(f"routers that do not follow yet: {', '.join(behind)} (`baton status`)")
    typer.echo(f"{', '.join(sizes)}: scaling (`baton status`)")


def plan(
    fleet: FleetOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the response of /fleet/planner.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--replay", help="Simulate this trace instead: Mooncake JSONL or Azure CSV."),
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers at the start (replay).")] = 4,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers at the start (replay).")] = 4,
    slo_ttft_s: Annotated[float, typer.Option(min=0.001, help="slo.ttft_s (replay).")] = 10.0,
    slo_itl_s: Annotated[float, typer.Option(min=0.0001, help="slo.itl_s (replay).")] = 0.05,
    speed: Annotated[
        float, typer.Option(min=0.001, help="Divisor of the gaps between arrivals (replay).")
    ] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per worker (replay).")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=1024, help="Pool size (replay).")] = 2_050_048,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N requests (replay).")
    ] = None,
) -> None:
    """Show what the planner does, or would do, and why.

    `baton scale auto` lets it act. With --replay no fleet is needed: a trace is simulated with the
    planner and with the fixed split. `baton simulate TRACE --plan auto` has more options.
    """
    if trace is not None:
        setup = Setup(
            prefill_workers=prefill,
            decode_workers=decode,
            slo=Slo(ttft_s=slo_ttft_s, itl_s=slo_itl_s),
            speed=speed,
            max_batch_requests=batch,
            prefill_kv_tokens=kv_tokens,
            decode_kv_tokens=kv_tokens,
        )
        replay(trace, setup, limit)
        return
    found = order(reach(fleet, url, api_key), "plan")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console()
    meaning = "it acts" if found["mode"] == "auto" else "it only decides"
    console.print(f"planner: {found['mode']} ({meaning})")
    if found["reason"]:
        console.print(escape(found["reason"]))
    for decided in found["decisions"][:_SHOWN_DECISIONS]:
        console.print(escape(_described(decided)))
    if found["decisions"] and (figures := found["decisions"][0]["decision"].get("figures")):
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


def nodes(fleet: FleetOption = None, url: UrlOption = None, api_key: KeyOption = "") -> None:
    """Show the nodes of the cluster and their workers."""
    found = order(reach(fleet, url, api_key), "nodes", timeout_s=_MOVE_LIMIT_S)
    table = Table("node", "address", "state", "CPUs", "free", "workers")
    for node in found:
        marks = ["head"] * node["head"] + ["closed"] * node["closed"]
        marks += [f"for {role}" for role in node["roles"]]
        cpus = (f"{node['cpus']:g}", f"{node['free_cpus']:g}")
        named = (escape(node["name"]), escape(node["address"]), ", ".join(marks) or "open")
        table.add_row(*named, *cpus, ", ".join(node["workers"]) or "–")
    Console().print(table)
