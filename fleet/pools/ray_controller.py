"""The controller: a detached Ray actor around `FleetController`, the state machine.

It owns no request and no data. When it dies, Ray restarts it, and it adopts the workers, which keep
serving meanwhile.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Coroutine
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from baton.config.fleet_file import FleetConfig
from baton.planner.sizes import SizePlanner
from baton.planner.state import WorkerState
from baton.registry import wanted_sizes as wanted
from baton.registry.admin_commands import AdminCommand, AdminCommands, CommandReply
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.router_demands import RouterDemands
from baton.registry.types import Role, WorkerRecord
from baton.telemetry.tasks import BackgroundTasks
from baton.tenants.audit.inbox import AuditInbox
from baton.tenants.audit.log import AuditLog
from baton.types.lanes import worker_prefix
from fleet.pools.admin_commands import CommandDesk, WantedState, sizes_in
from fleet.pools.adoption import end_strangers, running_actors
from fleet.pools.audited_commands import AuditedChanges, audit_order
from fleet.pools.controller import START_LIMIT_NS, FleetController
from fleet.pools.liveness import FROZEN_AFTER_S, Life, ShellProcess
from fleet.pools.lives import LifeTable
from fleet.pools.placement import Placements
from fleet.pools.planning import RolePlanning
from fleet.pools.ray_process import log_to
from fleet.pools.resources import NAMESPACE, ControllerSpec, controller_name, exit_reason
from fleet.pools.sealing import unseal
from fleet.pools.slot_records import SlotRecords
from fleet.pools.slots import Action, ChangeRole, Drain, Launch, Remove, Stop
from fleet.pools.worker_actors import WorkerActors

_LOG = logging.getLogger("fleet.pools.controller")

_REFRESH_S = 5.0  # of the slots' records in Redis
_STEP_S = 0.25
_NODES_EVERY_S = 2.0
_STOP_LIMIT_S = 4.0
_NS = 1_000_000_000
_PLACE_LIMIT_NS = 3600 * _NS  # for a node that an autoscaler starts


class ControllerActor:
    """Executes the actions of the state machine; ``spec`` is JSON, plain or sealed."""

    def __init__(self, spec: bytes) -> None:
        self._spec = msgspec.json.decode(unseal(spec.decode()), type=ControllerSpec)
        self._config = FleetConfig.model_validate_json(self._spec.config_json).lanes[0]
        name = f"{worker_prefix(self._config.fleet)}controller.log"
        log_to(Path(self._spec.log_dir) / name, self._config.logs.format, fleet=self._config.fleet)
        self._registry = Registry(self._spec.redis_url, self._config.fleet)
        self._orders = AdminCommands(self._registry)
        self._audit = AuditLog(AuditInbox(self._registry.of_whole_fleet()))
        self._tasks = BackgroundTasks("controller")
        # Without a host, workers bind their node's own address: they are on a cluster.
        self._placements = Placements(self._config, self._tasks, chooses=not self._spec.host)
        pools = self._config.pools
        self._begin_with(sizes_in(pools.start_sizes))
        self._lives = LifeTable()
        self._actors = WorkerActors(self._config, self._spec)
        self._records = SlotRecords(self._registry, self._config)
        self._placing: dict[str, asyncio.Event] = {}  # set to abort the start of an incarnation
        self._beginning = asyncio.Lock()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._running = False
        self._wanted_state = WantedState(self._registry, self._spec.digest, self._placements)

    async def run(self) -> None:
        """Start, also after a restart of this actor. Repeated calls have no effect."""
        async with self._beginning:
            if self._running:
                return
            state = await self._wanted_state.read()
            if state is not None and state.pools:
                self._begin_with(sizes_in(state.pools))
            await self._records.learn(self._machine)
            await self._adopt(state)
            self._audit.start()
            self._tasks.keep(self._loop, "controller loop")
            self._tasks.keep(self._answer_operators, "operators")
            self._tasks.keep(self._watch_nodes, "nodes")
            followed = partial(end_strangers, self._config.fleet, self._lives)
            self._tasks.keep(followed, "strangers")
            planned = AuditedChanges(self._desk, self._audit)
            self._tasks.keep(partial(self._desk.planning.run, planned), "planner")
            self._running = True

    async def identity(self) -> tuple[str, str]:
        """Return the id of the node, and the digest of the specification."""
        return ray.get_runtime_context().get_node_id(), self._spec.digest

    async def status(self) -> list[dict[str, Any]]:
        """Return worker_id, phase, epoch, reason and node of each slot."""
        return self._desk.slots()

    async def stop(self, limit_s: float = 6.0) -> bool:
        """Stop all workers and release their placements; return whether all stopped in time."""
        self._apply(self._machine.stop(monotonic_ns()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        for life in self._lives.values():
            life.end()
        self._placements.remove_all()
        with contextlib.suppress(RegistryUnavailableError):
            await wanted.forget(self._registry)
        return self._machine.idle

    async def close(self) -> None:
        """Close this controller, but leave the workers running for another one to adopt."""
        await self._tasks.close()
        await self._audit.close()
        await self._registry.close()

    async def _loop(self) -> None:
        next_refresh_s = 0.0
        while True:
            self._apply(self._machine.tick(monotonic_ns()))
            self._wake.clear()
            if time.monotonic() >= next_refresh_s:
                next_refresh_s = time.monotonic() + _REFRESH_S
                self._tasks.spawn(self._refresh(), "refresh")
            wait_s = (self._machine.next_due_ns - monotonic_ns()) / _NS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(wait_s, 0.0), 1.0)):
                    await self._wake.wait()

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self._follow(action, self._live(action))
                case Drain():
                    self._tasks.spawn(self._drain(action), "drain")
                case Stop():
                    self._tasks.spawn(self._stop(action), "stop")
                case WorkerRecord():
                    _LOG.info(
                        "worker=%s epoch=%d is %s %s",
                        action.worker_id,
                        action.epoch,
                        action.state,
                        action.reason,
                    )
                    self._tasks.spawn(self._records.write(action), "publish")
                case ChangeRole():
                    _LOG.info("worker=%s turns to role=%s", action.worker_id, action.role)
                    self._tasks.spawn(self._turn(action), "turn")
                case Remove():
                    self._placements.remove(action.worker_id)
        self._wake.set()
        if self._machine.stopped and self._machine.idle:
            self._idle.set()

    def _follow(
        self, launch: Launch, work: Coroutine[Any, Any, None], adopted: Life | None = None
    ) -> None:
        """Run an incarnation; an error here ends it, so that its slot does not wait forever."""

        def lost(error: Exception) -> None:
            life = adopted or self._lives.of(launch.worker_id, launch.epoch)
            epoch = launch.epoch
            if life is not None:
                epoch = life.epoch
                self._lives.remove(launch.worker_id, life)
                life.end()
            reason = f"the controller failed to follow it: {error!r}"
            self._apply(self._machine.ended(launch.worker_id, epoch, reason, monotonic_ns()))

        self._tasks.vital(work, "life", lost)

    async def _live(self, launch: Launch) -> None:
        worker_id = launch.worker_id
        epoch = launch.epoch
        if launch.reuse and (last := self._lives.kept.pop(worker_id, None)) is not None:
            record = last.actor.begin_next_life.remote(self._actors.settings(launch))
            await self._watch(worker_id, Life(epoch, last.actor, last.named), record)
            return
        unwanted = self._placing[worker_id] = asyncio.Event()
        try:
            group = await self._placements.place(worker_id, launch.role, unwanted, move=launch.move)
            self._machine.placed(worker_id, epoch, monotonic_ns())
            if not self._machine.wants(worker_id, epoch):
                reason = "stopped before it was placed"
                self._apply(self._machine.ended(worker_id, epoch, reason, monotonic_ns()))
                return
            actor = self._actors.start(launch, group)
        except (RayError, RuntimeError, ValueError) as error:
            self._apply(
                self._machine.ended(worker_id, epoch, f"cannot place: {error}", monotonic_ns())
            )
            return
        finally:
            self._placing.pop(worker_id, None)
        await self._watch(worker_id, Life(epoch, actor, epoch), actor.start.remote())

    async def _watch(self, worker_id: str, life: Life, record: Awaitable[bytes]) -> None:
        """Follow an incarnation; ``record`` completes when it has started."""
        reusable = False
        if (earlier := self._lives.add(worker_id, life)) is not None:
            earlier.end()
        incarnation = b""
        try:
            async with self._tasks.beside(life.ask(), "ask"):
                raw = await record
                started = msgspec.msgpack.decode(raw, type=WorkerRecord)
                incarnation = started.incarnation
                self._actors.note_blocks(started)
                self._apply(self._machine.started(worker_id, life.epoch, monotonic_ns()))
                reason = await self._until_it_ends(life)
                reusable = True
        except RayTaskError as error:
            reason = f"failed: {error.cause!r}"
        except RayActorError:
            reason = "its process died"
        except TimeoutError:
            reason = f"frozen: no response for {FROZEN_AFTER_S:g} s"
        except RayError as error:  # its node died, it cannot be scheduled, ...
            reason = f"lost: {error!r}"
        self._lives.remove(worker_id, life)
        actions = self._machine.ended(
            worker_id, life.epoch, reason, monotonic_ns(), reusable=reusable
        )
        if any(isinstance(action, Launch) and action.reuse for action in actions):
            self._lives.kept[worker_id] = life
        else:
            life.end()
        with contextlib.suppress(RegistryUnavailableError):
            await self._registry.blocks.forget(incarnation)
        self._apply(actions)

    async def _until_it_ends(self, life: Life) -> str:
        """Return the exit reason of an incarnation; raise TimeoutError if it freezes."""
        async with asyncio.timeout(None) as patience:

            async def lose_patience() -> None:
                await life.freeze()
                patience.reschedule(asyncio.get_running_loop().time())

            async with self._tasks.beside(lose_patience(), "freeze"):
                return exit_reason(await life.actor.wait.remote())

    async def _watch_nodes(self) -> None:
        """End workers on lost nodes: Ray reports the running ones, but not those that start."""
        while True:
            await asyncio.sleep(_NODES_EVERY_S)
            for worker_id in await self._placements.lost():
                if (life := self._lives.get(worker_id)) is not None:
                    _LOG.info("ending worker=%s epoch=%d: its node is lost", worker_id, life.epoch)
                    life.end()

    async def _drain(self, drain: Drain) -> None:
        life = self._lives.of(drain.worker_id, drain.epoch)
        if life is not None:
            with contextlib.suppress(RayError):
                await life.actor.drain.remote(drain.timeout_ns / _NS)
        self._apply(self._machine.drained(drain.worker_id, drain.epoch, monotonic_ns()))

    async def _stop(self, stop: Stop) -> None:
        life = self._lives.of(stop.worker_id, stop.epoch)
        if life is None:
            if (unwanted := self._placing.get(stop.worker_id)) is not None:
                unwanted.set()
            else:
                named = (stop.worker_id, stop.epoch)
                self._apply(self._machine.ended(*named, "its process is gone", monotonic_ns()))
            return
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(_STOP_LIMIT_S):
                await life.actor.stop.remote()
                return  # now `wait` returns in `_watch`
        life.end()

    async def _adopt(self, state: wanted.Wanted | None) -> None:
        """Adopt the running workers, after all of them have been found.

        Workers with other settings are restarted one after another, and those beyond their pool's
        size are drained, once the pool sizes that operators requested are known.
        """
        running, ended = await running_actors(self._config.fleet)
        for worker_id, epoch in ended.items():
            self._machine.note_epoch(worker_id, epoch)
        await self._placements.adopt({worker.worker_id for worker in running})
        changed = []
        for worker in running:
            worker_id = worker.worker_id
            self._machine.adopt(worker.living(), monotonic_ns())
            slot = self._machine.slots[worker_id]
            life = worker.life(slot.epoch)
            _LOG.info("adopting worker=%s epoch=%d", worker_id, life.epoch)
            life.on_answer = partial(self._correct, worker_id, life)
            launch = Launch(worker_id, slot.role, slot.epoch)
            work = self._watch(worker_id, life, worker.actor.start.remote())
            self._follow(launch, work, life)
            differs = worker.differs(self._actors.settings_digest(launch))
            if differs or self._placements.outgrown(worker_id):
                changed.append(worker_id)
        self._machine.settle(monotonic_ns(), add=state is None)
        if state is not None:
            await self._desk.apply_wanted(state)
        changed = [name for name in changed if name in self._machine.slots]
        if changed:
            _LOG.info("restarting workers with old settings: %s", ", ".join(changed))
            again = self._machine.restart(changed, monotonic_ns(), rolling=True, revive=False)
            self._apply(again)

    def _correct(self, worker_id: str, life: Life, process: ShellProcess) -> None:
        """Give an adopted incarnation the epoch that it reports."""
        epoch = process.epoch
        if epoch and (actions := self._machine.correct(worker_id, life.epoch, epoch)):
            life.epoch = epoch
            self._apply(actions)

    def _begin_with(self, pools: dict[Role, int]) -> None:
        """Create the state machine and the desk for admin commands."""
        bounds = self._config.pools.bounds
        self._machine = FleetController(
            pools,
            monotonic_ns(),
            self._spec.healthy_after_ns,
            START_LIMIT_NS if bounds is None else _PLACE_LIMIT_NS,
            worker_prefix(self._config.fleet),
        )
        self._placements.role_of = self._role_of
        demands = RouterDemands(self._registry)

        size_planner = None
        if bounds is not None and (slo := self._config.slo) is not None:
            first = sizes_in(self._config.pools.start_sizes)
            after_ns = self._spec.scale_in_after_ns
            size_planner = SizePlanner(*bounds, first, slo.ttft_s, after_ns)
        self._desk = CommandDesk(
            self._config,
            self._machine,
            self._placements,
            demands,
            self._apply,
            monotonic_ns,
            self._spec.log_dir,
            RolePlanning(self._config.slo, demands, size_planner),
            self._ready_workers,
            self._doing,
        )

    def _doing(self, worker_id: str) -> str:
        life = self._lives.get(worker_id)
        return life.doing if life is not None else ""

    def _ready_workers(self) -> list[WorkerState]:
        """Return the load of each ready worker at its last ping, with its present role."""
        slots = [slot for slot in self._machine.slots.values() if slot.ready]
        loads = [
            (slot.role, life.load)
            for slot in slots
            if (life := self._lives.of(slot.worker_id, slot.epoch)) is not None
        ]
        return [msgspec.structs.replace(load, role=role) for role, load in loads if load]

    def _role_of(self, worker_id: str) -> Role:
        slot = self._machine.slots.get(worker_id)
        return slot.role if slot is not None else "decode"

    async def _read_wanted_late(self) -> None:
        """Read the requested state, if Redis was down when this controller started."""
        if not self._wanted_state.known and (state := await self._wanted_state.read()) is not None:
            await self._desk.apply_wanted(state)

    async def _refresh(self) -> None:
        """Rewrite all slots' records before they expire, and the state that operators requested."""
        await self._read_wanted_late()
        await self._records.write(*(slot.describe() for slot in self._machine.slots.values()))
        with contextlib.suppress(RegistryUnavailableError):
            await self._wanted_state.note(self._machine, self._desk.planning)

    async def _turn(self, turn: ChangeRole) -> None:
        """Publish a turn, and send it to the worker, which keeps it beyond a restart of Redis.

        All slots are written at once: a router that has read this turn has read all before it.
        """
        await self._records.write(*(slot.describe() for slot in self._machine.slots.values()))
        life = self._lives.of(turn.worker_id, turn.epoch)
        if life is not None:
            # An actor of an earlier version has no such method; the record of its slot counts.
            with contextlib.suppress(RayError, AttributeError):
                await life.actor.change_role.remote(turn.role, turn.turn)

    async def _answer_operators(self) -> None:
        """Execute admin commands from Redis; a slow command does not delay the next one."""
        while True:
            try:
                order = await self._orders.take()
            except RegistryUnavailableError:
                order = None
            if order is None:
                await asyncio.sleep(_STEP_S)
            else:
                self._tasks.spawn(self._execute(order), "order")

    async def _execute(self, order: AdminCommand) -> None:
        before = self._desk.requested()
        try:
            await self._read_wanted_late()
            if order.verb == "stop":
                answer = CommandReply(data=await self.stop())
            else:
                answer = await self._desk.execute(order)
        except Exception as error:  # noqa: BLE001 - without an answer the operator waits in vain
            _LOG.exception("cannot execute a command: %s", order.verb)
            answer = CommandReply(f"{order.verb} failed: {str(error) or type(error).__name__}")
        await audit_order(self._audit, order, answer, before, self._desk.requested())
        with contextlib.suppress(RegistryUnavailableError):
            await self._wanted_state.note(self._machine, self._desk.planning)
        with contextlib.suppress(RegistryUnavailableError):
            await self._orders.answer(order, answer)
        if order.verb == "stop":
            own = ray.get_actor(controller_name(self._config.fleet), namespace=NAMESPACE)
            ray.kill(own, no_restart=True)
