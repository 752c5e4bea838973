"""Placement of a fleet's replicas: one Ray placement group each.

On a cluster `fleet.pools.nodes` chooses the node, and the group is bound to the node's address: Ray
itself considers neither roles nor recent failures. A slot keeps its group, so that weights and
adapters are still on the node, until the node fails or an operator moves the slot.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from baton.config.fleet_file import FleetConfig
from baton.registry.types import Role, is_worker_name
from baton.telemetry.tasks import BackgroundTasks
from baton.types.lanes import worker_prefix
from fleet.pools.nodes import Node, choose, need_of, usable
from fleet.pools.resources import bundles

_LOG = logging.getLogger("fleet.pools.placement")

PLACEMENT_LIMIT_S = 60.0
AVOID_S = 60.0  # time for which a failed node is used last
_RESERVE_LIMIT_S = 8.0  # for one group on its chosen nodes
_ANSWER_LIMIT_S = 1.0  # for a connection to a node's raylet
_POLL_S = 0.1
_NODE_SHARE = 0.001  # of the resource that identifies a Ray node


class Size(NamedTuple):
    """Reservation of one rank."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Place:
    """Placement of one slot."""

    group: PlacementGroup
    nodes: tuple[Node, ...] = ()  # of each rank, the leader's first; empty if Ray chose
    sizes: tuple[Size, ...] = ()  # reserved for each rank; empty: unknown

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of its nodes, each once, the leader's first."""
        return tuple(dict.fromkeys(node.address for node in self.nodes))


class Placements:
    """Placements of one fleet's slots.

    It ``chooses`` nodes on a cluster, but not on a single machine.
    """

    def __init__(self, config: FleetConfig, tasks: BackgroundTasks, *, chooses: bool) -> None:
        self._config = config
        self._tasks = tasks
        self._chooses = chooses
        self._grows = config.pools.bounds is not None
        self._places: dict[str, Place] = {}
        self._failed_s: dict[str, float] = {}  # node id -> when
        self._one_by_one = asyncio.Lock()  # each choice must see the previous reservation
        self.closed: set[str] = set()  # addresses of closed nodes
        self.role_of: Callable[[str], Role] = lambda _: "decode"  # role of a worker, by id

    def address_of(self, worker_id: str) -> str:
        """Return the address of a slot's leader; empty without a placement, or if Ray chose it."""
        return next(iter(self.addresses_of(worker_id)), "")

    def addresses_of(self, worker_id: str) -> tuple[str, ...]:
        """Return the addresses of all nodes of a slot's ranks."""
        place = self._places.get(worker_id)
        return place.addresses if place is not None else ()

    def is_on(self, worker_id: str, node: Node, nodes: Collection[Node]) -> bool:
        """Return whether a slot has a rank on ``node``, one of the cluster's ``nodes``."""
        place = self._places.get(worker_id)
        if place is None:
            return False
        if not place.nodes:  # Ray chose, on a single machine
            return len(nodes) == 1
        return node.address in place.addresses

    async def place(
        self, worker_id: str, role: Role, settled: asyncio.Event, *, move: bool = False
    ) -> PlacementGroup:
        """Return the slot's placement group once it is ready.

        Sets ``settled`` then; a caller sets it to abort the wait. ``move`` requires another node
        than before.

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
            async with asyncio.timeout(None if self._grows else PLACEMENT_LIMIT_S):
                if self._chooses:
                    if place is None:
                        place = await self._on_chosen_node(worker_id, role, settled, avoid)
                    settled.set()
                else:
                    if place is None:
                        sizes = self._sizes(role)
                        place = Place(self._reserve(worker_id, role), sizes=sizes)
                    self._places[worker_id] = place
                    work = _set_when(place.group.ready(), settled)
                    async with self._tasks.beside(work, "placement"):
                        await settled.wait()
        except TimeoutError as error:
            config = self._config
            gpus = config.pools.gpus
            raise RuntimeError(
                f"no node has room for {config.pools.width(role)} ranks of "
                f"{config.cpus_per_rank:g} CPUs (cpus_per_rank)"
                + (f" and {gpus} GPUs (pools.vllm.gpus)" if gpus else "")
                + f" for {PLACEMENT_LIMIT_S:g} s"
            ) from error
        return place.group

    def outgrown(self, worker_id: str) -> bool:
        """Return whether a slot's group was reserved for another size than the present one."""
        place = self._places.get(worker_id)
        if place is None or not place.sizes:
            return False
        role = self.role_of(worker_id)
        return len(place.addresses) > 1 or place.sizes != self._sizes(role)

    async def lost(self) -> set[str]:
        """Return the slots with a lost node, on which a start would wait forever."""
        if not self._chooses or not self._places:
            return set()
        alive = {node.id for node in await self.nodes()}
        return {w for w, p in self._places.items() if {n.id for n in p.nodes} - alive}

    def remove(self, worker_id: str) -> None:
        """Release a slot's placement group."""
        place = self._places.pop(worker_id, None)
        if place is not None:
            remove_placement_group(place.group)

    def remove_all(self) -> None:
        """Release all placement groups."""
        for worker_id in list(self._places):
            self.remove(worker_id)

    async def adopt(self, worker_ids: Collection[str]) -> None:
        """Adopt the groups of these live workers, and release an earlier controller's others."""
        left = await asyncio.to_thread(groups_of, self._config.fleet)
        nodes = []
        if left:
            nodes = await self.nodes()
        by_id = {node.id: node for node in nodes}
        for worker_id, (group, node_ids, sizes) in left.items():
            there = tuple(by_id[node_id] for node_id in node_ids if node_id in by_id)
            lost = not there or len(there) < len(node_ids)
            if worker_id not in worker_ids or (self._chooses and lost):
                _LOG.info("releasing unused placement group of worker=%s", worker_id)
                remove_placement_group(group)
                continue
            self._places[worker_id] = Place(group, there, sizes)

    async def nodes(self) -> list[Node]:
        """Return the cluster's live nodes; what is free excludes this fleet's reservations."""
        listed = await asyncio.to_thread(cluster_nodes)
        ranks = Counter(node.address for place in self._places.values() for node in place.nodes)
        cpus = self._config.cpus_per_rank
        gpus = self._config.pools.gpus
        return [
            replace(
                node,
                free_cpus=min(node.free_cpus, node.cpus - cpus * ranks[node.address]),
                free_gpus=min(node.free_gpus, node.gpus - gpus * ranks[node.address]),
            )
            for node in listed
        ]

    async def _on_chosen_node(
        self, worker_id: str, role: Role, unwanted: asyncio.Event, avoid: set[str]
    ) -> Place:
        """Reserve a group on the best nodes, or on the next ones if that fails."""
        while True:
            async with self._one_by_one:
                chosen = self._choice(role, await self.nodes(), avoid)
                if chosen:
                    group = self._reserve(worker_id, role, chosen)
                    place = Place(group, tuple(chosen), self._sizes(role))
                    self._places[worker_id] = place
                    reserved = False
                    try:
                        reserved = await self._reserved(group, unwanted)
                    finally:
                        if not reserved:  # in time, or at all
                            self.remove(worker_id)
                    if reserved:
                        _LOG.info("placing worker=%s on %s", worker_id, _named(chosen))
                        return place
                    avoid.update(place.addresses)
            if unwanted.is_set():
                raise RuntimeError("stopped before it was placed")
            if not chosen and self._grows:
                found = await self._on_new_node(worker_id, role, unwanted, avoid)
                if found is not None:
                    return found
            await asyncio.sleep(_POLL_S if chosen else 1.0)

    async def _on_new_node(
        self, worker_id: str, role: Role, unwanted: asyncio.Event, avoid: set[str]
    ) -> Place | None:
        """Reserve a group on any node; while none has room, it is demand for Ray's autoscaler.

        Returns None if a chosen node has room meanwhile, or if Ray's choice breaks a rule.
        """
        reserved = any(role in node.roles for node in await self.nodes())
        group = self._reserve(worker_id, role, reserved=reserved)
        _LOG.info("waiting for a node: worker=%s", worker_id)
        place = None
        try:
            while not unwanted.is_set():
                if await self._reserved(group, unwanted):
                    place = await self._accepted(group, role, avoid)
                    break
                if self._choice(role, await self.nodes(), avoid):
                    break
        finally:
            if place is None:
                remove_placement_group(group)
        if place is not None:
            self._places[worker_id] = place
            _LOG.info("placing worker=%s on %s", worker_id, _named(place.nodes))
        return place

    async def _accepted(
        self, group: PlacementGroup, role: Role, avoid: Collection[str]
    ) -> Place | None:
        """Return the place of a group that Ray has put somewhere, or None if a rule forbids it."""
        table = await asyncio.to_thread(placement_group_table, group)
        by_bundle: dict[int, str] = table.get("bundles_to_node_id", {})
        nodes = await self.nodes()
        by_id = {node.id: node for node in usable(role, nodes, self.closed)}
        ids = [node_id for _, node_id in sorted(by_bundle.items())]
        there = [by_id[node_id] for node_id in ids if node_id in by_id]
        if len(there) == len(ids) and not {node.address for node in there} & set(avoid):
            return Place(group, tuple(there), self._sizes(role))
        _LOG.warning(
            "Ray reserved room for a %s worker on a node that may not have one. If this is Ray's "
            "head, start it with --num-cpus=0, so that the cluster grows instead",
            role,
        )
        return None

    def _choice(self, role: Role, nodes: Sequence[Node], avoid: Collection[str]) -> list[Node]:
        """Return the best nodes for a replica, or an empty list without room."""
        failed = {node.address for node in nodes if node.id in self._failed_lately()}
        return choose(
            need_of(self._config, role),
            nodes,
            {w: (p.addresses, self.role_of(w)) for w, p in self._places.items()},
            closed=self.closed,
            avoid={*avoid, *failed},
        )

    async def _reserved(self, group: PlacementGroup, unwanted: asyncio.Event) -> bool:
        """Wait until Ray has reserved a group; return False on a timeout."""
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(_RESERVE_LIMIT_S):
                while not unwanted.is_set():
                    table = await asyncio.to_thread(placement_group_table, group)
                    if table.get("state") == "CREATED":
                        return True
                    await asyncio.sleep(_POLL_S)
        return False

    def _reserve(
        self, worker_id: str, role: Role, nodes: Sequence[Node] = (), *, reserved: bool = False
    ) -> PlacementGroup:
        """Request a group on these nodes, or anywhere; ``reserved``: on nodes of the role."""
        asked = bundles(self._config, role)
        if reserved:
            asked = [{**bundle, f"baton_{role}": _NODE_SHARE} for bundle in asked]
        if nodes:
            asked = [
                {**bundle, f"node:{node.address}": _NODE_SHARE}
                for bundle, node in zip(asked, nodes, strict=True)
            ]
        # The name includes the time, as Ray frees names of removed groups with a delay.
        return placement_group(
            asked,
            strategy="STRICT_PACK",  # ranks are processes of one host
            name=f"{group_stem(self._config.fleet)}{worker_id}.{time.time_ns():x}",
            lifetime="detached",
        )

    def _sizes(self, role: Role) -> tuple[Size, ...]:
        return tuple(_size(bundle) for bundle in bundles(self._config, role))

    def _failed_lately(self) -> set[str]:
        since_s = time.monotonic() - AVOID_S
        return {node_id for node_id, at_s in self._failed_s.items() if at_s > since_s}

    async def _silent(self, place: Place) -> set[str]:
        """Return its nodes that Ray has given up, or whose raylets do not listen, as addresses.

        Ray notices a dead node later than a failed connection does.
        """
        alive = {node.id for node in await self.nodes()}
        silent = [
            node
            for node in {node.id: node for node in place.nodes}.values()
            if not (node.id in alive and await listens(node.address, node.port))
        ]
        for node in silent:
            _LOG.warning("avoiding node=%s: it does not respond", node.address)
            self._failed_s[node.id] = time.monotonic()
        return {node.address for node in silent}


async def listens(address: str, port: int) -> bool:
    """Return whether a TCP port accepts connections."""
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
    """Return the live nodes of the cluster that this process is connected to."""
    free = ray._private.state.available_resources_per_node()  # noqa: SLF001 - a developer API
    nodes = []
    for entry in ray.nodes():
        offered: dict[str, float] = entry["Resources"]
        if not entry["Alive"]:
            continue
        cpus = offered.get("CPU", 0.0)
        gpus = offered.get("GPU", 0.0)
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
                gpus=gpus,
                free_gpus=free.get(node_id, {}).get("GPU", 0.0) if node_id in free else gpus,
                roles=frozenset(role for role in roles if offered.get(f"baton_{role}")),
            )
        )
    return nodes


def group_stem(fleet: str) -> str:
    """Return the prefix of the names of a fleet's groups."""
    return f"baton-{fleet}-"


def groups_of(fleet: str) -> dict[str, tuple[PlacementGroup, tuple[str, ...], tuple[Size, ...]]]:
    """Return worker id -> (group, node ids of its ranks, reservations of its ranks)."""
    groups: dict[str, tuple[PlacementGroup, tuple[str, ...], tuple[Size, ...]]] = {}
    stem = group_stem(fleet)
    entries: list[dict[str, Any]] = sorted(
        placement_group_table().values(), key=lambda e: e["name"]
    )
    for entry in entries:
        worker_id = entry["name"].removeprefix(stem).partition(".")[0]
        of_lane = worker_prefix(fleet)
        ours = entry["name"].startswith(stem) and is_worker_name(worker_id, of_lane)
        if not ours or entry["state"] == "REMOVED":
            continue
        group = PlacementGroup(ray.PlacementGroupID.from_hex(entry["placement_group_id"]))
        if worker_id in groups:  # two groups of a slot: release the older one
            remove_placement_group(groups[worker_id][0])
        by_bundle: dict[int, str] = entry.get("bundles_to_node_id", {})
        node_ids = tuple(node for _, node in sorted(by_bundle.items()) if node)
        asked: list[dict[str, float]] = list(entry.get("bundles", {}).values())
        groups[worker_id] = (group, node_ids, tuple(_size(bundle) for bundle in asked))
    return groups


def _size(bundle: Mapping[str, float]) -> Size:
    return Size(bundle.get("CPU", 0.0), bundle.get("GPU", 0.0))


def _named(nodes: Sequence[Node]) -> str:
    return " + ".join(f"{node.name} ({node.address})" for node in nodes)


async def _set_when(ready: Awaitable[Any], event: asyncio.Event) -> None:
    try:
        await ready
    finally:  # if this failed, the start of the actor fails with the reason
        event.set()
