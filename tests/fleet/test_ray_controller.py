"""The controller's shell where Ray does what it may: actors that vanish, or cannot run.

Ray is played by stand-ins that answer as Ray does; ``test_ray_fleet.py`` has the real one.
"""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorUnschedulableError, NodeDiedError

from config.fleet_file import FleetConfig, PoolsConfig
from fleet.local.redis_server import EmbeddedRedis
from fleet.pools import ray_controller
from fleet.pools.controller import Phase
from fleet.pools.ray_controller import ControllerActor, ControllerSpec
from registry.redis_store import Registry
from registry.types import WorkerRecord


class Method:
    """An actor's method: ``.remote()`` gives something to wait for."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_: Any) -> Any:
        return self._answer()


class Actor:
    """An actor that starts, and runs until it is stopped."""

    def __init__(self, worker_id: str = "prefill-0", start: Exception | None = None) -> None:
        self.worker_id = worker_id
        self.stopped = asyncio.Event()
        self._failure = start
        self.start = self.record = Method(self._record)
        self.wait = Method(self._wait)
        self.stop = Method(self._stop)

    async def _record(self) -> bytes:
        if self._failure is not None:
            raise self._failure
        record = WorkerRecord(
            worker_id=self.worker_id,
            role="prefill",
            state="ready",
            incarnation=b"i" * 16,
            epoch=1,
        )
        return msgspec.msgpack.encode(record)

    async def _wait(self) -> int:
        await self.stopped.wait()
        return 0

    async def _stop(self) -> None:
        self.stopped.set()


@pytest.fixture
async def controller(
    redis_server: EmbeddedRedis, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ControllerActor]:
    config = FleetConfig(fleet="test", pools=PoolsConfig(prefill=1, decode=1))
    spec = ControllerSpec(
        config_json=config.to_json(),
        redis_url=redis_server.url,
        fleet_token="t",
        host="127.0.0.1",
        log_dir=str(tmp_path),
    )
    monkeypatch.setattr(ray_controller, "log_to", lambda _: None)
    monkeypatch.setattr(ray_controller.ray, "kill", lambda _: None)
    monkeypatch.setattr(ray_controller.ray.util, "list_named_actors", lambda **_: [])
    monkeypatch.setattr(ray_controller, "remove_placement_group", lambda _: None)
    made = ControllerActor(msgspec.json.encode(spec))
    placed = asyncio.Event()
    placed.set()
    monkeypatch.setattr(
        ray_controller, "placement_group", lambda *_, **__: SimpleNamespace(ready=placed.wait)
    )
    made.placed = placed
    yield made
    await made.stop(limit_s=1.0)
    await made.close()


async def until(condition, limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


def phase(controller: ControllerActor, worker_id: str = "prefill-0") -> Phase:
    return controller._machine.slots[worker_id].phase


async def test_an_actor_that_ends_between_listing_and_adoption_stops_nothing(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 5a: the loop runs, and the slot has its next life, counted on."""
    listed = [{"name": "baton-test-prefill-0-4", "namespace": ray_controller.NAMESPACE}]
    monkeypatch.setattr(ray_controller.ray.util, "list_named_actors", lambda **_: listed)

    def gone(*_: Any, **__: Any) -> Any:
        raise ValueError("no such actor")

    monkeypatch.setattr(ray_controller.ray, "get_actor", gone)
    started: list[int] = []

    def start(launch, _group) -> Actor:
        started.append(launch.epoch)
        return Actor(launch.worker_id)

    monkeypatch.setattr(controller, "_start_actor", start)
    await controller.run()
    await until(lambda: phase(controller) is Phase.READY)
    assert 5 in started


@pytest.mark.parametrize(
    "fault", [ActorUnschedulableError("no node"), NodeDiedError("gone"), KeyError("a bug")]
)
async def test_whatever_ends_a_start_ends_the_life(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """Defect 5b: the slot does not stay STARTING."""
    lives: list[Actor] = []

    def start(launch, _group) -> Actor:
        lives.append(Actor(launch.worker_id, fault if len(lives) < 2 else None))
        return lives[-1]

    monkeypatch.setattr(controller, "_start_actor", start)
    await controller.run()
    await until(lambda: phase(controller) is Phase.READY)
    assert len(lives) > 2


async def test_a_drain_while_the_life_is_placed_ends_the_placing(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 5c: no actor is started that nobody wants."""
    started: list[str] = []

    def start(launch, _group) -> Actor:
        started.append(launch.worker_id)
        return Actor(launch.worker_id)

    monkeypatch.setattr(controller, "_start_actor", start)
    controller.placed.clear()
    await controller.run()
    await until(lambda: "prefill-0" in controller._placing)
    controller._obey("drain", ("prefill-0",))
    await until(lambda: phase(controller) is Phase.PARKED)
    controller.placed.set()
    await until(lambda: phase(controller, "decode-0") is Phase.READY)
    assert started == ["decode-0"]


async def test_a_new_controller_counts_on_from_what_the_registry_says(
    controller: ControllerActor, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 5e."""
    registry = Registry(redis_server.url, "test")
    dead = WorkerRecord(worker_id="prefill-0", role="prefill", state="dead", epoch=6)
    await registry.write_slot(dead)
    await registry.close()
    epochs: list[int] = []

    def start(launch, _group) -> Actor:
        if launch.role == "prefill":
            epochs.append(launch.epoch)
        return Actor(launch.worker_id)

    monkeypatch.setattr(controller, "_start_actor", start)
    await asyncio.gather(controller.run(), controller.run())
    await until(lambda: epochs != [])
    assert epochs == [7]
