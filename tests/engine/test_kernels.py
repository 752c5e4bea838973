"""The CUDA kernels in Triton's interpreter.

Its switch must be set before triton is imported, and other tests import it (by transformers). So
``tests/engine/kernels`` runs in a process of its own.
"""

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
        [sys.executable, "-m", "pytest", HERE / "kernels", "-q", "-m", which, *PLAIN],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_kernels_in_the_interpreter() -> None:
    assert " passed" in run("not slow")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_in_the_interpreter_over_many_shapes() -> None:
    assert " passed" in run("slow")
