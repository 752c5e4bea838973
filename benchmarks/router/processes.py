"""Processes of the benchmark: Redis, emulated workers, and a router as `baton up` starts it."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import yaml

from benchmarks.router.workers import FLEET
from fleet.local.redis_server import server_binary

MODEL_NAME = "smollm2"
TOKEN = "bench"
_START_LIMIT_S = 60.0


class BenchError(RuntimeError):
    """A process did not start, or failed."""


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_s(pid: int) -> float:
    """Return user and system time of a process, all threads."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    held: int = psutil.Process(pid).memory_info().rss
    return held


@contextlib.contextmanager
def running(command: list[str], **options: object) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process, killed at the end."""
    process: subprocess.Popen[bytes] = subprocess.Popen(command, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def redis(port: int | None = None) -> Iterator[str]:
    """Run an empty Redis server without persistence; yield its URL."""
    port = port or free_port()
    command = [str(server_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with running(command, stdout=subprocess.DEVNULL):
        wait_for(lambda: _listens(port), "redis")
        yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def workers(redis_url: str, count: int, step_s: float, context: int = 8192) -> Iterator[int]:
    """Run emulated workers; yield their process id."""
    module = [sys.executable, "-m", "benchmarks.router.workers"]
    options = ["--redis", redis_url, "--count", str(count), "--step-s", str(step_s)]
    options += ["--context", str(context)]
    with running([*module, *options], stdout=subprocess.PIPE) as process:
        if process.stdout is None or process.stdout.readline() != b"ready\n":
            raise BenchError("the emulated workers did not start")
        yield process.pid


@contextlib.contextmanager
def router(
    tree: Path, redis_url: str, count: int, more: Mapping[str, object] | None = None
) -> Iterator[tuple[int, int]]:
    """Run the router of a checkout; yield its process id and its port.

    Args:
        tree: Checkout.
        redis_url: URL of Redis.
        count: Number of workers.
        more: Further lines of the fleet file.
    """
    port = free_port()
    settings = {
        "fleet": FLEET,
        "served_model_name": [MODEL_NAME],
        "host": "127.0.0.1",
        "port": port,
        "max_batch_requests": 1024,
        "max_step_tokens": 2048,
        "max_queued_requests": 4096,
        "pools": {"prefill": 0, "decode": count},
        **(more or {}),
    }
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}:{tree / 'proto'}",
        "BATON_REDIS_URL": redis_url,
        "BATON_FLEET_TOKEN": TOKEN,
    }
    with tempfile.TemporaryDirectory(prefix="bench-router-") as folder:
        file = Path(folder) / "fleet.yaml"
        file.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "router", "--config", str(file)]
        with running(command, env=environment, cwd=tree) as process:
            wait_for(lambda: _answers(port), "the router")
            yield process.pid, port


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = _START_LIMIT_S) -> None:
    """Wait until ``condition()`` is true; raise BenchError after the limit."""
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            raise BenchError(f"{what} did not start within {limit_s:g} s")
        time.sleep(0.05)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
