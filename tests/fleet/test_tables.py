"""Tables at 80 columns: names of workers and nodes are whole, and no figure is cut."""

from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from fleet.cli import admin_commands as orders
from fleet.cli import doctor, explain, inspection, top
from fleet.cli.main import app
from fleet.pools.checks.findings import Cell

WORKER = "llama-3.3-70b-instruct-2-worker-12"
NODE = "ip-10-0-0-12.eu-west-1.compute.internal"


def worker() -> dict[str, Any]:
    return {
        "id": WORKER,
        "role": "prefill",
        "state": "quarantined",
        "epoch": 12,
        "running": 12,
        "waiting": 345,
        "kv_blocks": {"leased": 123, "cached": 2345, "quarantined": 0, "free": 0, "total": 40960},
        "pid": 1234567,
        "host": NODE,
    }


def printed(table: RenderableType) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_status() -> None:
    text = printed(inspection._worker_table([worker()]))
    for whole in ("prefill", "quarantined", "123+2345/40960", " 345 "):
        assert whole in text
    column = "".join(line[:11].strip() for line in text.splitlines()[4:])
    assert column == WORKER


def test_top() -> None:
    text = printed(top._workers([worker()], {WORKER: {"decode_step_s": 0.0123}}, []))
    assert "…" not in text
    for whole in ("prefill", "quarantined", "123+2345/40960", " 345 ", "12.3 ms"):
        assert whole in text


def test_candidates_of_a_request() -> None:
    one = {
        "prefill": WORKER,
        "decode": WORKER,
        "cost_s": 0.1234,
        "uncached_tokens": 12345,
        "terms": {"queue_s": 0.1, "transfer_s": 0.2},
    }
    text = printed(explain._candidates({"candidates": [one], "chosen": None}))
    assert "…" not in text
    for whole in ("123.4 ms", "12345", "queue", "transfer"):
        assert whole in text


def test_nodes_of_doctor() -> None:
    nodes = [NODE.replace("12", str(number)) for number in range(10, 16)]
    rows = {"version": {node: Cell(text="1.2.3") for node in nodes}}
    assert "…" not in printed(doctor._table("", nodes, rows))


def test_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {
        "name": NODE,
        "address": "10.200.100.112",
        "head": True,
        "closed": True,
        "roles": [],
        "cpus": 192,
        "free_cpus": 12.5,
        "gpus": 8,
        "free_gpus": 0,
        "workers": [WORKER],
    }
    monkeypatch.setattr("fleet.cli.reach.FleetAddress.reach", lambda *_: None)
    monkeypatch.setattr(orders, "order", lambda *_, **__: [node])
    text = CliRunner().invoke(app, ["nodes"], env={"COLUMNS": "80"}).output
    assert "…" not in text
    for whole in ("10.200.100.112", "head, closed", "192", "12.5"):
        assert whole in text
