"""Self-contained ``report.html`` of a lab, and its table for the terminal."""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.lab.results import LabResults, shown
from loadtest.results.page import rendered, write_whole

_HERE = Path(__file__).parent


def write_report(folder: Path, results: LabResults) -> Path:
    """Write ``report.html`` to a folder."""
    return write_whole(folder / "report.html", report(results).encode())


def report(results: LabResults) -> str:
    """Return the page: question, findings, plots, table, set-up."""
    plots = msgspec.to_builtins(results.findings.plots)
    return rendered(_HERE, plots, {"shown": shown}, results=results, findings=results.findings)


def show(console: Console, results: LabResults) -> None:
    """Print the table and the findings."""
    findings = results.findings
    if results.emulated:
        console.print(
            f"[bold yellow]EMULATED WORKERS: no model ran: timing model {results.emulated}[/]"
        )
    if findings.left_out:
        console.print(
            f"[bold yellow]PARTIAL: interrupted, {findings.left_out} points are missing[/]"
        )
    table = Table(*map(escape, findings.columns), title=escape(results.question))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in findings.rows:
        table.add_row(*(escape(shown(cell)) for cell in row))
    console.print(table)
    for note in findings.notes:
        console.print(f"[dim]{escape(note)}[/]")
    console.print(f"[bold]{escape(findings.sentence)}[/]")
