"""The places of a fleet's replicas: one Ray placement group for each, on a node that we choose.

On a cluster the node is chosen by `fleet.pools.nodes`, and the group is bound to that node by its
address; Ray's own choice knows neither roles nor what has just failed. A group stays with its slot
from life to life, so that weights and adapters are where they were, until its node does not answer
or an operator wants it elsewhere.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from config.fleet_file import FleetConfig
from fleet.pools.nodes import Node, choose
from fleet.pools.resources import bundles
from registry.types import Role
from telemetry.tasks import BackgroundTasks

_LOG = logging.getLogger("fleet.pools.placement")

PLACEMENT_LIMIT_S = 60.0
AVOID_S = 60.0  # a node that failed is taken last for so long
_RESERVE_LIMIT_S = 8.0  # for one group on the node that was chosen
_ANSWER_LIMIT_S = 1.0  # of a node's raylet, when somebody connects
_POLL_S = 0.1
_NODE_SHARE = 0.001  # of the resource that each Ray node has for itself


@dataclass(frozen=True, slots=True)
class Place:
    """Where one slot's lives run."""

    group: PlacementGroup
    address: str  # of the node; empty where Ray chose it
    port: int  # of its raylet
    node_id: str = ""  # Ray's: a node that joins again has a new one
    cpus: tuple[float, ...] = ()  # of each rank, as it was reserved; empty: not known


class Placements:
    """The places of one fleet.

    Args:
        config: The fleet.
        tasks: Where what runs beside belongs to.
        chooses: Whether nodes are chosen here: not on one machine, which has just one.
    """

    def __init__(self, config: FleetConfig, tasks: BackgroundTasks, *, chooses: bool) -> None:
        self._config = config
        self._tasks = tasks
        self._chooses = chooses
        self._places: dict[str, Place] = {}
        self._roles: dict[str, Role] = {}
        self._failed_s: dict[str, float] = {}  # node id -> when
        self._one_by_one = asyncio.Lock()  # what one takes, the next one must see
        self.closed: set[str] = set()  # addresses of nodes that take nothing

    def address_of(self, worker_id: str) -> str:
        """Of the node that a slot's lives run on; empty if it has none, or Ray chose it."""
        place = self._places.get(worker_id)
        return place.address if place is not None else ""

    async def place(
        self, worker_id: str, role: Role, settled: asyncio.Event, *, move: bool = False
    ) -> PlacementGroup:
        """The slot's group, once it is ready or ``settled`` is set: by it, or by who wants no more.

        Args:
            worker_id: The slot.
            role: Its role.
            settled: See above.
            move: Take another node than so far.

        Raises:
            RuntimeError: No node had room for `PLACEMENT_LIMIT_S`.
        """
        avoid: set[str] = set()
        if self.outgrown(worker_id):
            self.remove(worker_id)
        place = self._places.get(worker_id)
        if place is not None and self._chooses and (move or not await self._answers(place)):
            avoid.add(place.address)
            self.remove(worker_id)
            place = None
        try:
            async with asyncio.timeout(PLACEMENT_LIMIT_S):
                if self._chooses:
                    if place is None:
                        place = await self._on_chosen_node(worker_id, role, settled, avoid)
                    settled.set()
                else:
                    if place is None:
                        cpus = self._cpus_of_ranks(role)
                        place = Place(self._reserve(worker_id, role, ""), "", 0, cpus=cpus)
                    self._keep(worker_id, role, place)
                    work = _set_when(place.group.ready(), settled)
                    async with self._tasks.beside(work, "placement"):
                        await settled.wait()
        except TimeoutError as error:
            config = self._config
            raise RuntimeError(
                f"no node had {config.cpus_per_rank:g} free CPUs (cpus_per_rank) for each of "
                f"{config.pools.width(role)} ranks for {PLACEMENT_LIMIT_S:g} s"
            ) from error
        return place.group

    def outgrown(self, worker_id: str) -> bool:
        """Whether a slot's place was reserved for another size than it has now."""
        place = self._places.get(worker_id)
        if place is None or not place.cpus:
            return False
        return place.cpus != self._cpus_of_ranks(self._roles[worker_id])

    async def lost(self) -> set[str]:
        """The slots whose node Ray has given up: what is started there waits for ever."""
        if not self._chooses or not self._places:
            return set()
        alive = {node.id for node in await self.nodes()}
        return {w for w, place in self._places.items() if place.node_id not in alive}

    def remove(self, worker_id: str) -> None:
        """Give a slot's place back."""
        place = self._places.pop(worker_id, None)
        if place is not None:
            remove_placement_group(place.group)

    def remove_all(self) -> None:
        """Give all places back."""
        for worker_id in list(self._places):
            self.remove(worker_id)

    async def adopt(self, worker_ids: Collection[str]) -> None:
        """Take over the groups that an earlier controller left; those of nobody go.

        Args:
            worker_ids: The slots whose lives are still there.
        """
        left, nodes = await asyncio.to_thread(groups_of, self._config.fleet), []
        if left:
            nodes = await self.nodes()
        by_id = {node.id: node for node in nodes}
        for worker_id, (group, node_id, cpus) in left.items():
            node = by_id.get(node_id)
            if worker_id not in worker_ids or (self._chooses and node is None):
                _LOG.info("%s: its place is given back, nobody lives there", worker_id)
                remove_placement_group(group)
                continue
            address, port = (node.address, node.port) if node is not None else ("", 0)
            self._keep(worker_id, role_of(worker_id), Place(group, address, port, node_id, cpus))

    async def nodes(self) -> list[Node]:
        """The cluster's nodes that live. Free CPUs are without what this fleet has been given."""
        found = await asyncio.to_thread(cluster_nodes)
        taken: dict[str, float] = {}
        for worker_id, place in self._places.items():
            cpus = self._cpus(self._roles[worker_id])
            taken[place.address] = taken.get(place.address, 0.0) + cpus
        return [
            replace(n, free_cpus=min(n.free_cpus, n.cpus - taken.get(n.address, 0.0)))
            for n in found
        ]

    async def _on_chosen_node(
        self, worker_id: str, role: Role, unwanted: asyncio.Event, avoid: set[str]
    ) -> Place:
        """A group on the best node, or on the next one if that fails."""
        while True:
            async with self._one_by_one:
                nodes = await self.nodes()
                failed = {n.address for n in nodes if n.id in self._failed_lately()}
                node = choose(
                    role,
                    self._cpus(role),
                    nodes,
                    {w: (p.address, self._roles[w]) for w, p in self._places.items()},
                    closed=self.closed,
                    avoid=avoid | failed,
                )
                if node is not None:
                    group = self._reserve(worker_id, role, node.address)
                    cpus = self._cpus_of_ranks(role)
                    place = Place(group, node.address, node.port, node.id, cpus)
                    self._keep(worker_id, role, place)
                    reserved = False
                    try:
                        reserved = await self._reserved(group, unwanted)
                    finally:
                        if not reserved:  # in time, or at all
                            self.remove(worker_id)
                    if reserved:
                        _LOG.info("%s goes to %s (%s)", worker_id, node.name, node.address)
                        return place
                    avoid.add(node.address)
            if unwanted.is_set():
                raise RuntimeError("stopped before it was placed")
            await asyncio.sleep(_POLL_S if node is not None else 1.0)

    async def _reserved(self, group: PlacementGroup, unwanted: asyncio.Event) -> bool:
        """Whether Ray could reserve a group in time."""
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(_RESERVE_LIMIT_S):
                while not unwanted.is_set():
                    table = await asyncio.to_thread(placement_group_table, group)
                    if table.get("state") == "CREATED":
                        return True
                    await asyncio.sleep(_POLL_S)
        return False

    def _reserve(self, worker_id: str, role: Role, address: str) -> PlacementGroup:
        asked = bundles(self._config, role)
        if address:
            asked = [{**bundle, f"node:{address}": _NODE_SHARE} for bundle in asked]
        # The name has a time in it: Ray frees that of a removed group when it likes.
        return placement_group(
            asked,
            strategy="STRICT_PACK",  # ranks share one memory file
            name=f"{group_stem(self._config.fleet)}{worker_id}.{time.time_ns():x}",
            lifetime="detached",
        )

    def _keep(self, worker_id: str, role: Role, place: Place) -> None:
        self._places[worker_id] = place
        self._roles[worker_id] = role

    def _cpus(self, role: Role) -> float:
        return self._config.cpus_per_rank * self._config.pools.width(role)

    def _cpus_of_ranks(self, role: Role) -> tuple[float, ...]:
        return tuple(bundle["CPU"] for bundle in bundles(self._config, role))

    def _failed_lately(self) -> set[str]:
        since_s = time.monotonic() - AVOID_S
        return {node_id for node_id, at_s in self._failed_s.items() if at_s > since_s}

    async def _answers(self, place: Place) -> bool:
        """Whether Ray counts on the node, and its raylet listens: Ray learns of a death later."""
        alive = {node.id for node in await self.nodes()}
        if place.node_id in alive and await listens(place.address, place.port):
            return True
        _LOG.warning("the node at %s does not answer", place.address)
        self._failed_s[place.node_id] = time.monotonic()
        return False


def role_of(worker_id: str) -> Role:
    """The role in a worker's id."""
    return "prefill" if worker_id.startswith("prefill") else "decode"


async def listens(address: str, port: int) -> bool:
    """Whether a TCP port can be connected to, now."""
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def cluster_nodes() -> list[Node]:
    """The nodes of the cluster that this process is connected to, those that live."""
    free = ray._private.state.available_resources_per_node()  # noqa: SLF001 - a developer API
    nodes = []
    for entry in ray.nodes():
        offered: dict[str, float] = entry["Resources"]
        if not entry["Alive"]:
            continue
        cpus, node_id = offered.get("CPU", 0.0), entry["NodeID"]
        roles: list[Role] = ["prefill", "decode"]
        nodes.append(
            Node(
                id=node_id,
                name=entry["NodeManagerHostname"],
                address=entry["NodeManagerAddress"],
                port=entry["NodeManagerPort"],
                head="node:__internal_head__" in offered,
                cpus=cpus,
                free_cpus=free.get(node_id, {}).get("CPU", 0.0) if node_id in free else cpus,
                roles=frozenset(role for role in roles if offered.get(f"baton_{role}")),
            )
        )
    return nodes


def group_stem(fleet: str) -> str:
    """What the names of a fleet's groups begin with."""
    return f"baton-{fleet}-"


def groups_of(fleet: str) -> dict[str, tuple[PlacementGroup, str, tuple[float, ...]]]:
    """Of a fleet's groups that Ray knows: worker id -> group, id of its node, CPUs of ranks."""
    found: dict[str, tuple[PlacementGroup, str, tuple[float, ...]]] = {}
    stem = group_stem(fleet)
    entries: list[dict[str, Any]] = sorted(
        placement_group_table().values(), key=lambda e: e["name"]
    )
    for entry in entries:
        worker_id = entry["name"].removeprefix(stem).partition(".")[0]
        role, _, index = worker_id.rpartition("-")
        ours = entry["name"].startswith(stem) and role in ("prefill", "decode") and index.isdigit()
        if not ours or entry["state"] == "REMOVED":
            continue
        group = PlacementGroup(ray.PlacementGroupID.from_hex(entry["placement_group_id"]))
        if worker_id in found:  # the older one: a controller has one of each, and removes first
            remove_placement_group(found[worker_id][0])
        node_ids = [node for node in entry.get("bundles_to_node_id", {}).values() if node]
        asked: list[dict[str, float]] = list(entry.get("bundles", {}).values())
        cpus = tuple(bundle.get("CPU", 0.0) for bundle in asked)
        found[worker_id] = (group, node_ids[0] if node_ids else "", cpus)
    return found


async def _set_when(ready: Awaitable[Any], event: asyncio.Event) -> None:
    try:
        await ready
    finally:  # if it failed, to start the actor will fail too, and say why
        event.set()
