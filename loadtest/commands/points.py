"""Points of a lab: measured in turn until Ctrl-C, with the progress on standard error."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from loadtest.commands.options import echo

Point = TypeVar("Point")
Row = TypeVar("Row")


class MeasuredPoints(list[Row], Generic[Row]):
    """Results of the points of a lab; ``left_out`` is the number of points not measured."""

    left_out: int = 0


def measured(
    points: Sequence[Point], measure: Callable[[Point], Row], *, at_least: int = 1
) -> MeasuredPoints[Row]:
    """Measure points in turn. Ctrl-C ends this early, and leaves out the point that is measured.

    Raises:
        KeyboardInterrupt: Ctrl-C came before ``at_least`` points were measured.
    """
    rows: MeasuredPoints[Row] = MeasuredPoints()
    try:
        for number, point in enumerate(points, 1):
            echo(f"[dim]point {number} of {len(points)}[/]")
            rows.append(measure(point))
    except KeyboardInterrupt:
        if len(rows) < at_least:
            raise
        rows.left_out = len(points) - len(rows)
        echo(f"[dim]interrupted: {len(rows)} of {len(points)} points are measured[/]")
    return rows
