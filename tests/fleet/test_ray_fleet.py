"""Real Ray, real Redis, real processes: dead workers come back, and a stop leaves nothing."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from baton.config.fleet_file import FleetConfig, PoolsConfig
from baton.registry.admin_commands import AdminCommands, CommandReply
from baton.registry.redis_store import Registry
from baton.registry.types import WorkerRecord
from fleet.local.local_pools import LocalPools
from fleet.local.supervisor import _CONTROLLER_LOST_S, _CONTROLLER_POLL_S
from fleet.pools.liveness import FROZEN_AFTER_S, Life, end_actor
from fleet.pools.resources import (
    NAMESPACE,
    ControllerSpec,
    controller_name,
)
from fleet.process_key import ProcessKey
from tests.fleet.ray_fleet import RAYS_OWN_WARNINGS, RayFleet, ray_fleet

pytestmark = [pytest.mark.fleet, *RAYS_OWN_WARNINGS]

HEALTHY_AFTER_S = 3


CONFIG = FleetConfig(
    fleet="test", pools=PoolsConfig(prefill=1, decode=1), cpus_per_rank=0.5, threads_per_rank=1
)
SPEC = {
    "fleet_token": "t",
    "program": "tests.fleet.small_worker",
    "healthy_after_ns": HEALTHY_AFTER_S * 1_000_000_000,
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[RayFleet]:
    with ray_fleet(CONFIG, **SPEC) as running:
        yield running


async def records(fleet: RayFleet) -> dict[str, WorkerRecord]:
    registry = Registry(fleet.redis_url, "test")
    try:
        return (await registry.records())[1]
    finally:
        await registry.close()


async def record_of(fleet: RayFleet, worker: str) -> WorkerRecord:
    """Its record, which a slow machine may let lapse for a moment."""
    until = time.monotonic() + 20
    while worker not in (found := await records(fleet)) and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return found[worker]


def wait_for(condition: Callable[[], Any], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def slot(fleet: RayFleet, worker_id: str) -> dict[str, Any]:
    return next(item for item in fleet.controller.status() if item["worker_id"] == worker_id)


def wait_ready(fleet: RayFleet, worker_id: str, epoch: int) -> None:
    wanted = {"phase": "ready", "epoch": epoch}
    wait_for(lambda: wanted.items() <= slot(fleet, worker_id).items())


async def test_the_pools_come_up_with_their_environment(fleet: RayFleet) -> None:
    wait_ready(fleet, "worker-0", 1)
    wait_ready(fleet, "worker-1", 1)
    found = await records(fleet)
    assert sorted(found) == ["worker-0", "worker-1"]
    assert {(record.host, record.threads) for record in found.values()} == {("passive", 1)}
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, record.pid) for record in found.values()} == {ours}
    assert len(ray.util.placement_group_table()) == 2


@pytest.mark.parametrize("victim", ["engine", "actor"])
async def test_kill_9_brings_a_new_incarnation(fleet: RayFleet, victim: str) -> None:
    before = await record_of(fleet, "worker-1")
    engine = ProcessKey.of(before.pid)
    assert engine is not None
    actor_pid = int(before.address.rpartition(":")[2])
    os.kill(before.pid if victim == "engine" else actor_pid, signal.SIGKILL)
    wait_ready(fleet, "worker-1", before.epoch + 1)
    after = await record_of(fleet, "worker-1")
    assert after.incarnation != before.incarnation
    assert after.epoch == before.epoch + 1
    assert engine.find() is None, "the engine never outlives its worker"
    reason = "killed by SIGKILL (9)" if victim == "engine" else "its process died"
    assert f"dead {reason}" in (fleet.logs / "controller.log").read_text()


async def test_a_worker_that_starts_says_what_it_does(fleet: RayFleet) -> None:
    before = await record_of(fleet, "worker-1")
    slow = fleet.logs / "slow-worker-1"
    slow.touch()
    os.kill(before.pid, signal.SIGKILL)
    wait_for(lambda: slot(fleet, "worker-1")["doing"] == "waiting for the end of a file")
    slow.unlink()
    wait_ready(fleet, "worker-1", before.epoch + 1)
    wait_for(lambda: not slot(fleet, "worker-1")["doing"])


@pytest.mark.slow
async def test_a_frozen_shell_is_replaced_and_does_not_come_back(fleet: RayFleet) -> None:
    """Defect 5d: SIGSTOP; a new life within the deadline, and SIGCONT revives nothing."""
    before = await record_of(fleet, "worker-1")
    shell = ProcessKey.of(int(before.address.rpartition(":")[2]))
    engine = ProcessKey.of(before.pid)
    assert shell is not None and engine is not None
    os.kill(shell.pid, signal.SIGSTOP)
    wait_for(lambda: slot(fleet, "worker-1")["epoch"] == before.epoch + 1, FROZEN_AFTER_S + 6)
    # Killed by now; the kernel may still be taking its memory apart.
    wait_for(lambda: shell.find() is None and engine.find() is None, 3.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(shell.pid, signal.SIGCONT)
    wait_ready(fleet, "worker-1", before.epoch + 1)
    after = await record_of(fleet, "worker-1")
    assert after.incarnation != before.incarnation
    assert "dead frozen: no response for 8 s" in (fleet.logs / "controller.log").read_text()


def test_a_stopped_process_that_has_not_been_asked_is_ended(fleet: RayFleet) -> None:
    """Ray alone cannot; a new controller finds it stopped, and knows only its actor."""

    class WorkerActor:
        def pid(self) -> int:
            return os.getpid()

    options = {"namespace": NAMESPACE, "num_cpus": 0, "lifetime": "detached"}
    for name, end in (
        ("baton-other-worker-0-1", lambda _: end_actor("baton-other-worker-0-1", NAMESPACE)),
        ("baton-other-worker-1-1", lambda actor: Life(1, actor).end()),
    ):
        actor = ray.remote(WorkerActor).options(name=name, **options).remote()
        stopped = ProcessKey.of(ray.get(actor.pid.remote()))
        assert stopped is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        end(actor)
        wait_for(lambda key=stopped: key.find() is None)


async def test_an_engine_that_dies_late_is_followed_in_the_same_process(fleet: RayFleet) -> None:
    await asyncio.sleep(HEALTHY_AFTER_S)
    before = await record_of(fleet, "worker-1")
    os.kill(before.pid, signal.SIGKILL)
    wait_ready(fleet, "worker-1", before.epoch + 1)
    after = await record_of(fleet, "worker-1")
    assert after.address == before.address, "the small worker's address has its shell's pid"
    assert after.pid != before.pid
    assert after.incarnation != before.incarnation


async def test_operators_drain_and_restart_through_redis(fleet: RayFleet) -> None:
    epoch = slot(fleet, "worker-0")["epoch"]
    registry = Registry(fleet.redis_url, "test")
    orders = AdminCommands(registry)
    refused = await orders.ask("drain", ["worker-9"])
    assert refused is not None and "no such worker: worker-9" in refused.problem
    assert await orders.ask("drain", ["worker-0"]) == CommandReply()
    wait_for(lambda: slot(fleet, "worker-0")["phase"] == "parked")
    async with asyncio.timeout(10):
        while (await registry.records())[0]["worker-0"].state != "dead":
            await asyncio.sleep(0.05)
    assert (await registry.records())[0]["worker-0"].intent == "park"
    refused = await orders.ask("roll")
    assert refused is not None and "worker-1 is the only worker in use" in refused.problem
    assert slot(fleet, "worker-1")["phase"] == "ready"

    assert await orders.ask("restart", ["worker-0"]) == CommandReply()
    wait_ready(fleet, "worker-0", epoch + 1)
    decode_epoch = slot(fleet, "worker-1")["epoch"]
    assert await orders.ask("roll") == CommandReply()
    wait_ready(fleet, "worker-0", epoch + 2)
    wait_ready(fleet, "worker-1", decode_epoch + 1)
    await registry.close()


async def test_a_pool_is_scaled_out_and_in_and_refused_where_it_does_not_fit(
    fleet: RayFleet,
) -> None:
    registry = Registry(fleet.redis_url, "test")
    orders = AdminCommands(registry)
    refused = await orders.ask("scale", arguments={"decode": 99}, timeout_s=10)
    assert refused is not None and "the cluster has room for" in refused.problem
    assert await orders.ask("scale", arguments={"decode": 2}, timeout_s=10) == CommandReply()
    wait_ready(fleet, "worker-2", 1)
    assert await orders.ask("scale", arguments={"decode": 1}, timeout_s=10) == CommandReply()
    wait_for(
        lambda: [s["worker_id"] for s in fleet.controller.status()] == ["worker-0", "worker-1"]
    )
    logs = await orders.ask("logs", ["worker-2"], {"lines": 5}, timeout_s=30)
    assert logs is not None and ["worker-2.log"] in [list(files) for files in logs.data.values()]
    await registry.close()


async def test_workers_turn_without_a_restart(fleet: RayFleet) -> None:
    """The role changes in both records; a crash, a new controller and an empty Redis keep it."""
    registry = Registry(fleet.redis_url, "test")
    orders = AdminCommands(registry)
    before = await record_of(fleet, "worker-0")
    answer = await orders.ask("scale", arguments={"prefill": 0, "decode": 2}, timeout_s=10)
    assert answer is not None and answer.data["turned"] == {"worker-0": "decode"}
    slots, workers = await registry.records()
    assert slots["worker-0"].role == workers["worker-0"].role == "decode"
    assert slots["worker-0"].turn == workers["worker-0"].turn > 0
    assert (workers["worker-0"].pid, workers["worker-0"].epoch) == (before.pid, before.epoch)
    replace_controller(fleet)
    wait_ready(fleet, "worker-0", before.epoch)
    assert slot(fleet, "worker-0")["role"] == "decode"
    os.kill(before.pid, signal.SIGKILL)
    wait_ready(fleet, "worker-0", before.epoch + 1)
    assert (await record_of(fleet, "worker-0")).role == "decode"
    answer = await orders.ask("scale", arguments={"prefill": 1, "decode": 1}, timeout_s=10)
    assert answer is not None and len(answer.data["turned"]) == 1
    roles = sorted(slot["role"] for slot in fleet.controller.status())
    assert roles == ["decode", "prefill"]
    await registry.close()


async def test_a_worker_that_cannot_start_says_why_and_is_tried_again(fleet: RayFleet) -> None:
    marker = fleet.logs / "fail-worker-1"
    marker.touch()
    os.kill((await record_of(fleet, "worker-1")).pid, signal.SIGKILL)
    wait_for(lambda: "told to fail" in slot(fleet, "worker-1")["reason"])
    marker.unlink()
    wait_for(lambda: slot(fleet, "worker-1")["phase"] == "ready")


async def test_workers_outlive_their_controller_and_are_adopted(fleet: RayFleet) -> None:
    before = await records(fleet)
    replace_controller(fleet)
    for worker_id, record in before.items():
        wait_ready(fleet, worker_id, record.epoch)
    assert {name: record.pid for name, record in (await records(fleet)).items()} == {
        name: record.pid for name, record in before.items()
    }


def replace_controller(fleet: RayFleet) -> None:
    """Kill the controller, and wait until its successor has adopted the two workers."""
    log = fleet.logs / "controller.log"
    before = log.read_text().count("adopting worker=")
    ray.kill(ray.get_actor(controller_name("test"), namespace=NAMESPACE), no_restart=False)
    wait_for(lambda: _goes_on(fleet) and log.read_text().count("adopting worker=") == before + 2)


def _goes_on(fleet: RayFleet) -> bool:
    try:
        fleet.controller.keep_running(timeout_s=2)
    except ray.exceptions.RayError:
        return False
    return True


def controllers() -> list[ProcessKey]:
    """Those below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ControllerActor" in " ".join(process.cmdline()):
                found.append(ProcessKey.of(process.pid))
    return [key for key in found if key is not None]


@pytest.mark.timeout(180)
@pytest.mark.slow
async def test_a_frozen_controller_is_replaced_before_the_fleet_would_end(fleet: RayFleet) -> None:
    pools = LocalPools(CONFIG, Path())
    pools._controllers = {CONFIG.fleet: fleet.controller}
    pools._health = SimpleNamespace(answers=True)
    spec = ControllerSpec(
        config_json=CONFIG.to_json(),
        redis_url=fleet.redis_url,
        host="127.0.0.1",
        log_dir=str(fleet.logs),
        **SPEC,
    )
    pools._specs = {CONFIG.fleet: spec}
    wait_for(lambda: [item["phase"] for item in pools.slots()] == ["ready", "ready"])
    before = {item["worker_id"]: item["epoch"] for item in pools.slots()}
    (frozen,) = controllers()
    os.kill(frozen.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    while not pools.answers():
        assert time.monotonic() - began_s < _CONTROLLER_LOST_S
        time.sleep(_CONTROLLER_POLL_S)  # noqa: ASYNC251 - as the supervisor does
    fleet.controller._actor = pools._controllers[CONFIG.fleet]._actor
    assert len(pools.news()) == 1
    for worker_id, epoch in before.items():
        wait_ready(fleet, worker_id, epoch)  # adopted: none was started anew
    # Ray ends the frozen one: it never wakes as a second controller.
    wait_for(lambda: frozen.find() is None)
    assert len(controllers()) == 1


async def test_a_stop_ends_every_worker(fleet: RayFleet) -> None:
    engines = [ProcessKey.of(record.pid) for record in (await records(fleet)).values()]
    assert fleet.controller.stop()
    wait_for(lambda: not any(engine and engine.find() for engine in engines), limit_s=5)
    until = time.monotonic() + 10  # a worker that was killed in the act lapses by itself
    while (left := await records(fleet)) and time.monotonic() < until:
        await asyncio.sleep(0.2)
    assert left == {}
