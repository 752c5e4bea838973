"""`make serve` and `baton up`, whole: ready, stopped by a signal to make alone, no trace."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from fleet import state as fleet_state
from fleet.subprocesses import ProcessKey

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.fleet, pytest.mark.slow, pytest.mark.timeout(240)]


class Served:
    """A fleet started as a user does."""

    def __init__(self, command: list[str], folder: Path) -> None:
        config = (ROOT / "deploy" / "local.yaml").read_text()
        file = folder / "fleet.yaml"
        file.write_text(re.sub(r"(?m)^fleet:.*", "fleet: up-test", config))
        self.output = folder / "output"
        environment = {"BATON_HOME": str(folder), "BATON_PORT": "0", "BATON_CONFIG": str(file)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, limit_s: float = 120.0) -> str:
        found: list[str] = []

        def ready() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            found[:] = re.findall(r"Baton is ready at (\S+)/v1", self.output.read_text())
            return bool(found)

        wait_for(ready, limit_s)
        return found[0]


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))


def test_a_signal_to_make_alone_stops_all_of_it_and_leaves_nothing(tmp_path: Path) -> None:
    shared_memory = set(Path("/dev/shm").iterdir())
    served = Served(["make", "serve"], tmp_path)
    url = served.wait_ready()
    assert httpx.get(f"{url}/health/live", trust_env=False).status_code == 200
    state = fleet_state.load("up-test")
    assert state is not None

    began = time.monotonic()
    served.process.send_signal(signal.SIGINT)
    served.process.wait(15)
    wait_for(lambda: not list(fleet_state.processes_of(state.run_folder)), 1)
    assert time.monotonic() - began < 15
    assert not Path(state.run_folder).exists()
    assert fleet_state.load("up-test") is None
    assert set(Path("/dev/shm").iterdir()) <= shared_memory


def test_a_killed_supervisor_takes_its_children_along_and_down_sweeps_up(tmp_path: Path) -> None:
    baton = [sys.executable, "-m", "fleet.cli"]
    served = Served([*baton, "up"], tmp_path)
    served.wait_ready()
    state = fleet_state.load("up-test")
    assert state is not None and state.supervisor == ProcessKey.of(served.process.pid)
    served.process.kill()
    served.process.wait()
    environment = {**os.environ, "BATON_HOME": str(tmp_path)}
    done = subprocess.run([*baton, "down"], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(fleet_state.processes_of(state.run_folder))
    assert not Path(state.run_folder).exists()
