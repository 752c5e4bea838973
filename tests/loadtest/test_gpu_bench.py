"""The GPU bench where there is no GPU: it says so, or runs on toy shapes in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.engine.cuda.kernels.attention import Tiles
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks

ROOT = Path(__file__).parents[2]


def smoke(*options: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--smoke", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "--smoke runs without one" in capsys.readouterr().out


def test_it_needs_nothing_but_torch_and_triton() -> None:
    code = """
import sys
class OnlyTheseAreThere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ImportError(name)
MISSING = "msgspec ray grpc typer rich transformers safetensors gguf redis xxhash fastapi".split()
sys.meta_path.insert(0, OnlyTheseAreThere())
import benchmarks.gpu.__main__, benchmarks.gpu.checks, benchmarks.gpu.peer
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def test_each_row_is_in_the_file_as_soon_as_it_is_known(tmp_path: Path) -> None:
    report = gpu.Report(tmp_path / "out.json", budget_s=60)
    report.run("decode fast", "batch 1", lambda: {"percent_of_copy": 90.0})
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rows == [{"section": "decode fast", "case": "batch 1", "percent_of_copy": 90.0}]


def test_what_cannot_be_measured_is_a_row_that_says_why(tmp_path: Path) -> None:
    def too_large() -> dict[str, float]:
        raise torch.cuda.OutOfMemoryError

    def breaks() -> dict[str, float]:
        raise RuntimeError("no kernel image")

    late = gpu.Report(None, budget_s=-1)
    late.run("decode fast", "batch 1", lambda: {"percent_of_copy": 90.0})
    full = gpu.Report(None, budget_s=60)
    full.run("decode fast", "batch 1", too_large)
    broken = gpu.Report(None, budget_s=60)
    broken.run("decode fast", "batch 1", breaks)
    assert broken.record["rows"][0]["not_run"] == "RuntimeError: no kernel image"
    assert [r.record["rows"][0]["not_run"] for r in (late, full)] == [
        "out of time",
        "out of memory",
    ]


def test_the_summary_counts_rows_that_reach_the_goal(capsys: pytest.CaptureFixture[str]) -> None:
    report = gpu.Report(None, budget_s=60)
    report.record["checks_failed"] = 0
    for value in (84.9, 85.0, 91.0):
        report.add("decode fast", "any", "", percent_of_copy=value)
    gpu._summary(report)
    assert report.record["summary"]["decode fast"] == {"goal": 85.0, "rows": 3, "reached": 2}
    said = capsys.readouterr().out
    assert "goal 85 reached in 2 of 3 rows" in said
    assert "transformers: nothing was measured" in said


def test_a_peer_that_hangs_or_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no kernel")

    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 9)

    monkeypatch.setattr(gpu.subprocess, "run", answer)
    found = gpu.run_peer(1, 2, 3, smoke=True, timeout_s=9)
    assert found == {"not_run": "exit code 1: RuntimeError: no kernel"}
    monkeypatch.setattr(gpu.subprocess, "run", hang)
    assert gpu.run_peer(1, 2, 3, smoke=True, timeout_s=9) == {"not_run": "took more than 9 s"}


def test_positions_are_told_apart_by_their_bits() -> None:
    def attend(
        q: torch.Tensor, pool: object, tables: object, tiles: Tiles, out: torch.Tensor, *_: object
    ) -> None:
        alone = tiles.max_queries == 1
        for row, count, position, *_ in tiles.table_5N.t().tolist():
            out[row : row + count] = q[row : row + count].float()
            if alone and position % 32 == 31:
                out[row, -1, -1] += 2**-20  # another rounding, where one program has the keys alone
            if alone and position == 40:
                out[row] = float("nan")

    found = checks.exact_positions(4, 1, 16, 70, torch.device("cpu"), attend=attend)
    assert found == [31, 40, 63]


@pytest.mark.slow
def test_all_of_it_runs_on_toy_shapes(tmp_path: Path) -> None:
    smoke("--no-transformers", "--out", str(tmp_path / "out.json"))
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["checks_failed"] == 0
    found = {row["section"] for row in record["rows"]}
    assert found >= {"check", "bound", "decode fast", "prefill fast", "decode exact", "workload"}
    assert "decode fast fp8" in found
    assert not [row for row in record["rows"] if "not_run" in row]


@pytest.mark.slow
def test_positions_can_be_checked_alone(tmp_path: Path) -> None:
    smoke("--positions", "--out", str(tmp_path / "out.json"))
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["checks_failed"] == 0
    assert len(record["rows"]) == 3
