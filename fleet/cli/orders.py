"""Commands to the controller of a running fleet: `drain`, `restart`, `scale` and `nodes`."""

import signal
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleet.cli.common import FleetOption, fail, running_fleet
from fleet.cli.reach import KeyOption, UrlOption, order, reach
from fleet.local.state import FleetState

_MOVE_LIMIT_S = 15.0


def drain(
    worker: Annotated[str | None, typer.Argument(help="Such as decode-0.")] = None,
    node: Annotated[
        str | None, typer.Option(help="Name or address of a node that shall take no workers.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Open the node again.")] = False,
    fleet: FleetOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
) -> None:
    """Take one worker out of traffic and stop it once its requests have ended, or empty a node.

    `baton restart WORKER` brings a worker back. The workers of a node move to others, one after
    another; `baton drain --node NODE --undo` lets it have some again.
    """
    if (worker is None) == (node is None) or (undo and node is None):
        fail("say which: `baton drain WORKER`, or `baton drain --node NODE [--undo]`")
    place = reach(fleet, url, api_key)
    if worker is not None:
        order(place, "drain", [worker])
        typer.echo(f"{worker}: draining (`baton status`)")
        return
    verb = "open" if undo else "close"
    moving = order(place, verb, arguments={"node": str(node)}, timeout_s=_MOVE_LIMIT_S)
    what = f"moving {', '.join(moving)}" if moving else "no worker has to move"
    typer.echo(f"{node}: open again" if undo else f"{node}: closed; {what} (`baton nodes`)")


def restart(
    worker: Annotated[
        str | None, typer.Argument(help="Such as decode-0, or routers; all workers if absent.")
    ] = None,
    fleet: FleetOption = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="One after another, each drained first.")
    ] = False,
    move: Annotated[
        bool, typer.Option("--move", help="Each gives up its node for another one.")
    ] = False,
    url: UrlOption = None,
    api_key: KeyOption = "",
) -> None:
    """Give workers a new life: at once, or one after another without losing a request.

    Routers (`baton restart routers`, on their host) always go one after another: the next life
    serves before the last one leaves, which finishes its answers. No connection is refused.
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
        fail(f"{state.name} does not run")
    supervisor.send_signal(signal.SIGUSR2)
    typer.echo("routers: restarting one by one")


def scale(
    sizes: Annotated[list[str], typer.Argument(help="prefill=N, decode=N", metavar="POOL=N...")],
    fleet: FleetOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
) -> None:
    """Change the sizes of the pools; those that leave are drained first.

    Example: `baton scale prefill=3 decode=5`. It holds until the fleet is stopped, or started with
    another file.
    """
    arguments: dict[str, int | str | bool] = {}
    for size in sizes:
        role, _, count = size.partition("=")
        if role not in ("prefill", "decode") or not count.isdigit():
            fail(f"{size}: say prefill=N or decode=N")
        arguments[role] = int(count)
    order(reach(fleet, url, api_key), "scale", arguments=arguments, timeout_s=_MOVE_LIMIT_S)
    typer.echo(f"{', '.join(sizes)}: on its way (`baton status`)")


def nodes(fleet: FleetOption = None, url: UrlOption = None, api_key: KeyOption = "") -> None:
    """Show the nodes of the cluster, and which workers are where."""
    found = order(reach(fleet, url, api_key), "nodes", timeout_s=_MOVE_LIMIT_S)
    table = Table("node", "address", "is", "CPUs", "free", "workers")
    for node in found:
        marks = ["head"] * node["head"] + ["closed"] * node["closed"]
        marks += [f"for {role}" for role in node["roles"]]
        cpus = (f"{node['cpus']:g}", f"{node['free_cpus']:g}")
        named = (escape(node["name"]), escape(node["address"]), ", ".join(marks) or "open")
        table.add_row(*named, *cpus, ", ".join(node["workers"]) or "–")
    Console().print(table)
