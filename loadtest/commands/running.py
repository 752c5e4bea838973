"""What every command does with a plan: run it under a progress bar, write the folder, show it."""

from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.client.processes import ClientFailedError
from loadtest.client.records import RequestRecord
from loadtest.client.server import ServerError
from loadtest.commands.options import fail
from loadtest.results.files import Results, ResultsError, write_results
from loadtest.results.report import write_report
from loadtest.results.tables import show
from loadtest.run import RunOptions, run_plan
from loadtest.workloads.plan import Plan

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell's."""


def run(
    plan: Plan, options: RunOptions, folder: Path | None, *, label: str, resume: bool = False
) -> Results:
    """Run a plan with a progress bar on standard error.

    Args:
        plan: What to send.
        options: How.
        folder: Where an interrupted run keeps its records; None: nowhere.
        label: At the head of the bar.
        resume: Whether the folder's interrupted run goes on.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]} failed"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task(escape(label), total=plan.request_count, failed=0)
        failed = 0

        def ended(record: RequestRecord) -> None:
            nonlocal failed
            failed += record.end not in ("ok", "aborted")
            progress.update(bar, advance=1, failed=failed)

        try:
            return run_plan(plan, options, folder=folder, resume=resume, on_record=ended)
        except (ClientFailedError, ServerError, ResultsError) as error:
            progress.stop()
            fail(str(error))


def run_and_show(plan: Plan, options: RunOptions, out: Path, *, resume: bool) -> None:
    """Run, write, print; the exit code is 130 where the run was interrupted."""
    results = run(plan, options, out, label=plan.name, resume=resume)
    show(Console(), results)
    leave(results, out)
    if not results.complete:
        raise typer.Exit(INTERRUPTED)


def leave(results: Results, out: Path) -> None:
    """Write ``results.json`` and ``report.html`` and say where they are."""
    file = write_results(out, results)
    report = write_report(out, results)
    Console(soft_wrap=True, highlight=False).print(f"{escape(str(file))}\n{escape(str(report))}")
