"""Admin commands that a running fleet's controller executes.

    ping                                 check that the controller responds
    slots                                worker_id, phase, epoch, reason and node of each slot
    nodes                                the cluster's nodes and their workers
    logs      worker_ids, lines          last lines of the log files of every node
    drain     worker_ids                 drain and stop until restarted
    restart   worker_ids, move           restart at once; ``move``: on another node. Without ids:
                                         all workers except drained ones
    roll      worker_ids, move           restart one after another, each drained first
    scale     prefill, decode            change the pool sizes: turn workers before any starts
    scale     roles                      "auto": the planner changes roles; "hold": it does not
    load      asleep                     start as many workers as the fleet file has; ``asleep``:
                                         only if all are to be stopped
    unload    abort                      drain and stop all workers, until `load`; ``abort``: end
                                         requests with the tokens that they have
    plan                                 the planner's mode and last decisions
    close     node                       place nothing there and move its workers
    open      node                       undo ``close``

``stop`` ends the fleet; the controller itself executes it (`fleet.pools.ray_controller`).
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.config.fleet_file import FleetConfig
from baton.config.pools import MAX_WORKERS
from baton.planner.state import WorkerState
from baton.registry import wanted_sizes as wanted
from baton.registry.admin_commands import AdminCommand, CommandReply
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.router_demands import PlannedSizes, RouterDemands, Sleep
from baton.registry.types import Role
from fleet.pools.balance import LeavingOrder, MayTurn
from fleet.pools.controller import FleetController
from fleet.pools.nodes import CapacityError, Node, check_nodes, usable
from fleet.pools.placement import Placements
from fleet.pools.planning import NO_LIMITS, RolePlanning
from fleet.pools.slots import Action, ChangeRole
from fleet.private_logs import logs_of

MAX_LINES = 2000
_MAX_FILE_BYTES = 64 * 2**10
_READ_LIMIT_S = 20.0
_SILENT_S = 2.0  # a router that has not reported for so long is gone
_FOLLOW_LIMIT_S = 5.0
_FOLLOW_POLL_S = 0.05

_LOG = logging.getLogger("fleet.pools.admin_commands")


@dataclass(frozen=True, slots=True)
class CommandDesk:
    """Executes admin commands; ``apply`` executes the actions of the state machine."""

    config: FleetConfig
    machine: FleetController
    placements: Placements
    demands: RouterDemands
    apply: Callable[[list[Action]], None]
    now_ns: Callable[[], int]
    log_dir: str
    planning: RolePlanning
    loads: Callable[[], Sequence[WorkerState]]  # of the ready workers
    doing: Callable[[str], str]  # what a worker that starts does; ""

    async def execute(self, order: AdminCommand) -> CommandReply:
        """Execute a command; the answer has the problem if it is rejected."""
        if order.verb == "ping":
            return CommandReply()
        if order.verb == "slots":
            return CommandReply(data=self.slots())
        if order.verb == "nodes":
            return CommandReply(data=await self._nodes())
        if order.verb == "logs":
            return await self._logs(order)
        if order.verb == "plan":
            return CommandReply(data=self.planning.describe())
        if order.verb == "scale" and set(order.arguments) == {"roles"}:
            return self._set_planning(order.arguments["roles"])
        if order.verb == "scale":
            return await self._scale(order.arguments)
        if order.verb in ("load", "unload"):
            if order.arguments.get("asleep") and any(self.machine.wanted.values()):
                return CommandReply()
            if order.verb == "load":
                return await self._load("")
            return await self._load("abort" if order.arguments.get("abort") else "wait")
        if order.verb in ("close", "open"):
            return await self._close(str(order.arguments.get("node", "")), order.verb == "close")
        return self._about_workers(order)

    async def apply_wanted(self, state: wanted.Wanted) -> None:
        """Apply the state that operators requested, possibly from an earlier controller."""
        for worker_id in set(state.drained) & set(self.machine.slots):
            self.apply(self.machine.drain(worker_id, self.now_ns()))
        if state.auto is not None:
            self.planning.auto = state.auto and self.planning.possible
        self.planning.asleep = state.asleep
        sizes = sizes_in(state.pools) if state.pools else self.machine.wanted
        placed = any(map(self.placements.addresses_of, self.machine.slots))
        nodes = await self.placements.nodes() if placed else []
        self.apply(self.machine.resize(sizes, self.now_ns(), self._may_turn(nodes)))

    def slots(self) -> list[dict[str, Any]]:
        """Return the slots as plain data."""
        return [
            {
                "worker_id": slot.worker_id,
                "role": slot.role,
                "phase": slot.phase.value,
                "epoch": slot.epoch,
                "reason": slot.reason,
                "doing": self.doing(slot.worker_id),
                "node": self.placements.address_of(slot.worker_id),
                "renewed_later": slot.worker_id in self.machine.rolling,
            }
            for slot in self.machine.slots.values()
        ]

    def requested(self) -> dict[str, Any]:
        """Return the state that operators requested, for the audit log."""
        return {
            "pools": {str(role): size for role, size in self.machine.wanted.items()},
            "closed_nodes": sorted(self.placements.closed),
            "drained": sorted(self.machine.drained_workers),
            "roles": "auto" if self.planning.auto else "hold",
        }

    def _about_workers(self, order: AdminCommand) -> CommandReply:
        names = list(order.worker_ids) or list(self.machine.slots)
        unknown = [name for name in names if name not in self.machine.slots]
        if unknown:
            there = list(self.machine.slots)
            return CommandReply(
                f"no such worker: {', '.join(unknown)} (workers: {', '.join(there)})"
            )
        now_ns = self.now_ns()
        move = bool(order.arguments.get("move"))
        if order.verb == "drain":
            if not order.worker_ids:
                return CommandReply(f"drain needs worker ids (workers: {', '.join(names)})")
            for name in names:
                self.apply(self.machine.drain(name, now_ns))
        elif order.verb in ("restart", "roll"):
            rolling = order.verb == "roll"
            named = bool(order.worker_ids)  # without ids, drained workers stay down
            in_use = set(self.machine.slots) - set(self.machine.drained_workers)
            if rolling and len(in_use) == 1 and in_use <= set(names):
                (alone,) = in_use
                return CommandReply(
                    f"{alone} is the only worker in use: a rolling restart would leave none ready. "
                    "Restart a drained worker first, or use `baton restart`"
                )
            actions = self.machine.restart(names, now_ns, rolling=rolling, move=move, revive=named)
            self.apply(actions)
        else:
            return CommandReply(f"unknown command {order.verb}")
        return CommandReply()

    async def _scale(self, arguments: Mapping[str, Any]) -> CommandReply:
        wanted: dict[str, int] = {str(r): n for r, n in self.machine.wanted.items()}
        for role, size in arguments.items():
            is_size = isinstance(size, int) and 0 <= size <= MAX_WORKERS
            if role not in ("prefill", "decode") or not is_size:
                usage = f"use prefill=N or decode=N, with N up to {MAX_WORKERS}"
                return CommandReply(f"cannot scale {role} to {size}: {usage}")
            wanted[role] = size
        nodes = await self.placements.nodes()
        if why := self._why_not_sizes(wanted, nodes):
            return CommandReply(why)
        await self._sleep("")
        turns = self._resize(sizes_in(wanted), nodes)
        return CommandReply(data=await self._turned(turns) if turns else None)

    async def _load(self, asleep: Sleep) -> CommandReply:
        load = not asleep
        nodes = await self.placements.nodes()
        sizes = sizes_in(self.config.pools.start_sizes if load else {})
        if load and (why := self._why_not_sizes({str(r): n for r, n in sizes.items()}, nodes)):
            return CommandReply(why)
        # The planner must not start workers of an unloaded model.
        self.planning.auto = (
            load and self.planning.possible and self.config.pools.bounds is not None
        )
        await self._sleep(asleep)
        self._resize(sizes, nodes)
        return CommandReply()

    async def _sleep(self, mode: Sleep) -> None:
        """Report to the routers whether requests are refused and ended."""
        self.planning.asleep = mode
        await self.planning.report(PlannedSizes())

    async def resize(self, sizes: Mapping[Role, int]) -> str:
        """Change the pool sizes; return why that is not possible, or ""."""
        nodes = await self.placements.nodes()
        if why := self._why_not_sizes({str(role): size for role, size in sizes.items()}, nodes):
            return why
        self._resize(sizes, nodes)
        return ""

    def _resize(self, sizes: Mapping[Role, int], nodes: Sequence[Node]) -> list[ChangeRole]:
        """Apply the sizes; return the turns among the actions."""
        leaving = self._leaving_order()
        actions = self.machine.resize(sizes, self.now_ns(), self._may_turn(nodes), leaving)
        self.apply(actions)
        return [action for action in actions if isinstance(action, ChangeRole)]

    def _why_not_sizes(self, wanted: Mapping[str, int], nodes: Sequence[Node]) -> str:
        """Return why the pools cannot have these sizes, or "".

        With bounds, workers without room wait for new nodes: their bundles are demand for Ray's
        autoscaler.
        """
        total = sum(wanted.values())
        if (bounds := self.config.pools.bounds) is not None:
            if not bounds.min <= total <= bounds.max:
                return f"{total} workers are outside of pools.auto: {bounds.min} to {bounds.max}"
            return ""
        if not total:
            return "a fleet needs at least one worker; stop it with `baton down`"
        return self._does_not_fit(wanted, nodes, self.placements.closed)

    def _does_not_fit(
        self, sizes: Mapping[str, int], nodes: Sequence[Node], closed: Collection[str]
    ) -> str:
        pools = self.config.pools.model_copy(update=sizes)
        try:
            check_nodes(self.config.model_copy(update={"pools": pools}), nodes, closed)
        except CapacityError as error:
            return str(error)
        return ""

    def _leaving_order(self) -> LeavingOrder:
        """Return the order in which workers leave: those that free a node with the least work."""
        streams = {state.worker_id: state.streams for state in self.loads()}
        workers: Counter[str] = Counter()
        work: Counter[str] = Counter()
        for worker_id in self.machine.slots:
            address = self.placements.address_of(worker_id)
            workers[address] += 1
            work[address] += streams.get(worker_id, 0)

        def order(worker_id: str) -> tuple[int, int, int]:
            address = self.placements.address_of(worker_id)
            return workers[address], work[address], streams.get(worker_id, 0)

        return order

    async def change_role(self, worker_id: str, role: Role) -> str:
        """Give a worker another role; return why it cannot have it, or ""."""
        slot = self.machine.slots.get(worker_id)
        if slot is None or slot.role == role or not slot.ready:
            return "it is no longer a ready worker of the other role"
        if why := self._why_not(worker_id, role, await self.placements.nodes()):
            return why
        self.apply(self.machine.change_role(worker_id, role, self.now_ns()))
        return ""

    def _may_turn(self, nodes: Sequence[Node]) -> MayTurn:
        return lambda worker_id, role: not self._why_not(worker_id, role, nodes)

    def _why_not(self, worker_id: str, role: Role, nodes: Sequence[Node]) -> str:
        """Return why a worker cannot have a role, or ""."""
        if self.config.pools.roles_differ:
            return "the pools have workers of different tensor_parallel widths or `prefill_args`"
        there = {node.address for node in usable(role, nodes, self.placements.closed)}
        outside = set(self.placements.addresses_of(worker_id)) - there
        return f"no {role} worker may be on {', '.join(sorted(outside))}" if outside else ""

    def _set_planning(self, mode: object) -> CommandReply:
        if mode not in ("auto", "hold"):
            return CommandReply(f"roles cannot be {mode!r}: use auto or hold")
        if mode == "auto" and not self.planning.possible:
            return CommandReply(NO_LIMITS)
        self.planning.auto = mode == "auto"
        return CommandReply()

    async def _turned(self, turns: Sequence[ChangeRole]) -> dict[str, Any]:
        """Return the workers that turned, once all live routers place by their new roles."""
        began_ns = self.now_ns()
        behind = await routers_behind(self.demands, max(turn.turn for turn in turns))
        seconds = round((self.now_ns() - began_ns) / 1e9, 2)
        if behind:
            _LOG.warning("routers=%s do not follow a turn", ",".join(behind))
        return {
            "turned": {turn.worker_id: turn.role for turn in turns},
            "seconds": seconds,
            "routers_behind": behind,
        }

    async def _close(self, name: str, close: bool) -> CommandReply:
        nodes = await self.placements.nodes()
        closed = self.placements.closed
        target = next((n for n in nodes if name in (n.name, n.address, n.id)), None)
        if target is None and (close or name not in closed):  # a lost node can be opened
            there = ", ".join(f"{n.name} ({n.address})" for n in nodes)
            return CommandReply(f"no such node: {name} (nodes: {there})")
        address = target.address if target is not None else name
        if not close:
            closed.discard(address)
            return CommandReply()
        sizes = {str(r): n for r, n in self.machine.wanted.items()}
        if why := self._does_not_fit(sizes, nodes, {*closed, address}):
            return CommandReply(f"without {name} the fleet does not fit: {why}")
        closed.add(address)
        moving = [w for w in self.machine.slots if address in self.placements.addresses_of(w)]
        if moving:
            actions = self.machine.restart(
                moving, self.now_ns(), rolling=True, move=True, revive=False
            )
            self.apply(actions)
        return CommandReply(data=moving)

    async def _nodes(self) -> list[dict[str, Any]]:
        nodes = await self.placements.nodes()
        return [
            {
                "name": node.name,
                "address": node.address,
                "head": node.head,
                "closed": node.address in self.placements.closed,
                "roles": sorted(node.roles),
                "cpus": node.cpus,
                "free_cpus": node.free_cpus,
                "gpus": node.gpus,
                "free_gpus": node.free_gpus,
                "workers": [
                    worker_id
                    for worker_id in self.machine.slots
                    if self.placements.is_on(worker_id, node, nodes)
                ],
            }
            for node in nodes
        ]

    async def _logs(self, order: AdminCommand) -> CommandReply:
        lines = int(order.arguments.get("lines", 50))
        name = order.worker_ids[0] if order.worker_ids else ""
        if not 0 < lines <= MAX_LINES or not all(c.isalnum() or c == "-" for c in name):
            return CommandReply(f"logs needs a process such as worker-0 and 1 to {MAX_LINES} lines")
        nodes = await self.placements.nodes()
        texts = await asyncio.gather(*(self._read(node, name, lines) for node in nodes))
        return CommandReply(data={n.name: text for n, text in zip(nodes, texts, strict=True)})

    async def _read(self, node: Node, name: str, lines: int) -> dict[str, str]:
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        reader = ray.remote(read_logs).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(_READ_LIMIT_S):
                texts: dict[str, str] = await reader.remote(self.log_dir, name, lines)
                return texts
        return {"": f"{node.name} did not respond within {_READ_LIMIT_S:g} s"}


@dataclass(slots=True)
class WantedState:
    """State that operators requested beyond the fleet file, kept in Redis for the next controller.

    ``of`` is the digest of the controller's specification.
    """

    registry: Registry
    of: str
    placements: Placements
    known: bool = False  # whether it has been read

    async def read(self) -> wanted.Wanted | None:
        """Read the state and close its nodes; return None if Redis is down."""
        try:
            state = await wanted.read(self.registry, self.of)
        except RegistryUnavailableError:
            return None
        self.placements.closed |= set(state.closed_nodes)
        self.known = True
        return state

    async def note(self, machine: FleetController, planning: RolePlanning) -> None:
        """Write the state. Called regularly: a restarted Redis is empty, and the key expires."""
        if not self.known or machine.stopped:
            return
        state = wanted.Wanted(
            of=self.of,
            pools={str(role): size for role, size in machine.wanted.items()},
            closed_nodes=tuple(sorted(self.placements.closed)),
            drained=machine.drained_workers,
            auto=planning.auto,
            asleep=planning.asleep,
        )
        await wanted.write(self.registry, state)


async def routers_behind(demands: RouterDemands, turn: int) -> list[str]:
    """Wait until all live routers place by a turn; return those that do not within a limit.

    A router that is gone leaves its last load behind, so only one that reports is waited for.
    """
    beats: dict[str, int] = {}
    reporting: set[str] = set()
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        try:
            reported = await demands.read()
        except RegistryUnavailableError:
            reported = {}
        for name, demand in reported.items():
            if beats.setdefault(name, demand.beat) != demand.beat:
                reporting.add(name)
        behind = sorted(name for name, demand in reported.items() if demand.turn < turn)
        if waited_s >= _SILENT_S:
            behind = [name for name in behind if name in reporting]
        if not behind and (reported or waited_s >= _SILENT_S):
            return []
        if waited_s >= _FOLLOW_LIMIT_S:
            return behind
        await asyncio.sleep(_FOLLOW_POLL_S)


def sizes_in(pools: Mapping[str, int]) -> dict[Role, int]:
    """Return the number of replicas by role; 0 for a missing role."""
    return {"prefill": pools.get("prefill", 0), "decode": pools.get("decode", 0)}


def read_logs(folder: str, name: str, lines: int) -> dict[str, str]:
    """Return file name -> last lines, of the logs in a folder whose names start with ``name``."""
    texts = {}
    for file in logs_of(name, Path(folder)):
        with contextlib.suppress(OSError), file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - _MAX_FILE_BYTES))
            text = stream.read().decode(errors="replace")
            texts[file.name] = "\n".join(text.splitlines()[-lines:])
    return texts
