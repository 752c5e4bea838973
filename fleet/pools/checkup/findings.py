"""What nodes said of themselves and measured of each other, as a table of findings. Does no I/O."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

CLOCK_LIMIT_S = 0.5
SLOW_EDGE_BYTES_S = 10e6  # under it a hand-off of any length costs more than to compute it
SLOW_EDGE_SHARE = 0.1  # of the median edge
ALIKE = ("baton", "python", "torch", "ray", "grpcio", "wire", "sums", "model")
"""What all nodes must have alike: each one's value stands in its report under this name."""


class Cell(msgspec.Struct, frozen=True):
    """One finding: what is there, and what is wrong with it (empty: nothing)."""

    text: str
    problem: str = ""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself: check -> finding."""

    cells: dict[str, Cell] = {}


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """How far a node's clock is ahead of this one's, and how exactly that is known."""

    ahead_s: float
    within_s: float


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """What came through from one node to another; ``problem``: why nothing did."""

    source: str
    target: str
    bytes_per_s: float = 0.0
    problem: str = ""


class Checkup(msgspec.Struct, frozen=True, kw_only=True):
    """All of it.

    Attributes:
        nodes: Their names, the head first.
        rows: Check -> node -> finding.
        edges: Source -> target -> finding.
    """

    nodes: list[str]
    rows: dict[str, dict[str, Cell]]
    edges: dict[str, dict[str, Cell]]

    @property
    def problems(self) -> list[str]:
        """A line for each thing that is wrong."""
        found = [
            f"{node}: {check}: {cell.problem}"
            for check, cells in self.rows.items()
            for node, cell in cells.items()
            if cell.problem
        ]
        return found + [
            f"{source} to {target}: {cell.problem}"
            for source, cells in self.edges.items()
            for target, cell in cells.items()
            if cell.problem
        ]


def judged(
    reports: Mapping[str, NodeReport], clocks: Mapping[str, Clock], edges: Sequence[Edge]
) -> Checkup:
    """The table, with what is wrong marked: also what is only wrong beside the others.

    Args:
        reports: By node, in the order in which they are shown.
        clocks: By node; absent: not measured.
        edges: Those that were measured.
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
    """Those that differ from most are marked; without a majority, from the first."""
    counts = Counter(cell.text for cell in cells.values() if not cell.problem)
    if len(counts) < 2:
        return dict(cells)
    usual, number = counts.most_common(1)[0]
    whom = f"{number} others have" if number > 1 else "the head, or the first node, has"
    return {
        node: cell
        if cell.problem or cell.text == usual
        else Cell(cell.text, f"{cell.text} is not what {whom}: {usual}")
        for node, cell in cells.items()
    }


def _clock(clock: Clock) -> Cell:
    text = f"{clock.ahead_s:+.3f} s"
    if abs(clock.ahead_s) - clock.within_s <= CLOCK_LIMIT_S:
        return Cell(text)
    return Cell(text, f"{clock.ahead_s:+.1f} s beside this node's: run an NTP client there")


def slow_floor(edges: Sequence[Edge]) -> float:
    """Bytes per second under which one of these edges is slow."""
    rates = [edge.bytes_per_s for edge in edges if not edge.problem]
    return max(SLOW_EDGE_BYTES_S, SLOW_EDGE_SHARE * statistics.median(rates) if rates else 0.0)


def _edges(edges: Sequence[Edge]) -> dict[str, dict[str, Cell]]:
    floor = slow_floor(edges)
    table: dict[str, dict[str, Cell]] = {}
    for edge in edges:
        text = f"{edge.bytes_per_s / 1e6:.0f} MB/s" if not edge.problem else "none"
        problem = edge.problem
        if not problem and edge.bytes_per_s < floor:
            text = f"{edge.bytes_per_s / 1e6:.1f} MB/s"
            problem = f"{text}, under {floor / 1e6:.0f} MB/s: look at the link"
        table.setdefault(edge.source, {})[edge.target] = Cell(text, problem)
    return table
