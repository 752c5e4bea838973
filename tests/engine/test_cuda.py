"""The CUDA kernels in Triton's interpreter.

Its switch must be set before triton is imported, and other tests import it (by transformers). So
``tests/engine/cuda`` runs in a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this machine")

HERE = Path(__file__).parent
PLAIN = ("-p", "no:cacheprovider", "--durations", "5")


def run(which: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", HERE / "cuda", "-q", "-m", which, *PLAIN],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(500)  # seconds when alone, but an interpreter suffers from neighbours
def test_the_kernels_in_the_interpreter() -> None:
    assert " passed" in run("not slow")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_kernels_in_the_interpreter_over_many_shapes() -> None:
    assert " passed" in run("slow")


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, HERE / "cuda" / "compile_for_hopper.py"],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in found} == {
        "attend_kernel",
        "reduce_kernel",
        "add_norm_kernel",
        "gate_kernel",
        "rope_write_kernel",
        "draw_kernel",
        "reduce_draw_kernel",
        "cut_kernel",
        "linear_kernel",
    }
    assert not [row for row in found if row["spill_bytes"]]
    assert not [row for row in found if row["shared_bytes"] > 227 * 1024]
    for row in found:
        if row["kernel"] in ("attend_kernel", "linear_kernel"):
            assert row["wide_async_copies"], "K, V and weights come 16 bytes at a time, in advance"
            assert row["wgmma"] == (not row["case"].startswith("fast decode")), row
