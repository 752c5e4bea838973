"""Steps of every command that runs a plan: signals, progress bar, results folder, summary."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.client.processes import ClientFailedError
from loadtest.client.records import CallRecord
from loadtest.client.server import ServerError
from loadtest.commands.options import fail
from loadtest.results.files import Results, ResultsError, check_unused, write_results
from loadtest.results.report import write_report
from loadtest.results.tables import show
from loadtest.run import RunOptions, run_plan
from loadtest.workloads.plan import Plan

INTERRUPTED = 130
"""Exit code after Ctrl-C, SIGTERM or SIGHUP: what was measured until then is kept."""

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let the first SIGTERM or SIGHUP have the effect of Ctrl-C; later ones have none.

    A SIGHUP that is ignored stays ignored, so that a command under `nohup` outlives its terminal.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, lambda *_: None)  # `timeout` and systemd send two
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    handlers = {each: signal.getsignal(each) for each in END_SIGNALS}
    before = {each: handler for each, handler in handlers.items() if handler is not signal.SIG_IGN}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def run(
    plan: Plan, options: RunOptions, folder: Path | None, *, label: str, resume: bool = False
) -> Results:
    """Run a plan with a progress bar on standard error. ``folder`` keeps an interrupted run."""
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

        def ended(record: CallRecord) -> None:
            nonlocal failed
            failed += record.end not in ("ok", "aborted")
            progress.update(bar, advance=1, failed=failed)

        try:
            if folder is not None:
                check_unused(folder, resume=resume)
            return run_plan(plan, options, folder=folder, resume=resume, on_record=ended)
        except (ClientFailedError, ServerError, ResultsError) as error:
            progress.stop()
            fail(str(error))


def run_and_show(plan: Plan, options: RunOptions, out: Path, *, resume: bool) -> None:
    """Run a plan, write and print its results; see `show_and_write` for exit codes."""
    show_and_write(run(plan, options, out, label=plan.name, resume=resume), out)


def show_and_write(results: Results, out: Path) -> None:
    """Print and write results; exit with 130 if interrupted, with 1 if no request succeeded."""
    show(Console(), results)
    write_folder(results, out)
    if not results.complete:
        raise typer.Exit(INTERRUPTED)
    if not any(record.end in ("ok", "aborted") for record in results.records):
        fail("no request succeeded")


def write_folder(results: Results, out: Path) -> None:
    """Write ``results.json`` and ``report.html`` and print their paths."""
    file = write_results(out, results)
    report = write_report(out, results)
    Console(soft_wrap=True, highlight=False).print(f"{escape(str(file))}\n{escape(str(report))}")
