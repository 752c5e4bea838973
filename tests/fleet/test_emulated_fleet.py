"""Twelve workers of `deploy/emulated.yaml`, started and loaded as an operator does it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from loadtest.results.files import read_results
from tests.fleet.test_up import ROOT, Served

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(500)]
BATON = (sys.executable, "-m", "fleet.cli.main")


@pytest.fixture
def twelve(tmp_path: Path) -> Iterator[str]:
    """The URL of six prefill and six decode workers."""
    config = (ROOT / "deploy" / "emulated.yaml").read_text()
    config = re.sub(r"(prefill|decode): 25", r"\1: 6", config)
    served = Served([*BATON, "up"], tmp_path, config)
    try:
        yield served.wait_ready(400)
    finally:
        served.process.terminate()
        served.process.wait(60)
    assert "EMULATED: no model runs" in served.output.read_text()


def test_twelve_workers_serve_a_load_that_is_told_to_be_emulated(
    twelve: str, tmp_path: Path
) -> None:
    load = ("--requests", "60", "--rate", "6", "--prompt-tokens", "200", "--answer-tokens", "20")
    how = ("--url", twelve, "--header", "x-baton-mode: disaggregated", "--out", str(tmp_path))
    subprocess.run([*BATON, "loadtest", "poisson", *load, *how], check=True, timeout=300)
    found = read_results(tmp_path)
    assert found.summary.ends == {"ok": 60}
    assert found.server["emulated"] == "no model ran: timing model epyc-135m"
    # 200 tokens are read in 0.07 s, and each of 19 more steps takes 9.8 ms: no machine is faster.
    assert min(r.ended_s - r.sent_s for r in found.records) > 0.07 + 19 * 0.0097

    shown = httpx.get(f"{twelve}/fleet", trust_env=False).json()
    assert {worker["engine"] for worker in shown["workers"]} == {"emulated: epyc-135m"}
    assert [worker["state"] for worker in shown["workers"]] == ["ready"] * 12
    assert shown["transfers"]["count"] >= 60
    assert shown["transfers"]["failures"] == 0
    for worker in shown["workers"]:
        process = psutil.Process(worker["pid"])
        assert process.children() == []
        assert process.memory_info().rss < 200 * 2**20
    ready = httpx.get(f"{twelve}/health/ready", timeout=60, trust_env=False).json()
    probed = [{pair[role] for pair in ready["pairs"]} for role in ("prefill", "decode")]
    assert [len(names) for names in probed] == [6, 6]
