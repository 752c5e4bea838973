"""Results of a lab, in the format of ``results.json``."""

from pathlib import Path
from typing import Literal

import msgspec

from loadtest.results.page import write_whole

Cell = str | int | float | None


class Series(msgspec.Struct, frozen=True):
    """Line of a plot; None for missing values."""

    name: str
    y: list[float | None]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """Lines over one axis; for categories, ``labels`` belong to the points 0, 1, 2 of ``x``."""

    title: str
    x_label: str
    y_label: str
    x: list[float]
    labels: list[str] = []
    series: list[Series]
    caption: str = ""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a lab, with parameters of the set-up."""

    parameters: dict[str, Cell]
    columns: list[str]  # column heads of the table
    rows: list[list[Cell]]  # rows of the table, unrounded
    plots: list[Plot]
    sentence: str  # conclusion in one sentence
    notes: list[str] = []  # conditions of the measurement
    left_out: int = 0  # number of points that Ctrl-C left out


class LabResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run of a lab."""

    version: Literal[1] = 1
    lab: str
    question: str
    command: str
    created: str  # ISO 8601, UTC
    machine: str
    load_average: float  # of the machine over the minute before: others may use it
    subject: str  # model or URL
    emulated: str = ""  # timing model of emulated workers
    quick: bool
    findings: Findings


def shown(value: Cell) -> str:
    """Format a cell for people."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def write_results(folder: Path, results: LabResults) -> Path:
    """Write ``results.json`` to a folder, atomically."""
    content = msgspec.json.format(msgspec.json.encode(results), indent=1)
    return write_whole(folder / "results.json", content)
