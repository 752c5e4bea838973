"""Tables at 80 columns: names are whole."""

from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from loadtest.commands import drill
from loadtest.drill.drills import DRILLS
from loadtest.drill.verdict import DrillOutcome
from loadtest.results import tables
from loadtest.simulator import report
from loadtest.simulator.policies import FLEET, POLICIES

TENANT = "a-very-long-tenant-name-of-a-customer/chat@3"


def printed(table: Table) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    assert "…" not in text
    return text


@pytest.mark.parametrize("name", DRILLS)
def test_drills(name: str) -> None:
    verdict = DrillOutcome(
        drill=name,
        what_was_done="SIGSTOP of a-very-long-name-of-a-model-worker-12 (pid 1234567)",
        requests=25,
        ends={"ok": 20, "aborted": 3},
        errors={"502 upstream_disconnected": 1, "503 worker_unavailable": 1},
        compared=120,
        recovered_s=123.4,
        faults=[],
    )
    text = printed(drill._table([verdict]))
    assert f" {name} " in text
    assert "502 upstream_disconnected" in text


def test_simulated_policies() -> None:
    runs = dict.fromkeys([*POLICIES, FLEET], "123.45")
    text = printed(
        report._by_run("simulated", runs, {"good of admitted": str, "TPOT p99, ms": str})
    )
    heads = [column.split() for column in text.splitlines()[2:4]]
    assert heads[0] == ["round-", "least-", "longest-"]
    assert heads[1] == ["robin", "random", "loaded", "prefix", "cost", "fleet"]
    assert "good of admitted" in text and "TPOT p99, ms" in text


def test_groups() -> None:
    figures = SimpleNamespace(count=1000, p50=0.123, p99=3.0)
    groups = {TENANT: {"ttft_s": figures, "tpot_s": figures}}
    text = printed(tables._groups(SimpleNamespace(by_group=groups)))  # type: ignore[arg-type]
    names = "".join(line.split("│")[1].strip() for line in text.splitlines() if "│" in line)
    assert names == TENANT
