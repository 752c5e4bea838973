"""A replica whose ranks Ray places each by itself: real Ray, Redis, weights and processes."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from baton.config.fleet_file import FleetConfig, PoolsConfig, TensorParallelConfig
from baton.registry.redis_store import Registry
from baton.registry.types import WorkerRecord
from tests.fleet.ray_fleet import RAYS_OWN_WARNINGS, RayFleet, ray_fleet
from tests.workers.harness import TOKEN, WorkerProcess
from tests.workers.test_tensor_parallel import SMOLLM2, both_ways
from tests.workers.test_transports import counted

pytestmark = [pytest.mark.fleet, pytest.mark.slow, *RAYS_OWN_WARNINGS]
APART = TensorParallelConfig(decode=2, memory="own", nodes="several")
CONFIG = FleetConfig(
    fleet="apart",
    model=SMOLLM2,
    pools=PoolsConfig(tensor_parallel=APART),
    cpus_per_rank=0.5,
    kv_blocks_per_worker=128,
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[RayFleet]:
    with ray_fleet(CONFIG, fleet_token=TOKEN, sealed=True) as running:
        yield running


async def ready(fleet: RayFleet, epochs: dict[str, int]) -> dict[str, WorkerRecord]:
    """The records of workers, once each is in this life, or in a later one."""
    registry = Registry(fleet.redis_url, "apart")
    until = time.monotonic() + 120
    try:
        while True:
            slots = {s["worker_id"]: s for s in fleet.controller.status()}
            found = (await registry.records())[1]
            if all(
                slots[name]["phase"] == "ready" and name in found and found[name].epoch >= epoch
                for name, epoch in epochs.items()
            ):
                return found
            assert time.monotonic() < until, f"{slots}\n{_logs(fleet)}"
            await asyncio.sleep(0.1)
    finally:
        await registry.close()


def _logs(fleet: RayFleet) -> str:
    return "\n".join(f"{f.name}: {f.read_text()[-1500:]}" for f in fleet.logs.glob("*.log"))


def reached(record: WorkerRecord) -> Any:
    """As the harness has a worker that it started."""
    worker = SimpleNamespace(record=record)
    worker.target = WorkerProcess.target.__get__(worker)
    return worker


def programs(record: WorkerRecord) -> list[psutil.Process]:
    """Of its ranks, each before its engine process; the leader's first."""
    engines = [psutil.Process(pid) for pid in record.ranks]
    return [process for engine in engines for process in (engine.parent(), engine)]


async def test_its_answers_are_those_of_one_rank(fleet: RayFleet) -> None:
    found = await ready(fleet, {"worker-0": 1, "worker-1": 1})
    one, two = found["worker-0"], found["worker-1"]
    assert (len(one.ranks), len(two.ranks), set(two.rank_hosts)) == (0, 2, {two.host})
    names = [process.name().partition(".")[0] for process in programs(two)]
    assert [names[0], names[2]] == ["ray::WorkerActor", "ray::RankActor"]
    await both_ways(reached(two), reached(one))
    sent = (await counted(two, "baton_transfer_bytes"))['direction="sent"']
    received = (await counted(one, "baton_transfer_bytes"))['direction="received"']
    assert sent == received, "what a rank sends is counted with its leader"
    command = " ".join(" ".join(process.cmdline()) for process in programs(two))
    assert TOKEN not in command


@pytest.mark.parametrize(
    "victim",
    ["rank's engine", "rank's program", "leader's program", "leader's engine"],
)
async def test_it_ends_and_comes_back_as_one(fleet: RayFleet, victim: str) -> None:
    epoch = next(s for s in fleet.controller.status() if s["worker_id"] == "worker-1")["epoch"]
    before = (await ready(fleet, {"worker-0": 1, "worker-1": epoch}))["worker-1"]
    processes = programs(before)
    order = ("leader's program", "leader's engine", "rank's program", "rank's engine")
    os.kill(processes[order.index(victim)].pid, signal.SIGKILL)
    found = await ready(fleet, {"worker-0": 1, "worker-1": epoch + 1})
    own = processes[:1] if victim != "leader's program" else []  # may be used again, or ended
    _, alive = psutil.wait_procs([p for p in processes if p not in own], timeout=10)
    assert not alive, "nothing of the last life is left"
    await both_ways(reached(found["worker-1"]), reached(found["worker-0"]))


async def test_a_stop_leaves_nothing(fleet: RayFleet) -> None:
    slots = {s["worker_id"]: s["epoch"] for s in fleet.controller.status()}
    found = await ready(fleet, slots)
    processes = programs(found["worker-1"])
    assert fleet.controller.stop()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
