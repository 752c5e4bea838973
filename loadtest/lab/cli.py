"""`baton lab`: lists the labs, or runs one and writes its results and report.

As for ``baton loadtest``, ``fleet/cli/main.py`` sets the context to a function that finds the local
fleet, since nothing here imports ``fleet``.
"""

import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.client.server import Server, ServerError
from loadtest.commands.option_groups import with_options
from loadtest.commands.options import FindFleet, check_out, echo, fail, typed_command
from loadtest.commands.running import INTERRUPTED, ended_by_signals
from loadtest.lab.places import LabError, emulated_fleet, fleet_of, machine, run_in_process
from loadtest.lab.report import show, write_report
from loadtest.lab.results import LabResults, write_results
from loadtest.lab.table import LABS, Lab, LabContext


@ended_by_signals()
@with_options()
def lab(
    ctx: typer.Context,
    context: LabContext,
    name: Annotated[str | None, typer.Argument(help="Lab to run; omit to list all.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json and report.html. [lab-NAME]")
    ] = None,
    fleet: Annotated[
        Path | None, typer.Option(help="Fleet file of a fleet to start for this lab only.")
    ] = None,
) -> None:
    """Run an experiment on a common question of operators, with a table and a plot.

    Example: `baton lab chunks --quick --out /tmp/chunks`. Ctrl-C, SIGTERM and SIGHUP keep the
    points measured so far (exit code 130).
    """
    if name is None:
        _list()
        return
    if name not in LABS:
        fail(f"unknown lab {name!r}; use one of {', '.join(LABS)}")
    folder = out or Path(f"lab-{name}")
    check_out(folder)
    context = replace(context, threads=context.threads or min(os.cpu_count() or 1, 2))
    try:
        results = _run(LABS[name], context, fleet, ctx.obj)
    except (LabError, ServerError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        echo("interrupted: too few points are measured, nothing was written")
        raise typer.Exit(INTERRUPTED) from None
    _keep(results, folder)
    if results.findings.left_out:
        raise typer.Exit(INTERRUPTED)


def _keep(results: LabResults, folder: Path) -> None:
    show(Console(), results)
    for file in (write_results(folder, results), write_report(folder, results)):
        Console(soft_wrap=True, highlight=False).print(escape(str(file)))


def _list() -> None:
    table = Table("lab", "question", "needs", box=None)
    for each in LABS.values():
        table.add_row(each.name, each.question, "a fleet" if each.needs == "fleet" else "–")
    Console().print(table)


def _run(
    lab: Lab, context: LabContext, fleet: Path | None, find_fleet: FindFleet | None
) -> LabResults:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    load = os.getloadavg()[0]
    emulated = ""
    if lab.needs == "engine":
        subject = f"{context.model}, {context.threads} threads"
        findings = run_in_process(lab.name, context)
    else:
        given = bool(context.url) or fleet is not None
        own = lab.own_fleet and not given
        place = (
            emulated_fleet(context, lab.timings) if own else fleet_of(context, fleet, find_fleet)
        )
        with place as target:
            with Server(target.url, target.api_key) as server:
                emulated = server.emulated()
                subject = f"{server.first_model()} at {target.url}"
            findings = lab.run(target)
    return LabResults(
        lab=lab.name,
        question=lab.question,
        command=typed_command(sys.argv[1:]),
        created=created,
        machine=machine(),
        load_average=load,
        subject=subject,
        emulated=emulated,
        quick=context.quick,
        findings=findings,
    )
