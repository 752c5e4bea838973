"""What `baton doctor --address` makes of what nodes say; ``tests/hosts`` has the nodes."""

import asyncio
import socket

import msgspec
import pytest

from fleet.pools.checks.findings import Cell, Clock, MeasuredEdge, NodeReport, judged
from fleet.pools.checks.probe import NodeProbe

FLEET = '{"pools": {"prefill": 1, "decode": 1, "engine": "emulated"}, "redis": "%s"}'


def report(**cells: str) -> NodeReport:
    return NodeReport(cells={name: Cell(text) for name, text in cells.items()})


def test_three_nodes_that_are_alike_have_no_problem() -> None:
    alike = {name: report(baton="0.1.0 (aa)", model="beef") for name in ("head", "n1", "n2")}
    clocks = {name: Clock(ahead_s=0.01, within_s=0.002) for name in alike}
    edges = [MeasuredEdge(source="n1", target="n2", bytes_per_s=9e8)]
    found = judged(alike, clocks, edges)
    assert found.problems == []
    assert found.nodes == ["head", "n1", "n2"]
    assert found.edges["n1"]["n2"].text == "900 MB/s"


def test_the_one_that_differs_is_named_and_not_the_others() -> None:
    reports = {name: report(baton="0.1.0 (aa)") for name in ("head", "n1", "n2")}
    reports["n1"] = report(baton="0.1.0 (bb)")
    (problem,) = judged(reports, {}, []).problems
    assert problem == "n1: baton: 0.1.0 (bb) differs from 2 other nodes: 0.1.0 (aa)"


def test_what_may_differ_is_no_finding() -> None:
    reports = {"head": report(memory="8 GiB, 2 cores"), "n1": report(memory="16 GiB, 4 cores")}
    assert judged(reports, {}, []).problems == []


@pytest.mark.parametrize(("ahead_s", "within_s", "wrong"), [(900, 0.1, 1), (-3, 0.1, 1), (3, 3, 0)])
def test_a_clock_is_wrong_where_that_is_certain(ahead_s: int, within_s: float, wrong: int) -> None:
    clocks = {"n1": Clock(ahead_s=ahead_s, within_s=within_s)}
    assert len(judged({"n1": report()}, clocks, []).problems) == wrong


def test_a_slow_edge_is_found_by_the_others_and_by_what_is_of_any_use() -> None:
    edges = [MeasuredEdge(source="n1", target=f"n{n}", bytes_per_s=8e8) for n in range(2, 5)]
    edges += [MeasuredEdge(source="n2", target="n1", bytes_per_s=6e7)]
    (problem,) = judged({}, {}, edges).problems
    assert problem.startswith("n2 to n1: 60.0 MB/s, below 80 MB/s")
    (problem,) = judged({}, {}, [MeasuredEdge(source="a", target="b", bytes_per_s=6e5)]).problems
    assert "0.6 MB/s" in problem
    (problem,) = judged(
        {}, {}, [MeasuredEdge(source="a", target="b", problem="b:1 refused")]
    ).problems
    assert problem == "a to b: b:1 refused"


async def test_a_probe_reports_its_node_and_measures_what_comes_through() -> None:
    probe = NodeProbe(FLEET % "redis://127.0.0.1:1/0", "127.0.0.1")
    said = msgspec.msgpack.decode(await probe.report(), type=NodeReport)
    assert not said.cells["baton"].problem and "(" in said.cells["baton"].text
    assert said.cells["wire"].text
    assert len(said.cells["model"].text) == 12
    assert "Redis" in said.cells["redis"].problem
    port = await probe.listen()
    edge = msgspec.msgpack.decode(
        await probe.measure("n1", "n2", "127.0.0.1", port), type=MeasuredEdge
    )
    assert edge.bytes_per_s > 1e7 and not edge.problem
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        closed = held.getsockname()[1]
        raw = await probe.measure("n1", "n2", "127.0.0.1", closed)
    assert "cannot connect to" in msgspec.msgpack.decode(raw, type=MeasuredEdge).problem
    assert await probe.reaches("127.0.0.1", port) == ""
    await asyncio.sleep(0.1)  # for who took that to see its end
    await probe.close()


async def test_one_that_hangs_up_is_no_fast_edge() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    probe = NodeProbe(FLEET % "embedded", "127.0.0.1")
    edge = msgspec.msgpack.decode(
        await probe.measure("a", "b", "127.0.0.1", port), type=MeasuredEdge
    )
    assert edge.problem
    server.close()
