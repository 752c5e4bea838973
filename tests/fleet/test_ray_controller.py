"""The controller's shell where Ray does what it may: actors that vanish, or cannot run.

Ray is played by stand-ins that answer as Ray does; ``test_ray_fleet.py`` has the real one.
"""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorUnschedulableError, NodeDiedError, RayActorError

from baton.config.clients import SloConfig
from baton.config.fleet_file import FleetConfig, PoolsConfig
from baton.registry import wanted_sizes as wanted
from baton.registry.admin_commands import AdminCommand, AdminCommands, CommandReply
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import WorkerRecord
from baton.registry.workers import was_replaced
from baton.telemetry.tasks import BackgroundTasks
from fleet.local.redis_server import EmbeddedRedis
from fleet.pools import adoption, liveness, placement, ray_controller
from fleet.pools.admin_commands import CommandDesk
from fleet.pools.liveness import ReportedRole, ShellProcess, StandstillGuard
from fleet.pools.nodes import Node
from fleet.pools.ray_controller import ControllerActor
from fleet.pools.resources import ControllerSpec
from fleet.pools.slots import Phase
from fleet.process_key import ProcessKey


class Method:
    """An actor's method: ``.remote()`` gives something to wait for."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_: Any) -> Any:
        return self._answer()


class Actor:
    """An actor that starts, and runs until it is stopped."""

    def __init__(self, worker_id: str = "worker-0", start: Exception | None = None) -> None:
        self.worker_id = worker_id
        self.stopped = asyncio.Event()
        self._failure = start
        self.kv_blocks = 0
        self.start = self.record = Method(self._record)
        self.wait = Method(self._wait)
        self.stop = Method(self._stop)
        self.drain = Method(self._thaw)
        self.ping = Method(self._ping)
        self.frozen = False
        self.process = ShellProcess("elsewhere", ProcessKey(1, 0.0))

    async def _record(self) -> bytes:
        if self._failure is not None:
            raise self._failure
        record = WorkerRecord(
            worker_id=self.worker_id,
            role="prefill",
            state="ready",
            incarnation=b"i" * 16,
            epoch=1,
            kv_blocks=self.kv_blocks,
        )
        return msgspec.msgpack.encode(record)

    async def _wait(self) -> int:
        await self.stopped.wait()
        return 0

    async def _stop(self) -> None:
        await self._thaw()
        self.stopped.set()

    async def _ping(self) -> bytes:
        await self._thaw()
        return msgspec.msgpack.encode(self.process)

    async def _thaw(self) -> None:
        while self.frozen:
            await asyncio.sleep(0.01)


@pytest.fixture
async def controller(
    redis_server: EmbeddedRedis, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ControllerActor]:
    slo = SloConfig(ttft_s=2.0, itl_s=0.05)
    config = FleetConfig(fleet="test", pools=PoolsConfig(prefill=1, decode=1), slo=slo)
    spec = ControllerSpec(
        config_json=config.to_json(),
        redis_url=redis_server.url,
        fleet_token="t",
        host="127.0.0.1",
        log_dir=str(tmp_path),
    )
    monkeypatch.setattr(ray_controller, "log_to", lambda *_, **__: None)
    monkeypatch.setattr(ray_controller.ray, "kill", lambda _: None)
    monkeypatch.setattr(liveness, "_process_here", lambda _: None)
    monkeypatch.setattr(ray_controller.ray.util, "list_named_actors", lambda **_: [])
    monkeypatch.setattr(placement, "remove_placement_group", lambda _: None)
    monkeypatch.setattr(placement, "placement_group_table", dict)
    made = ControllerActor(msgspec.json.encode(spec))
    placed = asyncio.Event()
    placed.set()
    monkeypatch.setattr(
        placement, "placement_group", lambda *_, **__: SimpleNamespace(ready=placed.wait)
    )
    made.placed = placed
    yield made
    await made.stop(limit_s=1.0)
    await made.close()


async def until(condition, limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


def phase(controller: ControllerActor, worker_id: str = "worker-0") -> Phase:
    return controller._machine.slots[worker_id].phase


async def test_an_actor_that_ends_between_listing_and_adoption_stops_nothing(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 5a: the loop runs, and the slot has its next life, counted on."""
    listed = [{"name": "baton-test-worker-0-4", "namespace": ray_controller.NAMESPACE}]
    monkeypatch.setattr(ray_controller.ray.util, "list_named_actors", lambda **_: listed)

    def gone(*_: Any, **__: Any) -> Any:
        raise ValueError("no such actor")

    monkeypatch.setattr(ray_controller.ray, "get_actor", gone)
    started: list[int] = []

    def start(launch, _group) -> Actor:
        started.append(launch.epoch)
        return Actor(launch.worker_id)

    monkeypatch.setattr(controller._actors, "start", start)
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

    monkeypatch.setattr(controller._actors, "start", start)
    await controller.run()
    await until(lambda: phase(controller) is Phase.READY)
    assert len(lives) > 2


async def test_the_next_life_is_told_the_largest_kv_pool_so_far_and_a_smaller_one_is_logged(
    controller: ControllerActor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[int] = []

    async def dies() -> int:
        raise RayActorError

    def start(launch, _group) -> Actor:
        life = Actor(launch.worker_id)
        if launch.worker_id == "worker-0":
            life.kv_blocks = (900, 500, 900)[len(told)]
            told.append(controller._actors.settings(launch)["engine"]["kv_blocks_before"])
            if len(told) < 3:
                life.wait = Method(dies)
        return life

    monkeypatch.setattr(controller._actors, "start", start)
    await controller.run()
    await until(lambda: len(told) == 3 and phase(controller) is Phase.READY, 15.0)
    assert told == [0, 900, 900]
    smaller = [line for line in caplog.messages if "KV blocks" in line]
    assert smaller == [
        "worker=worker-0 epoch=1 has 500 KV blocks, 900 before: its host has less free memory"
    ]


async def test_a_drain_while_the_life_is_placed_ends_the_placing(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 5c: no actor is started that nobody wants."""
    started: list[str] = []

    def start(launch, _group) -> Actor:
        started.append(launch.worker_id)
        return Actor(launch.worker_id)

    monkeypatch.setattr(controller._actors, "start", start)
    controller.placed.clear()
    await controller.run()
    await until(lambda: "worker-0" in controller._placing)
    await controller._desk.execute(AdminCommand("token", "drain", ("worker-0",)))
    await until(lambda: phase(controller) is Phase.PARKED)
    controller.placed.set()
    await until(lambda: phase(controller, "worker-1") is Phase.READY)
    assert started == ["worker-1"]


async def test_a_new_controller_counts_on_from_what_the_registry_says(
    controller: ControllerActor, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 5e."""
    registry = Registry(redis_server.url, "test")
    dead = WorkerRecord(worker_id="worker-0", role="prefill", state="dead", epoch=6)
    await registry.write_slots([dead])
    await registry.close()
    epochs: list[int] = []

    def start(launch, _group) -> Actor:
        if launch.role == "prefill":
            epochs.append(launch.epoch)
        return Actor(launch.worker_id)

    monkeypatch.setattr(controller._actors, "start", start)
    await asyncio.gather(controller.run(), controller.run())
    await until(lambda: epochs != [])
    assert epochs == [7]


def adopting(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch, *worker_ids: str
) -> dict[str, Actor]:
    """Lives that an earlier controller left; those that are started here join them."""
    lives = {name: Actor(name) for name in worker_ids}
    for name, life in lives.items():
        life.process = ShellProcess("elsewhere", ProcessKey(1, 0.0), epoch=1, started=True)
        assert name == life.worker_id
    named = {f"baton-test-{name}-1": life for name, life in lives.items()}
    listed = [{"name": name, "namespace": ray_controller.NAMESPACE} for name in named]
    monkeypatch.setattr(ray_controller.ray.util, "list_named_actors", lambda **_: listed)
    monkeypatch.setattr(ray_controller.ray, "get_actor", lambda name, **_: named[name])

    def start(launch, _group) -> Actor:
        return lives.setdefault(launch.worker_id, Actor(launch.worker_id))

    monkeypatch.setattr(controller._actors, "start", start)
    return lives


@pytest.mark.parametrize("of", ["this file", "another"])
async def test_a_new_controller_leaves_those_down_that_an_operator_has_drained(
    controller: ControllerActor,
    redis_server: EmbeddedRedis,
    monkeypatch: pytest.MonkeyPatch,
    of: str,
) -> None:
    """One that crashed, or that `--reconcile` has replaced, knew it."""
    registry = Registry(redis_server.url, "test")
    digest = controller._spec.digest if of == "this file" else of
    await wanted.write(registry, wanted.Wanted(of=digest, drained=("worker-0", "worker-8")))
    await registry.close()
    adopting(controller, monkeypatch, "worker-1")
    await controller.run()
    await until(lambda: phase(controller, "worker-1") is Phase.READY)
    await asyncio.sleep(0.2)
    slot = controller._machine.slots["worker-0"]
    assert (slot.phase, slot.epoch) == (Phase.PARKED, 0)
    assert slot.reason == "drained by an operator"


@pytest.mark.parametrize("of", ["this file", "another"])
async def test_a_new_controller_plans_if_the_old_one_did(
    controller: ControllerActor,
    redis_server: EmbeddedRedis,
    monkeypatch: pytest.MonkeyPatch,
    of: str,
) -> None:
    registry = Registry(redis_server.url, "test")
    digest = controller._spec.digest if of == "this file" else of
    await wanted.write(registry, wanted.Wanted(of=digest, auto=True))
    adopting(controller, monkeypatch)
    await controller.run()
    assert controller._desk.planning.auto
    await controller._execute(AdminCommand("token", "scale", arguments={"roles": "hold"}))
    assert not (await wanted.read(registry, controller._spec.digest)).auto
    await registry.close()


@pytest.mark.parametrize("size", [-1, 1025, 2**32])
async def test_a_size_that_no_fleet_has_is_refused(controller: ControllerActor, size: int) -> None:
    order = AdminCommand("token", "scale", arguments={"decode": size})
    reply = await controller._desk.execute(order)
    assert (
        reply.problem
        == f"cannot scale decode to {size}: use prefill=N or decode=N, with N up to 1024"
    )


async def test_an_order_that_raises_is_answered(
    controller: ControllerActor, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without_memory(*_: object) -> CommandReply:
        raise MemoryError

    monkeypatch.setattr(CommandDesk, "_scale", without_memory)
    registry = Registry(redis_server.url, "test")
    scaling = AdminCommands(registry).ask("scale", arguments={"decode": 2}, timeout_s=60)
    asking = asyncio.create_task(scaling)
    while (order := await controller._orders.take()) is None:
        await asyncio.sleep(0.01)
    await controller._execute(order)
    reply = await asking
    assert reply is not None and reply.problem == "scale failed: MemoryError"
    await registry.close()


async def test_a_slow_worker_of_a_later_epoch_than_its_name_is_adopted_as_it_is(
    controller: ControllerActor, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process hosts the third incarnation, and answers the first ping too late."""
    registry = Registry(redis_server.url, "test")
    slot = WorkerRecord(worker_id="worker-0", role="prefill", state="ready", epoch=4)
    await registry.write_slots([slot])
    await registry.close()
    monkeypatch.setattr(liveness, "ASK_EVERY_S", 0.1)
    lives = adopting(controller, monkeypatch, "worker-0", "worker-1")
    slow = lives["worker-0"]
    slow.process = msgspec.structs.replace(slow.process, epoch=3)
    slow.frozen = True
    await controller.run()
    assert controller._machine.slots["worker-0"].epoch == 4
    slow.frozen = False
    await until(lambda: controller._machine.slots["worker-0"].epoch == 3)
    await until(lambda: phase(controller) is Phase.READY)
    assert not slow.stopped.is_set()
    await controller._desk.execute(AdminCommand("token", "drain", ("worker-0",)))
    await until(lambda: phase(controller) is Phase.PARKED)


async def test_an_order_for_a_life_that_is_gone_has_an_end_and_the_end_of_another_is_not_its_own(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = adopting(controller, monkeypatch)
    await controller.run()
    await until(lambda: phase(controller, "worker-1") is phase(controller) is Phase.READY)
    life = controller._lives.get("worker-0")
    assert life is not None
    later = liveness.Life(1, lives["worker-0"], 1)
    assert controller._lives.add("worker-0", later) is life
    lives["worker-0"].stopped.set()
    await until(lambda: phase(controller) is not Phase.READY)
    assert controller._lives.get("worker-0") is later
    lost = controller._lives.get("worker-1")
    assert lost is not None
    controller._lives.remove("worker-1", lost)
    await controller._desk.execute(AdminCommand("token", "drain", ("worker-1",)))
    await until(lambda: phase(controller, "worker-1") is Phase.PARKED)


async def test_an_actor_that_the_controller_does_not_know_is_ended(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end that an earlier controller had decided was lost with it."""
    monkeypatch.setattr(adoption, "_STRANGERS_EVERY_S", 0.1)
    lives = adopting(controller, monkeypatch, "worker-0", "worker-1")
    listed = ray_controller.ray.util.list_named_actors()
    old = {"name": "baton-test-worker-0-0", "namespace": ray_controller.NAMESPACE}
    monkeypatch.setattr(ray_controller.ray.util, "list_named_actors", lambda **_: [*listed, old])
    ended: list[object] = []
    get = ray_controller.ray.get_actor
    monkeypatch.setattr(
        ray_controller.ray,
        "get_actor",
        lambda name, **_: "old" if name == old["name"] else get(name),
    )
    monkeypatch.setattr(ray_controller.ray, "kill", ended.append)
    await controller.run()
    await until(lambda: len(ended) > 0)
    assert set(ended) == {"old"}
    assert not any(life.stopped.is_set() for life in lives.values())


async def test_roles_are_planned_as_an_operator_says(controller: ControllerActor) -> None:
    for mode in ("auto", "hold"):
        assert (
            await controller._desk.execute(
                AdminCommand("token", "scale", arguments={"roles": mode})
            )
            == CommandReply()
        )
        shown = await controller._desk.execute(AdminCommand("token", "plan"))
        assert shown.data["mode"] == mode
    refused = await controller._desk.execute(
        AdminCommand("token", "scale", arguments={"roles": "x"})
    )
    assert refused.problem == "roles cannot be 'x': use auto or hold"


async def test_a_planned_turn_checks_the_worker_again(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nodes() -> list[Node]:
        return []

    monkeypatch.setattr(controller._placements, "nodes", nodes)
    adopting(controller, monkeypatch)
    await controller.run()
    await until(lambda: phase(controller, "worker-1") is phase(controller) is Phase.READY)
    assert await controller._desk.change_role("worker-1", "decode") != ""
    assert await controller._desk.change_role("worker-7", "decode") != ""
    assert await controller._desk.change_role("worker-1", "prefill") == ""
    assert controller._machine.slots["worker-1"].role == "prefill"
    assert controller._machine.wanted == {"prefill": 2, "decode": 0}


@pytest.mark.parametrize("reserved", [True, False])
async def test_a_changed_file_turns_no_worker_on_a_node_of_the_other_role(
    controller: ControllerActor,
    redis_server: EmbeddedRedis,
    monkeypatch: pytest.MonkeyPatch,
    reserved: bool,
) -> None:
    registry = Registry(redis_server.url, "test")
    sizes = wanted.Wanted(of=controller._spec.digest, pools={"prefill": 2, "decode": 0})
    await wanted.write(registry, sizes)
    await registry.close()

    async def nodes() -> list[Node]:
        roles = {"a": frozenset({"prefill"}), "b": frozenset({"decode"})} if reserved else {}
        return [
            Node(id=name, name=name, address=name, cpus=4.0, roles=roles.get(name, frozenset()))
            for name in ("a", "b")
        ]

    monkeypatch.setattr(controller._placements, "nodes", nodes)
    monkeypatch.setattr(controller._placements, "addresses_of", lambda _: ("b",))
    lives = adopting(controller, monkeypatch, "worker-0", "worker-1")
    roles = {"worker-0": "prefill", "worker-1": "decode"}
    for name, life in lives.items():
        turned = ReportedRole(roles[name])
        life.process = msgspec.structs.replace(life.process, turned=turned)
    await controller.run()
    slots = controller._machine.slots
    assert slots["worker-0"].role == "prefill"
    turned_roles = {name: slot.role for name, slot in slots.items() if not slot.leaving}
    kept = {"worker-0": "prefill", "worker-2" if reserved else "worker-1": "prefill"}
    assert turned_roles == kept
    await until(lambda: controller._machine.ready or reserved)


async def test_a_drain_that_names_nobody_is_not_one_of_all(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopting(controller, monkeypatch)
    await controller.run()
    await until(lambda: phase(controller, "worker-1") is phase(controller) is Phase.READY)
    answer = await controller._desk.execute(AdminCommand("token", "drain", ()))
    assert answer.problem.startswith("drain needs worker ids (workers: worker-0, worker-1)")
    assert phase(controller, "worker-1") is phase(controller) is Phase.READY


async def test_what_operators_asked_for_is_written_again_into_a_redis_that_lost_it(
    controller: ControllerActor, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_controller, "_REFRESH_S", 0.1)
    monkeypatch.setattr(ray_controller, "_STEP_S", 0.01)
    adopting(controller, monkeypatch)
    await controller.run()
    await until(lambda: phase(controller, "worker-1") is Phase.READY)
    await controller._execute(AdminCommand("token", "drain", ("worker-1",)))
    registry = Registry(redis_server.url, "test")
    await registry.send(("FLUSHALL",))

    async def again() -> wanted.Wanted:
        async with asyncio.timeout(5.0):
            while not (found := await wanted.read(registry, controller._spec.digest)).drained:
                await asyncio.sleep(0.02)
            return found

    found = await again()
    await registry.close()
    assert (found.drained, found.pools) == (("worker-1",), {"prefill": 1, "decode": 1})


async def test_a_controller_that_begins_while_redis_is_away_drains_nobody_for_that(
    controller: ControllerActor, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet had been scaled to three; the file says one."""
    monkeypatch.setattr(ray_controller, "_REFRESH_S", 0.1)
    read, away = wanted.read, True

    async def read_or_not(registry: Registry, of: str) -> wanted.Wanted:
        if away:
            raise RegistryUnavailableError("away")
        return await read(registry, of)

    monkeypatch.setattr(wanted, "read", read_or_not)
    registry = Registry(redis_server.url, "test")
    scaled = wanted.Wanted(of=controller._spec.digest, pools={"prefill": 1, "decode": 2})
    await wanted.write(registry, scaled)
    lives = adopting(controller, monkeypatch, *(f"worker-{i}" for i in range(4)))
    await controller.run()
    await asyncio.sleep(0.5)
    assert [slot.phase for slot in controller._machine.slots.values()] == 4 * [Phase.READY]
    away = False
    await until(lambda: "worker-3" not in controller._machine.slots)
    assert controller._machine.wanted == {"prefill": 1, "decode": 2}
    assert not any(lives[name].stopped.is_set() for name in ("worker-0", "worker-1", "worker-2"))
    assert (await read(registry, controller._spec.digest)).pools == {"prefill": 1, "decode": 2}
    await registry.close()


@pytest.fixture
def stopped_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that SIGSTOP froze."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


async def test_a_life_that_answers_no_more_is_ended_and_followed_by_another(
    controller: ControllerActor,
    monkeypatch: pytest.MonkeyPatch,
    stopped_process: subprocess.Popen[bytes],
) -> None:
    """Defect 5d: silent for the deadline, killed for certain, and replaced."""
    monkeypatch.setattr(liveness, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(liveness, "_ASK_STARTING_S", 0.05)
    monkeypatch.setattr(liveness, "FROZEN_AFTER_S", 0.5)
    lives: list[Actor] = []

    def start(launch, _group) -> Actor:
        lives.append(Actor(launch.worker_id))
        return lives[-1]

    monkeypatch.setattr(controller._actors, "start", start)
    await controller.run()
    await until(lambda: phase(controller) is phase(controller, "worker-1") is Phase.READY)
    frozen = next(life for life in lives if life.worker_id == "worker-0")
    key = ProcessKey.of(stopped_process.pid)
    assert key is not None
    frozen.process = ShellProcess(socket.gethostname(), key)
    await asyncio.sleep(1.0)
    assert phase(controller) is Phase.READY, "it answers"
    frozen.frozen = True
    await until(lambda: controller._machine.slots["worker-0"].epoch == 2)
    await until(lambda: phase(controller) is Phase.READY)
    assert key.find() is None
    assert controller._machine.slots["worker-1"].epoch == 1
    assert [life.worker_id for life in lives].count("worker-0") == 2


async def test_a_controller_that_stood_still_itself_blames_nobody(
    controller: ControllerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 5d: its own pause is not the workers' silence."""
    monkeypatch.setattr(liveness, "FROZEN_AFTER_S", 0.6)
    monkeypatch.setattr(liveness, "ASK_EVERY_S", 0.3)
    monkeypatch.setattr(controller._actors, "start", lambda launch, _: Actor(launch.worker_id))
    await controller.run()
    await until(lambda: phase(controller) is Phase.READY)
    for _ in range(3):
        time.sleep(0.8)  # noqa: ASYNC251 - the whole process stands still
        await asyncio.sleep(0.4)
    assert [slot.epoch for slot in controller._machine.slots.values()] == [1, 1]


async def test_a_process_that_stood_still_ends_itself_once_it_is_known_to_be_replaced(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause of the whole machine replaces no worker: without an answer it serves."""
    monkeypatch.setattr(liveness, "_ASK_AGAIN_S", 0.05)
    registry = Registry(redis_server.url, "test")
    slot = WorkerRecord(worker_id="worker-0", role="decode", state="ready", epoch=2)
    answers: list[bool | None] = []
    url = "redis://127.0.0.1:1/0"

    async def replaced() -> bool | None:
        answers.append(await was_replaced(url, "test", "worker-0", 2))
        return answers[-1]

    why: list[str] = []
    guard = StandstillGuard(replaced, limit_s=0.5, end=why.append)
    async with BackgroundTasks("test").beside(guard.run(), "guard"):
        await asyncio.sleep(0.2)
        assert answers == []
        time.sleep(1.0)  # noqa: ASYNC251
        await until(lambda: len(answers) > 1)
        assert (set(answers), why) == ({None}, []), "Redis is away"
        await registry.write_slots([slot])
        url = redis_server.url
        await until(lambda: answers[-1] is False)
        asked = len(answers)
        await asyncio.sleep(0.5)
        assert (len(answers), why) == (asked, []), "it is the present one"
        await registry.write_slots([msgspec.structs.replace(slot, state="starting", epoch=3)])
        time.sleep(1.0)  # noqa: ASYNC251
        await until(lambda: why != [])
    await registry.close()


async def test_a_loop_that_hangs_ends_once_it_is_replaced() -> None:
    """Defect 5d: who was replaced meanwhile does not come back, nor does a loop that is caught."""
    why: list[str] = []

    async def replaced() -> bool:
        return True

    guard = StandstillGuard(replaced, limit_s=0.5, end=why.append)
    tasks = BackgroundTasks("test")
    async with tasks.beside(guard.run(), "guard"):
        await asyncio.sleep(0.8)
        assert why == []
        time.sleep(1.0)  # noqa: ASYNC251
        assert why, "the thread sees it while the loop is caught"
        assert "hung for" in why[0]
