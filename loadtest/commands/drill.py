"""`baton loadtest drill`: inject faults into the local fleet and check its responses."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from loadtest.client.processes import ClientFailedError
from loadtest.commands import options as o
from loadtest.commands.option_groups import with_options
from loadtest.commands.running import INTERRUPTED
from loadtest.drill.drills import DRILLS
from loadtest.drill.fleet import DrillError
from loadtest.drill.phases import PhaseFigures
from loadtest.drill.runner import DrillOptions, DrillRunner
from loadtest.drill.verdict import DrillOutcome
from loadtest.results.files import write_whole

_ALL = "all"
_FILE = "drill.json"


class DrillsResult(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of drill.json: the verdicts of the drills that have ended.

    Attributes:
        interrupted: Whether Ctrl-C or a signal ended the drills before all that were asked for.
        asked: Names of the drills that were asked for.
    """

    interrupted: bool
    asked: list[str]
    drills: list[DrillOutcome]


@dataclass(frozen=True, kw_only=True)
class _DrillLoad:
    rate: Annotated[
        float, typer.Option(help="Requests per second that the fleet serves easily.")
    ] = 1.0
    holds: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="overload: requests per second that a fleet with slo holds. Default: search.",
        ),
    ] = None
    mode: Annotated[
        Literal["auto", "disaggregated", "colocated"],
        typer.Option(help="Header x-baton-mode of every request."),
    ] = "disaggregated"
    timeout_s: Annotated[
        float, typer.Option(min=1, help="Seconds after which a request counts as hung.")
    ] = 120.0
    api_key: o.ApiKey = ""
    seed: o.Seed = 0


@with_options()
def drill(
    ctx: typer.Context,
    name: Annotated[
        list[str],
        typer.Argument(
            help=f"One or more of {', '.join(DRILLS)}; or {_ALL}, which is all but bad-canary."
        ),
    ],
    load: _DrillLoad,
    out: Annotated[Path | None, typer.Option(help="Folder for drill.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as in drill.json.")] = False,
) -> None:
    """Inject faults into the fleet on this machine, one at a time, and judge the outcome.

    Checks: no wrong tokens (compared with greedy responses taken before), no hangs, one typed end
    per request, no leaked blocks, and the seconds until requests succeed again. In a fleet with
    latency limits (slo), overload checks its goodput at 1.5 and 3 times the rate that it holds. The
    exit code is 1 if a check fails.
    """
    names = _asked(name)
    if out is not None and (out / _FILE).exists():
        o.fail(f"{out} has the results of drills: give another --out, or remove it")
    local = ctx.obj() if ctx.obj is not None else None
    if local is None:
        o.fail("no single fleet is running here: start one with `baton up`")
    choices = o.Choices(
        url=local.url,
        api_key=load.api_key,
        headers=[f"x-baton-mode: {load.mode}"],
        timeout_s=load.timeout_s,
    )
    server = o.run_options(choices, None).server
    runner = DrillRunner(
        DrillOptions(server=server, local=local, rate=load.rate, holds=load.holds, seed=load.seed)
    )
    try:
        asyncio.run(runner.check(names))
    except DrillError as error:
        o.fail(str(error))
    verdicts, interrupted = _run_all(runner, names)
    result = DrillsResult(interrupted=interrupted, asked=names, drills=verdicts)
    written = msgspec.json.format(msgspec.json.encode(result))
    if out is not None and verdicts:  # else the next run may use the same folder
        write_whole(out / _FILE, written)
    passed = all(v.passed for v in verdicts) and len(verdicts) == len(names)
    code = INTERRUPTED if interrupted else 0 if passed else 1
    if as_json:
        typer.echo(written)
        raise typer.Exit(code)
    _show(verdicts)
    raise typer.Exit(code)


def _asked(names: list[str]) -> list[str]:
    if names == [_ALL]:
        # A drill for which the fleet needs another model runs only by its name.
        return [name for name, drill in DRILLS.items() if not drill.wrong_model]
    if unknown := [name for name in names if name not in DRILLS]:
        o.fail(f"unknown drill {unknown[0]!r}: use {', '.join(DRILLS)} or {_ALL}")
    return names


def _show(verdicts: list[DrillOutcome]) -> None:
    if verdicts:
        Console().print(_table(verdicts))
    for verdict in verdicts:
        if verdict.phases:
            Console().print(_phase_table(verdict.phases))
        for fault in verdict.faults:
            Console(soft_wrap=True).print(f"[red]{verdict.drill}[/]: {escape(fault)}")


def _run_all(runner: DrillRunner, names: list[str]) -> tuple[list[DrillOutcome], bool]:
    """Return the verdicts, and whether Ctrl-C ended the drills early."""
    verdicts: list[DrillOutcome] = []
    interrupted = False

    async def run_all() -> None:
        o.echo("golden responses …")
        await runner.take_golden_answers()
        for number, name in enumerate(names, 1):
            o.echo(f"{number} of {len(names)}, {name}: {DRILLS[name].title} …")
            try:
                verdicts.append(await runner.run(name))
            except DrillError as error:  # other drills may still be possible
                o.echo(f"[bold red]{name} was not run:[/] {escape(str(error))}")

    try:
        asyncio.run(run_all())
    except (DrillError, ClientFailedError) as error:
        o.echo(f"[bold red]error[/] {escape(str(error))}")
    except KeyboardInterrupt:
        o.echo(f"PARTIAL: interrupted, {len(verdicts)} of {len(names)} drills have ended")
        interrupted = True
    return verdicts, interrupted


def _table(verdicts: list[DrillOutcome]) -> Table:
    figures = (Column(name, no_wrap=True) for name in ("drill", "verdict", "recovered", "compared"))
    ended = Column("fault and ends", overflow="fold")
    table = Table(*figures, ended, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for verdict in verdicts:
        recovered = "–" if verdict.recovered_s is None else f"{verdict.recovered_s:.1f} s"
        good = {end: n for end, n in verdict.ends.items() if end in ("ok", "aborted")}
        ends = ", ".join(f"{n} × {end}" for end, n in sorted({**good, **verdict.errors}.items()))
        mark = "[green]pass[/]" if verdict.passed else "[bold red]FAIL[/]"
        what = escape(f"{verdict.what_was_done}\n{ends}")
        table.add_row(verdict.drill, mark, recovered, str(verdict.compared), what)
    return table


def _phase_table(phases: list[PhaseFigures]) -> Table:
    names = ("phase", "requests/s", "good/s", "sent", "refused", "late", "failed")
    table = Table(*names, "good of admitted")
    for phase in phases:
        counts = (phase.sent, phase.refused, phase.late, phase.failed)
        rates = (f"{phase.rate:.2f}", f"{phase.good_per_s:.2f}")
        table.add_row(
            phase.name, *rates, *map(str, counts), f"{100 * phase.good_of_admitted:.1f} %"
        )
    return table
