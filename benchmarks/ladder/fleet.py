"""Fleet of the benchmark: Redis, a router as `baton up` starts it, and two workers."""

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import yaml

from benchmarks.router.processes import BenchError, cpu_s, free_port, redis, running, wait_for
from benchmarks.worker import TOKEN, BenchWorker, bench_worker

FLEET = "ladder"
_MIB = 1 << 20
_STEP_TOKENS = 4096


class Peaks(NamedTuple):
    """Peak memory of each process, MiB."""

    router: float
    prefill: float
    decode: float


class LadderFleet:
    """The processes of the fleet."""

    def __init__(self, url: str, router_pid: int, workers: Sequence[BenchWorker]) -> None:
        self.url = url
        self._router = [router_pid]
        self._workers = [_family(worker.process.pid) for worker in workers]

    def forget_peaks(self) -> None:
        """Reset the peaks of memory."""
        for pid in (*self._router, *(pid for family in self._workers for pid in family)):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peaks(self) -> Peaks:
        """Return the peaks since then; a worker's include its shell and its engine."""
        sums = (sum(map(_peak_mib, family)) for family in (self._router, *self._workers))
        return Peaks(*sums)

    def router_cpu_s(self) -> float:
        """Return user and system time of the router, all threads."""
        return cpu_s(self._router[0])


def _family(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def _peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / _MIB
    return 0.0


@contextlib.asynccontextmanager
async def ladder_fleet(
    model: str, folder: Path, context_tokens: int, kv_blocks: int
) -> AsyncIterator[LadderFleet]:
    """Start all processes, and wait until the router has both workers."""
    engine = {
        "model": model,
        "kv_blocks": kv_blocks,
        "max_context_tokens": context_tokens,
        "max_step_tokens": _STEP_TOKENS,
    }
    async with contextlib.AsyncExitStack() as stack:
        redis_url = stack.enter_context(redis())
        own = {"redis_url": redis_url, "fleet": FLEET}
        workers = [
            await stack.enter_async_context(bench_worker(name, engine, **own))
            for name in ("prefill-0", "decode-0")
        ]
        port = free_port()
        file = folder / "fleet.yaml"
        settings = {
            "fleet": FLEET,
            "model": model,
            "served_model_name": ["default"],
            "host": "127.0.0.1",
            "port": port,
            "max_context_tokens": context_tokens,
            "max_step_tokens": _STEP_TOKENS,
            "pools": {"prefill": 1, "decode": 1},
        }
        file.write_text(yaml.safe_dump(settings))
        environment = {
            **os.environ,
            "BATON_REDIS_URL": redis_url,
            "BATON_FLEET_TOKEN": TOKEN,
            "BATON_STATE_DIR": str(folder),
        }
        command = [sys.executable, "-m", "router", "--config", str(file)]
        log = stack.enter_context((folder / "router.log").open("wb"))
        router = stack.enter_context(
            running(command, env=environment, stdout=log, stderr=log),
        )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(lambda: _ready(url), "the router")
        except BenchError as error:
            raise BenchError(f"{error}: {(folder / 'router.log').read_text()[-2000:]}") from error
        yield LadderFleet(url, router.pid, workers)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=10).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
