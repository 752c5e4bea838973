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
from collections.abc import Awaitable, Collection, Sequence
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

from baton.config.fleet_file import FleetConfig
from baton.registry.types import Role
from baton.telemetry.tasks import BackgroundTasks
from fleet.pools.nodes import Node, choose
from fleet.pools.resources import bundles

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
    nodes: tuple[Node, ...] = ()  # of each rank, the leader's first; empty where Ray chose
    cpus: tuple[float, ...] = ()  # of each rank, as it was reserved; empty: not known

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of its nodes, each once, the leader's first."""
        return tuple(dict.fromkeys(node.address for node in self.nodes))


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
        """Of the node that a slot's lives run on; empty if it has none, or Ray chose it.

        Of ranks on several nodes it is the leader's.
        """
        return next(iter(self.addresses_of(worker_id)), "")

    def addresses_of(self, worker_id: str) -> tuple[str, ...]:
        """Of all nodes that a slot's ranks are on."""
        place = self._places.get(worker_id)
        return place.addresses if place is not None else ()

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
        if place is not None and self._chooses:
            avoid |= set(place.addresses) if move else await self._silent(place)
            if avoid:
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
                        place = Place(self._reserve(worker_id, role), cpus=cpus)
                    self._keep(worker_id, role, place)
                    work = _set_when(place.group.ready(), settled)
                    async with self._tasks.beside(work, "placement"):
                        await settled.wait()
        except TimeoutError as error:
            config = self._config
            who = "the nodes together had not" if config.pools.ranks_apart(role) else "no node had"
            raise RuntimeError(
                f"{who} {config.cpus_per_rank:g} free CPUs (cpus_per_rank) for each of "
                f"{config.pools.width(role)} ranks for {PLACEMENT_LIMIT_S:g} s"
            ) from error
        return place.group

    def outgrown(self, worker_id: str) -> bool:
        """Whether a slot's place was reserved for another size than it has now."""
        place = self._places.get(worker_id)
        if place is None or not place.cpus:
            return False
        role = self._roles[worker_id]
        spread = len(place.addresses) > 1 and not self._config.pools.ranks_apart(role)
        return spread or place.cpus != self._cpus_of_ranks(role)

    async def lost(self) -> set[str]:
        """The slots with a node that Ray has given up: what is started there waits for ever."""
        if not self._chooses or not self._places:
            return set()
        alive = {node.id for node in await self.nodes()}
        return {w for w, p in self._places.items() if {n.id for n in p.nodes} - alive}

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
        left = await asyncio.to_thread(groups_of, self._config.fleet)
        nodes = []
        if left:
            nodes = await self.nodes()
        by_id = {node.id: node for node in nodes}
        for worker_id, (group, node_ids, cpus) in left.items():
            there = tuple(by_id[node_id] for node_id in node_ids if node_id in by_id)
            lost = not there or len(there) < len(node_ids)
            if worker_id not in worker_ids or (self._chooses and lost):
                _LOG.info("%s: its place is given back, nobody lives there", worker_id)
                remove_placement_group(group)
                continue
            self._keep(worker_id, role_of(worker_id), Place(group, there, cpus))

    async def nodes(self) -> list[Node]:
        """The cluster's nodes that live. Free CPUs are without what this fleet has been given."""
        found = await asyncio.to_thread(cluster_nodes)
        taken: dict[str, float] = {}
        for place in self._places.values():
            for node in place.nodes:
                taken[node.address] = taken.get(node.address, 0.0) + self._config.cpus_per_rank
        return [
            replace(n, free_cpus=min(n.free_cpus, n.cpus - taken.get(n.address, 0.0)))
            for n in found
        ]

    async def _on_chosen_node(
        self, worker_id: str, role: Role, unwanted: asyncio.Event, avoid: set[str]
    ) -> Place:
        """A group on the best nodes, or on the next ones if one of these fails."""
        while True:
            async with self._one_by_one:
                nodes = await self.nodes()
                failed = {n.address for n in nodes if n.id in self._failed_lately()}
                chosen = choose(
                    role,
                    self._config.cpus_per_rank,
                    nodes,
                    {w: (p.addresses, self._roles[w]) for w, p in self._places.items()},
                    ranks=self._config.pools.width(role),
                    apart=self._config.pools.ranks_apart(role),
                    closed=self.closed,
                    avoid=avoid | failed,
                )
                if chosen:
                    group = self._reserve(worker_id, role, chosen)
                    place = Place(group, tuple(chosen), self._cpus_of_ranks(role))
                    self._keep(worker_id, role, place)
                    reserved = False
                    try:
                        reserved = await self._reserved(group, unwanted)
                    finally:
                        if not reserved:  # in time, or at all
                            self.remove(worker_id)
                    if reserved:
                        named = " + ".join(f"{node.name} ({node.address})" for node in chosen)
                        _LOG.info("%s goes to %s", worker_id, named)
                        return place
                    avoid.update(place.addresses)
            if unwanted.is_set():
                raise RuntimeError("stopped before it was placed")
            await asyncio.sleep(_POLL_S if chosen else 1.0)

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

    def _reserve(self, worker_id: str, role: Role, nodes: Sequence[Node] = ()) -> PlacementGroup:
        asked = bundles(self._config, role)
        if nodes:
            asked = [
                {**bundle, f"node:{node.address}": _NODE_SHARE}
                for bundle, node in zip(asked, nodes, strict=True)
            ]
        # The name has a time in it: Ray frees that of a removed group when it likes.
        return placement_group(
            asked,
            # Unless they are placed each by itself, ranks are processes of one host.
            strategy="PACK" if self._config.pools.ranks_apart(role) else "STRICT_PACK",
            name=f"{group_stem(self._config.fleet)}{worker_id}.{time.time_ns():x}",
            lifetime="detached",
        )

    def _keep(self, worker_id: str, role: Role, place: Place) -> None:
        self._places[worker_id] = place
        self._roles[worker_id] = role

    def _cpus_of_ranks(self, role: Role) -> tuple[float, ...]:
        return tuple(bundle["CPU"] for bundle in bundles(self._config, role))

    def _failed_lately(self) -> set[str]:
        since_s = time.monotonic() - AVOID_S
        return {node_id for node_id, at_s in self._failed_s.items() if at_s > since_s}

    async def _silent(self, place: Place) -> set[str]:
        """Addresses of its nodes that Ray does not count on, or whose raylets do not listen.

        Ray hears of a death later.
        """
        alive = {node.id for node in await self.nodes()}
        silent = [
            node
            for node in {node.id: node for node in place.nodes}.values()
            if not (node.id in alive and await listens(node.address, node.port))
        ]
        for node in silent:
            _LOG.warning("the node at %s does not answer", node.address)
            self._failed_s[node.id] = time.monotonic()
        return {node.address for node in silent}


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
        cpus = offered.get("CPU", 0.0)
        node_id = entry["NodeID"]
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


def groups_of(
    fleet: str,
) -> dict[str, tuple[PlacementGroup, tuple[str, ...], tuple[float, ...]]]:
    """Of a fleet's groups that Ray knows: worker id -> group, node ids of ranks, their CPUs."""
    found: dict[str, tuple[PlacementGroup, tuple[str, ...], tuple[float, ...]]] = {}
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
        by_bundle: dict[int, str] = entry.get("bundles_to_node_id", {})
        node_ids = tuple(node for _, node in sorted(by_bundle.items()) if node)
        asked: list[dict[str, float]] = list(entry.get("bundles", {}).values())
        cpus = tuple(bundle.get("CPU", 0.0) for bundle in asked)
        found[worker_id] = (group, node_ids, cpus)
    return found


async def _set_when(ready: Awaitable[Any], event: asyncio.Event) -> None:
    try:
        await ready
    finally:  # if it failed, to start the actor will fail too, and say why
        event.set()
