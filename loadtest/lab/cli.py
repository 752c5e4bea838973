"""`baton lab`: list the labs, or run one and leave its results and its report.

``fleet/cli/main.py`` gives the context a function that finds the local fleet, as for
``baton loadtest``: nothing here imports ``fleet``.
"""

import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.config.fleet_file import DEFAULT_MODEL
from loadtest.client.server import Server, ServerError
from loadtest.commands.options import FindFleet, fail
from loadtest.lab.places import PlaceError, fleet_of, in_own_process, machine
from loadtest.lab.report import show, write_report
from loadtest.lab.results import LabResults, write_results
from loadtest.lab.table import LABS, Lab, LabContext


def lab(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which; without one they are listed.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of results.json and report.html. [lab-NAME]")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer points: under two minutes on two cores.")
    ] = False,
    url: Annotated[
        str, typer.Option(help="Router of a fleet to ask. Default: the local fleet.")
    ] = "",
    fleet: Annotated[
        Path | None, typer.Option(help="Fleet file to start a fleet of, for this lab only.")
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="An operator's, where there are keys.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Model reference, for labs that run an engine of their own.")
    ] = DEFAULT_MODEL,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of that engine. Default: the cores, 2 at most.")
    ] = None,
) -> None:
    """Answer one of the questions that operators ask, with a table and a plot.

    Example: `baton lab chunks --quick --out /tmp/chunks`.
    """
    if name is None:
        _list()
        return
    if name not in LABS:
        fail(f"no lab {name!r}; there are: {', '.join(LABS)}")
    found = LABS[name]
    context = LabContext(
        quick=quick,
        model=model,
        threads=threads or min(os.cpu_count() or 1, 2),
        api_key=api_key,
    )
    try:
        results = _run(found, context, url, fleet, ctx.obj)
    except (PlaceError, ServerError) as error:
        fail(str(error))
    console = Console()
    show(console, results)
    folder = out or Path(f"lab-{name}")
    written = (write_results(folder, results), write_report(folder, results))
    for file in written:
        Console(soft_wrap=True, highlight=False).print(escape(str(file)))


def _list() -> None:
    table = Table("lab", "question", "needs", box=None)
    for each in LABS.values():
        table.add_row(each.name, each.question, "a fleet" if each.needs == "fleet" else "–")
    Console().print(table)


def _run(
    lab: Lab, context: LabContext, url: str, fleet: Path | None, find_fleet: FindFleet | None
) -> LabResults:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    load = os.getloadavg()[0]
    emulated = ""
    if lab.needs == "engine":
        subject = f"{context.model}, {context.threads} threads"
        findings = in_own_process(lab.name, context)
    else:
        with fleet_of(url, fleet, find_fleet, context) as asked:
            with Server(asked.url, asked.api_key) as server:
                emulated = server.emulated()
                subject = f"{server.first_model()} at {asked.url}"
            findings = lab.run(asked)
    return LabResults(
        lab=lab.name,
        question=lab.question,
        command=_typed(),
        created=created,
        machine=machine(),
        load_average=load,
        subject=subject,
        emulated=emulated,
        quick=context.quick,
        findings=findings,
    )


def _typed() -> str:
    """The command line without its secret."""
    shown: list[str] = []
    for argument in sys.argv[1:]:
        hidden = bool(shown) and shown[-1] == "--api-key"
        secret = argument.startswith("--api-key=")
        shown.append("…" if hidden else "--api-key=…" if secret else argument)
    return shlex.join(["baton", *shown])
