"""``report.html`` of a lab, one file that needs nothing else; and its table on the terminal."""

import json
from importlib.resources import files
from pathlib import Path

import jinja2
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.lab.results import LabResults, shown

_HERE = Path(__file__).parent


def write_report(folder: Path, results: LabResults) -> Path:
    """Write ``report.html``."""
    file = folder / "report.html"
    scratch = file.with_suffix(".new")
    scratch.write_text(report(results), encoding="utf-8")
    scratch.replace(file)
    return file


def report(results: LabResults) -> str:
    """The page: the question, what was found, the plots, the table, how it was done."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["shown"] = shown
    vendor = files("router") / "page" / "vendor"
    plots = msgspec.to_builtins(results.findings.plots)
    return environment.get_template("report.html.jinja").render(
        results=results,
        findings=results.findings,
        style=(files("loadtest") / "results" / "report.css").read_text(encoding="utf-8"),
        uplot_js=(vendor / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        uplot_css=(vendor / "uPlot.min.css").read_text(encoding="utf-8"),
        report_js=(_HERE / "report.js").read_text(encoding="utf-8"),
        # Within a script element only `<` could end it.
        data=json.dumps(plots, separators=(",", ":")).replace("<", "\\u003c"),
    )


def show(console: Console, results: LabResults) -> None:
    """Print the table and what was found."""
    findings = results.findings
    if results.emulated:
        console.print(
            f"[bold yellow]EMULATED WORKERS: no model ran: timing model {results.emulated}[/]"
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
