"""What a lab has found, as it stands in ``results.json``."""

from pathlib import Path
from typing import Literal

import msgspec

from loadtest.results.page import write_whole

Cell = str | int | float | None


class Series(msgspec.Struct, frozen=True):
    """One line of a plot; None where it has no value."""

    name: str
    y: list[float | None]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """Lines over one axis.

    Attributes:
        x: Where the points are; where these are no numbers, ``labels`` stand at 0, 1, 2 …
    """

    title: str
    x_label: str
    y_label: str
    x: list[float]
    labels: list[str] = []
    series: list[Series]
    caption: str = ""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What one lab measured.

    Attributes:
        parameters: Of the set-up.
        columns: Heads of the table.
        rows: Its rows, as measured; shown with three digits.
        sentence: What was found, in one.
        notes: What a reader must know to believe it.
    """

    parameters: dict[str, Cell]
    columns: list[str]
    rows: list[list[Cell]]
    plots: list[Plot]
    sentence: str
    notes: list[str] = []


class LabResults(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one lab."""

    version: Literal[1] = 1
    lab: str
    question: str
    command: str
    created: str  # ISO 8601, UTC
    machine: str
    load_average: float  # of the machine at the begin, over a minute: others may work on it
    subject: str  # model or URL
    emulated: str = ""  # the timing model, where no model ran
    quick: bool
    findings: Findings


def shown(value: Cell) -> str:
    """A cell as people read it."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def write_results(folder: Path, results: LabResults) -> Path:
    """Write ``results.json``, whole or not at all."""
    content = msgspec.json.format(msgspec.json.encode(results), indent=1)
    return write_whole(folder / "results.json", content)
