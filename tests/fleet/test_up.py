"""`make serve` and `baton up`, whole: ready, stopped by a signal to make alone, no trace."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from baton.config.fleet_file import DEFAULT_MODEL
from baton.engine.cpu.cores import cores_file
from baton.model.locate import locate
from fleet.local import state as fleet_state
from fleet.process_key import ProcessKey

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]
LOCAL = (ROOT / "deploy" / "local.yaml").read_text()
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Served:
    """A fleet started as a user does."""

    def __init__(
        self, command: list[str], folder: Path, config: str = LOCAL, cwd: Path = ROOT
    ) -> None:
        file = folder / "fleet.yaml"
        file.write_text(re.sub(r"(?m)^fleet:.*", "fleet: up-test", config))
        self.output = folder / "output"
        environment = {"BATON_HOME": str(folder), "BATON_PORT": "0", "BATON_CONFIG": str(file)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Whoever runs the tests in the background has SIGINT ignored, and so would make.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def wait_ready(self, limit_s: float = 120.0) -> str:
        found: list[str] = []

        def ready() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            found[:] = re.findall(r"Baton is ready at (\S+)/v1", self.output.read_text())
            return bool(found)

        wait_for(ready, limit_s)
        return found[0]


@contextlib.contextmanager
def emulated_fleet(folder: Path, config: str) -> Iterator[str]:
    """Run `baton up` with a fleet file, its state in ``folder``; yield the router's URL."""
    served = Served([sys.executable, "-m", "fleet.cli.main", "up"], folder, config)
    try:
        yield served.wait_ready(120)
    finally:
        served.process.terminate()
        served.process.wait(60)


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts fleets; one that a failed test leaves running is stopped."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    started: list[Served] = []

    def start(command: list[str], config: str = LOCAL, cwd: Path = ROOT) -> Served:
        started.append(Served(command, tmp_path, config, cwd))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.terminate()
            served.process.wait(30)


def ask(url: str) -> tuple[str, int]:
    """Text and cached tokens of a streamed, disaggregated answer."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chunks = list(
            client.chat.completions.create(
                model="smollm2-135m-instruct",
                messages=QUESTION,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-baton-mode": "disaggregated"},
            )
        )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return text, chunks[-1].usage.prompt_tokens_details.cached_tokens


def fleet_of(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/fleet", trust_env=False).json()


def worker_of(url: str, worker_id: str) -> dict[str, Any]:
    return next(w for w in fleet_of(url)["workers"] if w["id"] == worker_id)


@pytest.mark.costly
def test_the_whole_story_from_make_serve_to_an_empty_machine(serve: Serve) -> None:
    """What a newcomer does, then a killed worker, then a signal to make alone."""
    shared_memory = {cores_file(), *Path("/dev/shm").iterdir()}  # that file is for every fleet
    served = serve(["make", "serve"])
    url = served.wait_ready()
    state = fleet_state.load("up-test")
    assert state is not None
    assert ask(url) == ("The capital of France is Paris.", 0)
    wait_for(lambda: fleet_of(url)["transfers"]["count"] == 1, 1)
    assert fleet_of(url)["transfers"]["bytes"] > 100_000
    assert ask(url) == ("The capital of France is Paris.", 32)

    for worker_id in ("worker-0", "worker-1"):
        os.kill(worker_of(url, worker_id)["pid"], signal.SIGKILL)
    for worker_id in ("worker-0", "worker-1"):
        wait_for(lambda name=worker_id: worker_of(url, name)["epoch"] == 2, 90)
        wait_for(lambda name=worker_id: worker_of(url, name)["state"] == "ready", 90)
    assert ask(url) == ("The capital of France is Paris.", 0)
    wait_for(lambda: fleet_of(url)["transfers"]["count"] == 3, 1)  # they never fall
    wait_for(lambda: served.output.read_text().count(" ready, epoch 2") == 2, 5)

    began = time.monotonic()
    served.process.send_signal(signal.SIGINT)
    served.process.wait(15)
    wait_for(lambda: not list(fleet_state.processes_of(state.run_folder)), 1)
    assert time.monotonic() - began < 15
    assert not Path(state.run_folder).exists()
    assert fleet_state.load("up-test") is None
    assert set(Path("/dev/shm").iterdir()) <= shared_memory


@pytest.mark.slow
def test_the_users_own_modules_do_not_take_the_place_of_batons(
    serve: Serve, tmp_path: Path
) -> None:
    """In the current folder lie a `config.py` and others; paths in the fleet file are relative."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("baton", "config", "engine", "fleet", "loadtest", "router", "utils", "wire"):
        (mine / f"{name}.py").write_text(f"raise RuntimeError('this is the {name} of a user')\n")
    (tmp_path / "models").mkdir()
    model, _ = locate(DEFAULT_MODEL)
    (tmp_path / "models" / "paris.gguf").symlink_to(model)
    config = "fleet: f\nmodel: models/paris.gguf\nlogs: {dir: logs}\n"
    config += "pools: {prefill: 1, decode: 1}\n"

    served = serve([str(Path(sys.executable).with_name("baton")), "up"], config, mine)
    url = served.wait_ready()
    body = {"model": "paris", "messages": QUESTION, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert (tmp_path / "logs" / "router.log").exists()

    state = fleet_state.load("up-test")
    assert state is not None
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(15) == 0
    wait_for(lambda: not list(fleet_state.processes_of(state.run_folder)), 1)


@pytest.mark.slow
def test_a_killed_supervisor_takes_its_children_along_and_down_sweeps_up(
    serve: Serve, tmp_path: Path
) -> None:
    baton = [sys.executable, "-m", "fleet.cli.main"]
    served = serve([*baton, "up"])
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


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["gcs_server", "raylet"])
def test_a_fleet_without_its_ray_ends_in_order(serve: Serve, daemon: str) -> None:
    """Defects 16 and 24: noticed, said, answered with a typed error, nothing left, exit code 1."""
    served = serve([sys.executable, "-m", "fleet.cli.main", "up"])
    url = served.wait_ready()
    state = fleet_state.load("up-test")
    assert state is not None
    answers: list[httpx.Response] = []

    def generate() -> None:
        body = {"model": "default", "prompt": "Count:", "max_tokens": 2000, "ignore_eos": True}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False))

    client = threading.Thread(target=generate)
    client.start()
    wait_for(lambda: any(worker["running"] for worker in fleet_of(url)["workers"]), 20)
    (victim,) = (
        process
        for process in fleet_state.processes_of(state.run_folder)
        if process.name() == daemon
    )
    began = time.monotonic()
    victim.kill()
    assert served.process.wait(30) == 1
    took_s = time.monotonic() - began
    client.join(10)
    output = served.output.read_text()
    assert f"Ray's {daemon} (pid {victim.pid}) died" in " ".join(output.split())
    assert "stopped" in output
    assert "\x1b[" not in output
    assert took_s < 20
    assert answers and answers[0].status_code == 503, answers[0].text
    assert answers[0].json()["error"]["code"]
    assert not list(fleet_state.processes_of(state.run_folder))
    assert not Path(state.run_folder).exists()
    assert fleet_state.load("up-test") is None
