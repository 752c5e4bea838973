"""Ctrl-C in long commands: what was done until then is kept and marked, with exit code 130."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.commands.points import measured
from tests.loadtest.simulator.test_simulator import SAMPLE
from tests.matrix.tiny import write_tiny


def interrupted(*arguments: str, sign: str = "", after_s: float = 0.0) -> tuple[str, str]:
    """Type a command and Ctrl-C after a sign on standard error; return both outputs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fleet.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background have SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    told = ""
    try:
        while sign not in told:
            line = process.stderr.readline()
            assert line, told
            told += line
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
        out, more = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, told + more
    return out, told + more


def test_points_before_ctrl_c_are_kept() -> None:
    def measure(point: int) -> int:
        if point == 3:
            raise KeyboardInterrupt
        return 10 * point

    rows = measured([1, 2, 3, 4], measure)
    assert (rows, rows.left_out) == ([10, 20], 2)
    assert measured([1, 2], measure).left_out == 0
    with pytest.raises(KeyboardInterrupt):
        measured([1, 2, 3], measure, at_least=3)


@pytest.mark.timeout(120)
def test_a_lab_keeps_its_points(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    out, told = interrupted(
        "lab", "batching", "--model", model, "--out", str(tmp_path / "lab"), sign="point 2 of 4"
    )
    assert "PARTIAL" in out
    findings = json.loads((tmp_path / "lab" / "results.json").read_text())["findings"]
    assert findings["left_out"] > 0
    assert len(findings["rows"]) == 4 - findings["left_out"]
    assert "Partial." in (tmp_path / "lab" / "report.html").read_text()
    assert "Traceback" not in told


@pytest.mark.timeout(120)
def test_a_lab_without_a_point_writes_nothing(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    _, told = interrupted(
        "lab", "batching", "--model", model, "--out", str(tmp_path / "lab"), sign="point 1 of 4"
    )
    assert "nothing was written" in told and "Traceback" not in told
    assert not (tmp_path / "lab").exists()


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_simulation_has_the_figures_of_the_requests_so_far() -> None:
    arguments = ("simulate", str(SAMPLE), "--limit", "1500", "--prefill", "4", "--decode", "4")
    out, told = interrupted(
        *arguments, "--policy", "all", "--json", sign="simulated in", after_s=3.0
    )
    found = json.loads(out)
    for whole in found[:-1]:
        assert "left_out_requests" not in whole
        assert whole["figures"]["requests"] == 1500
    last = found[-1]
    assert last["left_out_requests"] > 0
    assert last["figures"]["requests"] + last["left_out_requests"] == 1500
    assert "PARTIAL" in told and "Traceback" not in told
