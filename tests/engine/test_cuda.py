"""The CUDA kernels in Triton's interpreter.

Its switch must be set before triton is imported, and other tests import it (by transformers). So
``tests/engine/cuda`` runs in a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.long
@pytest.mark.timeout(500)  # seconds when alone, but an interpreter suffers from neighbours
def test_the_kernels_in_the_interpreter() -> None:
    assert " passed" in run("not slow")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_kernels_in_the_interpreter_over_many_shapes() -> None:
    assert " passed" in run("slow")


def compiled(which: str, cache: Path) -> list[dict[str, Any]]:
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, HERE / "cuda" / "compile_for_hopper.py", which],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_rounding(found: list[dict[str, Any]], dim: int, loops: int) -> None:
    """All loops over keys of all exact kernels of a head dim do the same fp32 operations."""
    title = re.compile(rf"exact \w+ {dim}\b")
    rows = [r for r in found if r["kernel"] == "attend_kernel" and title.match(r["case"])]
    counted = [loop for row in rows for loop in row["loops"]]
    assert len(counted) == loops, "with and without a mask, in decode and in prefill"
    assert all(loop == counted[0] for loop in counted), counted
    assert counted[0]["fma.rn.f32"]
    fused = sum(row["fused"] for row in rows)
    assert fused == counted[0]["fma.rn.f32"] * loops, "nothing else is fused"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_exact_kernels_round_alike_in_all_their_loops_and_versions(tmp_path: Path) -> None:
    found = compiled("exact", tmp_path)
    assert not [row for row in found if row["may_fuse"]], "ptxas may fuse what has no rounding mode"
    check_rounding(found, 128, loops=4)
    others = [row for row in found if row["kernel"] != "attend_kernel"]
    assert {row["kernel"] for row in others} == {
        "add_norm_kernel",
        "gate_kernel",
        "linear_kernel",
        "list_items_kernel",
        "reduce_kernel",
        "rope_write_kernel",
    }
    assert not [row for row in others if row["fused"]]


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    found = compiled("all", tmp_path)
    assert {row["kernel"] for row in found} == {
        "attend_kernel",
        "reduce_kernel",
        "add_norm_kernel",
        "copy_blocks_kernel",
        "gate_kernel",
        "list_items_kernel",
        "rope_write_kernel",
        "draw_kernel",
        "reduce_draw_kernel",
        "cut_kernel",
        "linear_kernel",
    }
    check_rounding(found, 64, loops=4)
    check_rounding(found, 128, loops=4)
    check_rounding(found, 256, loops=6)  # two with a window, which is always masked
    spilling = {row["case"] for row in found if row["spill_bytes"]}
    assert all("prefill" in case for case in spilling), "measured to be faster so"
    assert max(row["spill_bytes"] for row in found) <= 160
    assert not [row for row in found if row["shared_bytes"] > 227 * 1024]
    for row in found:
        if row["kernel"] in ("attend_kernel", "linear_kernel"):
            assert row["wide_async_copies"], "K, V and weights come 16 bytes at a time, in advance"
            few = row["case"].startswith(("fast decode", "fast product of few rows"))
            assert row["wgmma"] == (not few), row
        if row["kernel"] == "copy_blocks_kernel":
            assert row["wide_stores"], "16 bytes at a time"
        if row["kernel"] == "attend_kernel" and row["case"].startswith("fast prefill 128"):
            assert max(row["async_waits"]) >= 2, "a tile of pages is loaded while one is computed"
