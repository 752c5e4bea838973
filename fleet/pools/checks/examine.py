"""Coordinator of `baton doctor --address`: starts a probe on each node and collects reports."""

import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.config.fleet_file import FleetConfig
from fleet.pools.checks.findings import (
    Cell,
    Checkup,
    Clock,
    MeasuredEdge,
    NodeReport,
    judged,
    slow_floor,
)
from fleet.pools.checks.probe import NodeProbe
from fleet.pools.nodes import CapacityError, Node, check_nodes
from fleet.pools.placement import cluster_nodes

_ANSWER_S = 60.0  # a node starts a process and reads the model first
_EDGE_S = 30.0
_CLOCK_LOOKS = 5
_GCS_PORT = 6379
_SECOND_LOOKS = 3
_NEIGHBOURS = 8  # maximum of edges that each node measures


def examine(config: FleetConfig) -> Checkup:
    """Check every node of the cluster that this process is connected to."""
    nodes = sorted(cluster_nodes(), key=lambda node: (not node.head, node.name))
    probes = {node.name: _start(config, node) for node in nodes}
    reports, clocks, ports = _ask_each(nodes, probes)
    there = [node for node in nodes if node.name in ports]
    edges = _measure(there, probes, ports)
    for name, cell in _raylets(there, probes).items():
        reports[name] = _with(reports[name], "ray's port", cell)
    fits = Cell("fits")
    try:
        check_nodes(config, nodes)
    except CapacityError as error:
        fits = Cell("does not fit", str(error))
    head = nodes[0].name
    reports[head] = _with(reports[head], "pools", fits)
    return judged(reports, clocks, edges)


def _start(config: FleetConfig, node: Node) -> Any:
    return (
        ray.remote(NodeProbe)
        .options(
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        .remote(config.to_json(), node.address)
    )


def _ask_each(
    nodes: list[Node], probes: dict[str, Any]
) -> tuple[dict[str, NodeReport], dict[str, Clock], dict[str, int]]:
    """Return reports, clocks and listening ports; a node that does not respond has a problem."""
    asked = {node.name: probes[node.name].report.remote() for node in nodes}
    until_s = time.monotonic() + _ANSWER_S
    reports = {}
    clocks = {}
    ports = {}
    for name, answer in asked.items():
        try:
            raw = ray.get(answer, timeout=max(1.0, until_s - time.monotonic()))
            reports[name] = msgspec.msgpack.decode(raw, type=NodeReport)
            clocks[name] = _clock(probes[name])
            ports[name] = ray.get(probes[name].listen.remote(), timeout=_EDGE_S)
        except RayError as error:
            why = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            known = reports.get(name, NodeReport())
            reports[name] = _with(known, "responds", Cell("no", f"the probe failed: {why}"))
    return reports, clocks, ports


def _clock(probe: Any) -> Clock:
    """Measure the clock by the quickest of several responses, which bounds the error."""
    best = Clock(ahead_s=0.0, within_s=float("inf"))
    for _ in range(_CLOCK_LOOKS):
        before_s = time.time()
        theirs_s: float = ray.get(probe.now.remote(), timeout=_EDGE_S)
        after_s = time.time()
        within_s = (after_s - before_s) / 2
        if within_s < best.within_s:
            best = Clock(ahead_s=theirs_s - before_s - within_s, within_s=within_s)
    return best


def _measure(
    nodes: list[Node], probes: dict[str, Any], ports: dict[str, int]
) -> list[MeasuredEdge]:
    """Measure in rounds: in each, a node sends to one other node and receives from one."""
    edges: list[MeasuredEdge] = []
    for step in range(1, min(len(nodes) - 1, _NEIGHBOURS) + 1):
        pairs = [(node, nodes[(i + step) % len(nodes)]) for i, node in enumerate(nodes)]
        asked = [(a, b, _ask_edge(probes[a.name], a, b, ports[b.name])) for a, b in pairs]
        edges += [_edge(a, b, answer) for a, b, answer in asked]
    by_name = {node.name: node for node in nodes}
    floor = slow_floor(edges)
    for index, edge in enumerate(edges):  # measure slow edges again, one at a time
        if edge.bytes_per_s < floor:
            a = by_name[edge.source]
            b = by_name[edge.target]
            for _ in range(_SECOND_LOOKS):
                again = _edge(a, b, _ask_edge(probes[a.name], a, b, ports[b.name]))
                edges[index] = max(edges[index], again, key=lambda found: found.bytes_per_s)
    return edges


def _ask_edge(probe: Any, source: Node, target: Node, port: int) -> Any:
    return probe.measure.remote(source.name, target.name, target.address, port)


def _edge(source: Node, target: Node, answer: Any) -> MeasuredEdge:
    try:
        return msgspec.msgpack.decode(ray.get(answer, timeout=_EDGE_S), type=MeasuredEdge)
    except RayError as error:
        return MeasuredEdge(source=source.name, target=target.name, problem=str(error).strip())


def _raylets(nodes: list[Node], probes: dict[str, Any]) -> dict[str, Cell]:
    """Check that the raylets, and the head's GCS, can be reached from another node."""
    cells = {}
    for index, node in enumerate(nodes):
        other = probes[nodes[index - 1].name]
        ports = [node.port, *([_gcs_port()] if node.head else [])]
        answers = [other.reaches.remote(node.address, port) for port in ports]
        problems = [why for why in ray.get(answers, timeout=_EDGE_S) if why]
        problem = f"from {nodes[index - 1].name}: {'; '.join(problems)}" if problems else ""
        cells[node.name] = Cell(", ".join(map(str, ports)), problem)
    return cells


def _gcs_port() -> int:
    _, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    return int(port) if port.isdigit() else _GCS_PORT


def _with(report: NodeReport, name: str, cell: Cell) -> NodeReport:
    return NodeReport(cells={**report.cells, name: cell})
