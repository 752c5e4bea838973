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
from fleet.local.router_process import listening_sockets

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


def cpu_s(*pids: int) -> float:
    """Return user and system time of processes, all threads."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(time.user + time.system for time in times)


def rss_bytes(*pids: int) -> int:
    """Return the resident memory of processes."""
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


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
    tree: Path,
    redis_url: str,
    count: int,
    more: Mapping[str, object] | None = None,
    routers: int = 1,
) -> Iterator[tuple[list[int], int]]:
    """Run routers of a checkout behind one port; yield their process ids and the port.

    Args:
        tree: Checkout.
        redis_url: URL of Redis.
        count: Number of workers.
        more: Further lines of the fleet file.
        routers: Number of routers.
    """
    sockets = listening_sockets("127.0.0.1", 0, routers)
    port = int(sockets[0].getsockname()[1])
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
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-router-"))
        file = Path(folder) / "fleet.yaml"
        file.write_text(yaml.safe_dump(settings))
        numbers = [stack.enter_context(each).fileno() for each in sockets]
        command = [sys.executable, "-m", "router", "--config", str(file)]
        command += [f"--fd={number}" for number in numbers]
        command += ["--group", folder, "--routers", str(routers)]
        pids = []
        for index in range(routers):
            one = running(
                [*command, "--index", str(index)], env=environment, cwd=tree, pass_fds=numbers
            )
            pids.append(stack.enter_context(one).pid)
        for index in range(routers):
            wait_for((Path(folder) / f"{index}.alive").exists, "a router")
        wait_for(lambda: _answers(port), "the routers")
        yield pids, port


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
