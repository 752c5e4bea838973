"""Table of findings from the reports and measurements of nodes. Does no I/O."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

CLOCK_LIMIT_S = 0.5
SLOW_EDGE_BYTES_S = 10e6  # below it computing a prompt is faster than any KV transfer
SLOW_EDGE_SHARE = 0.1  # of the median edge
ALIKE = ("baton", "python", "torch", "ray", "grpcio", "wire", "sums", "model")
"""Checks of a report whose values must be equal on all nodes."""


class Cell(msgspec.Struct, frozen=True):
    """Value of one check, and the problem if there is one."""

    text: str
    problem: str = ""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one node: check -> finding."""

    cells: dict[str, Cell] = {}


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Difference of a node's clock to this node's, and the uncertainty."""

    ahead_s: float
    within_s: float


class MeasuredEdge(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidth from one node to another, or the problem that prevents a transfer."""

    source: str
    target: str
    bytes_per_s: float = 0.0
    problem: str = ""


class Checkup(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of all nodes.

    Attributes:
        nodes: Names of the nodes, the head first.
        rows: Check -> node -> finding.
        edges: Source -> target -> finding.
    """

    nodes: list[str]
    rows: dict[str, dict[str, Cell]]
    edges: dict[str, dict[str, Cell]]

    @property
    def problems(self) -> list[str]:
        """Return one line for each problem."""
        problems = [
            f"{node}: {check}: {cell.problem}"
            for check, cells in self.rows.items()
            for node, cell in cells.items()
            if cell.problem
        ]
        return problems + [
            f"{source} to {target}: {cell.problem}"
            for source, cells in self.edges.items()
            for target, cell in cells.items()
            if cell.problem
        ]


def judged(
    reports: Mapping[str, NodeReport], clocks: Mapping[str, Clock], edges: Sequence[MeasuredEdge]
) -> Checkup:
    """Return the table of findings, with problems that only show in comparison added.

    It has the order of the reports.
    """
    checks = dict.fromkeys(check for report in reports.values() for check in report.cells)
    rows = {
        check: {n: r.cells[check] for n, r in reports.items() if check in r.cells}
        for check in checks
    }
    for check in ALIKE:
        if check in rows:
            rows[check] = _alike(rows[check])
    rows["clock"] = {node: _clock(clock) for node, clock in clocks.items()}
    return Checkup(nodes=list(reports), rows=rows, edges=_edges(edges))


def _alike(cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """Mark the values that differ from the majority, or from the first node without one."""
    counts = Counter(cell.text for cell in cells.values() if not cell.problem)
    if len(counts) < 2:
        return dict(cells)
    usual, number = counts.most_common(1)[0]
    others = f"{number} other nodes" if number > 1 else "the first node"
    return {
        node: cell
        if cell.problem or cell.text == usual
        else Cell(cell.text, f"{cell.text} differs from {others}: {usual}")
        for node, cell in cells.items()
    }


def _clock(clock: Clock) -> Cell:
    text = f"{clock.ahead_s:+.3f} s"
    if abs(clock.ahead_s) - clock.within_s <= CLOCK_LIMIT_S:
        return Cell(text)
    return Cell(text, f"{clock.ahead_s:+.1f} s off this node's clock: run an NTP client there")


def slow_floor(edges: Sequence[MeasuredEdge]) -> float:
    """Return the bytes per second below which an edge counts as slow."""
    rates = [edge.bytes_per_s for edge in edges if not edge.problem]
    return max(SLOW_EDGE_BYTES_S, SLOW_EDGE_SHARE * statistics.median(rates) if rates else 0.0)


def _edges(edges: Sequence[MeasuredEdge]) -> dict[str, dict[str, Cell]]:
    floor = slow_floor(edges)
    table: dict[str, dict[str, Cell]] = {}
    for edge in edges:
        text = f"{edge.bytes_per_s / 1e6:.0f} MB/s" if not edge.problem else "none"
        problem = edge.problem
        if not problem and edge.bytes_per_s < floor:
            text = f"{edge.bytes_per_s / 1e6:.1f} MB/s"
            problem = f"{text}, below {floor / 1e6:.0f} MB/s: check the link"
        table.setdefault(edge.source, {})[edge.target] = Cell(text, problem)
    return table
