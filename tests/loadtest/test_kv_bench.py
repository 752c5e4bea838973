"""The hand-off bench runs with each transport."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_hand_off_goes_by_each_transport() -> None:
    """The bench stands where a worker's `Peers` does, and must know what a puller asks them."""
    asked = ["--rounds", "1", "--tokens", "512"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.handoff", *asked],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rates = dict(re.findall(r"^  (\S.*?) {2,}([\d.]+) GB/s", done.stdout, re.MULTILINE))
    assert {"shared_memory", "tcp", "pair", "grpc"} <= rates.keys(), done.stdout
    assert all(float(rate) > 0 for rate in rates.values())
