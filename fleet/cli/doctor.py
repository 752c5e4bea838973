"""`baton doctor`: check this machine, the edges of a running fleet, or all nodes of a cluster."""

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from baton.config.fleet_file import FleetConfig
from baton.wire.tls import FleetTls
from fleet.cli.common import (
    FileArgument,
    FleetOption,
    JsonOption,
    exits_on,
    fail,
    load_fleet_file,
    running_fleet,
)
from fleet.cli.doctor_edges import measure_edges
from fleet.local import state as fleet_state
from fleet.local.checks import preflight
from fleet.local.checks.attached_servers import attached_servers
from fleet.local.cluster_pools import call_cluster
from fleet.local.state import FleetState
from fleet.pools.checks.findings import Cell
from fleet.pools.cluster_call import ClusterCall
from fleet.pools.nodes import CapacityError

_LIMIT_S = 300.0
_SHOWN_NODES = 10  # in a larger cluster only nodes with findings


def doctor(
    file: FileArgument = None,
    speed: Annotated[
        bool, typer.Option(help="Compare the engine's speed with plain torch (10 s).")
    ] = True,
    edges: Annotated[
        bool, typer.Option("--edges", help="Measure each edge of the running fleet instead.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster (`auto` or HOST:PORT) whose nodes are checked instead."),
    ] = None,
    fleet: FleetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: packages, model, Redis, port, memory, limits, speed. Starts nothing.

    --edges measures KV hand-offs between all pairs of workers, over each of their transports.
    --address checks versions, model, Redis, ports, clock and disk of all nodes of a cluster, and
    the bandwidth between them. Exit code 1 if a check fails.
    """
    if edges:
        _show_edges(running_fleet(fleet), as_json=as_json)
        return
    _, config = load_fleet_file(file, None)
    if address is not None:
        _show_cluster(config, address, as_json=as_json)
        return
    with Console(stderr=True).status("checking this machine …"):
        findings = [*preflight.doctor(config), *attached_servers(config)]
    if speed and not config.is_attached:
        with Console(stderr=True).status("measuring the engine beside plain torch, about 10 s …"):
            findings.append(preflight.engine_speed(config))
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
        raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)
    table = Table(Column(), Column(), Column(overflow="fold"), show_header=False, box=None)
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]!![/]"
        table.add_row(mark, finding.name, escape(finding.text))
    for state in fleet_state.load_all():
        what = "is running" if state.running else "was killed; clean up with `baton down`"
        table.add_row("[blue]--[/]", "fleet", escape(f"{state.name} at {state.url} {what}"))
    Console(soft_wrap=True).print(table)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


def _show_edges(state: FleetState, *, as_json: bool) -> None:
    with exits_on(ConnectionError, ValueError):
        tls = FleetTls(state.tls) if state.tls is not None else None
        figures = asyncio.run(measure_edges(state.redis_url, state.fleet, state.fleet_token, tls))
    if as_json:
        typer.echo(json.dumps([asdict(figure) for figure in figures], indent=2))
        raise typer.Exit(0 if all(figure.bytes_per_s for figure in figures) else 1)
    names = list(dict.fromkeys(figure.transport for figure in figures))
    heads = ("from", "to", *(f"{name}, GB/s" for name in names))
    table = Table(*(Column(head, overflow="fold") for head in heads))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for figure in figures:
        rate = f"{figure.bytes_per_s / 1e9:.2f}" if figure.bytes_per_s else figure.why
        cells.setdefault((figure.prefill_id, figure.decode_id), {})[figure.transport] = rate
    for (prefill_id, decode_id), rates in cells.items():
        row = (prefill_id, decode_id, *(rates.get(name, "-") for name in names))
        table.add_row(*map(escape, row))
    Console().print(table)
    raise typer.Exit(0 if all(figure.bytes_per_s for figure in figures) else 1)


def _show_cluster(config: FleetConfig, address: str, *, as_json: bool) -> None:
    call = ClusterCall(verb="examine", address=address, config_json=config.to_json())
    with exits_on(CapacityError):
        checkup = call_cluster(call, Path(os.devnull), _LIMIT_S).checkup
    if checkup is None:
        fail("the cluster did not respond")
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(checkup), indent=2))
        raise typer.Exit(1 if checkup.problems else 0)
    console = Console(soft_wrap=True)
    wrong = {
        node for cells in checkup.rows.values() for node, cell in cells.items() if cell.problem
    }
    shown = checkup.nodes
    if len(shown) > _SHOWN_NODES:
        shown = [node for node in shown if node in wrong][:_SHOWN_NODES] or shown[:1]
        console.print(
            f"{len(checkup.nodes)} nodes, {len(wrong)} with findings; shown: {len(shown)}"
        )
    console.print(_table("", shown, checkup.rows))
    between = {source: cells for source, cells in checkup.edges.items() if source in shown}
    if between:
        console.print("bandwidth from the node of the row to the node of the column:")
        console.print(_table("from", shown, between))
    for problem in checkup.problems:
        console.print(f"[red]!![/] {escape(problem)}")
    if checkup.problems:
        console.print(f"[red]{len(checkup.problems)} findings[/] on {len(checkup.nodes)} nodes")
        raise typer.Exit(1)
    console.print(f"[green]{len(checkup.nodes)} nodes, no findings[/]")


def _table(first: str, nodes: list[str], rows: dict[str, dict[str, Cell]]) -> Table:
    table = Table(*(Column(escape(head), overflow="fold") for head in (first, *nodes)))
    for name, cells in rows.items():
        row = [_shown(cells[node]) if node in cells else "" for node in nodes]
        table.add_row(escape(name), *row)
    return table


def _shown(cell: Cell) -> str:
    return f"[red]{escape(cell.text)} !![/]" if cell.problem else escape(cell.text)
