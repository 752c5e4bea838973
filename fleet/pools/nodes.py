"""Choice of nodes for replicas, and the check whether a fleet fits a cluster. Does no I/O.

The rules, hard ones first:

1. A closed node gets no replica (``baton drain --node``).
2. If nodes offer the custom resource ``baton_prefill`` or ``baton_decode``, only they get that
   role: ``ray start --resources='{"baton_decode": 1}'`` reserves a node.
3. Ray's head gets no replica unless it is the only node.
4. A node that has failed recently is used last.
5. Replicas of a role are spread over nodes, then replicas of all roles.
6. All ranks of a replica go to one node.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

from baton.config.fleet_file import FleetConfig
from baton.registry.types import Role, worker_name
from baton.types.lanes import worker_prefix

_ROLES: tuple[Role, ...] = get_args(Role)
_ROUNDING = 1e-9  # fractions such as 0.1 do not add up exactly


class CapacityError(RuntimeError):
    """The cluster is unusable or cannot hold the fleet; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a Ray cluster.

    Attributes:
        id: Ray's id, new with each start of the node.
        port: Port of the raylet.
        head: Whether Ray's head runs there.
        roles: Roles that the node is reserved for; empty: not reserved.
    """

    id: str
    name: str
    address: str
    port: int = 0
    head: bool = False
    cpus: float = 0.0
    free_cpus: float = 0.0
    gpus: float = 0.0
    free_gpus: float = 0.0
    roles: frozenset[Role] = frozenset()


def usable(role: Role, nodes: Sequence[Node], closed: Collection[str] = ()) -> list[Node]:
    """Return the nodes that may get a replica of this role, by the hard rules."""
    workers = [node for node in nodes if not node.head and node.cpus > 0] or list(nodes)
    reserved = any(role in node.roles for node in workers)
    return [
        node
        for node in workers
        if node.address not in closed and (role in node.roles or not reserved)
    ]


class ReplicaNeed(NamedTuple):
    """Room that a replica needs; ``cpus`` and ``gpus`` are those of one rank."""

    role: Role
    cpus: float
    ranks: int = 1
    gpus: int = 0


def need_of(config: FleetConfig, role: Role) -> ReplicaNeed:
    """Return the room that a replica of a lane needs."""
    return ReplicaNeed(role, config.cpus_per_rank, config.pools.width(role), config.pools.gpus)


def choose(
    need: ReplicaNeed,
    nodes: Sequence[Node],
    placed: Mapping[str, tuple[Collection[str], Role]],
    *,
    closed: Collection[str] = (),
    avoid: Collection[str] = (),
) -> list[Node]:
    """Return the node of each rank of a replica, the leader's first; empty without room.

    ``placed`` has the other replicas: worker id -> (addresses of its ranks, role). ``closed`` and
    ``avoid`` are addresses of nodes; those to avoid are used only if the others have no room.
    """

    def order(node: Node) -> tuple[int, int, float, str]:
        here = [held for addresses, held in placed.values() if node.address in addresses]
        return here.count(need.role), len(here), -node.free_cpus, node.address

    able = sorted(usable(need.role, nodes, closed), key=order)
    wanted = [node for node in able if node.address not in avoid]
    for among in (wanted, wanted + [node for node in able if node.address in avoid]):
        room = {
            node.id: _room(node.free_cpus, node.free_gpus, need.cpus, need.gpus) for node in among
        }
        if whole := next((node for node in among if room[node.id] >= need.ranks), None):
            return [whole] * need.ranks
    return []


def plan(config: FleetConfig, nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """Place all replicas on an empty cluster: return worker id -> node of each rank."""
    free = {node.address: node.cpus for node in nodes}
    free_gpus = {node.address: node.gpus for node in nodes}
    placed: dict[str, tuple[Collection[str], Role]] = {}
    result: dict[str, list[Node]] = {}
    for lane in config.lanes:
        workers = [role for role, replicas in _sizes(lane).items() for _ in range(replicas)]
        for number, role in enumerate(workers):
            now = [
                replace(node, free_cpus=free[node.address], free_gpus=free_gpus[node.address])
                for node in nodes
            ]
            chosen = choose(need_of(lane, role), now, placed)
            worker_id = worker_name(number, worker_prefix(lane.fleet))
            result[worker_id] = chosen
            for node in chosen:
                free[node.address] -= lane.cpus_per_rank
                free_gpus[node.address] -= lane.pools.gpus
            placed[worker_id] = ({node.address for node in chosen}, role)
    return result


def check_nodes(config: FleetConfig, nodes: Sequence[Node], closed: Collection[str] = ()) -> None:
    """Check that a fleet fits the cluster; Ray would wait forever for room.

    Raises:
        CapacityError: A replica fits on no usable node, or not all replicas fit together.
    """
    for role, replicas in _sizes(config).items():
        if replicas and not usable(role, nodes, closed):
            raise CapacityError(
                f"no node is available to {role} workers: {_described(nodes, closed)}; reopen one "
                "with `baton drain --node NAME --undo`, or add one"
            )
    anywhere = {n.id: n for role in _ROLES for n in usable(role, nodes, closed)}
    check_capacity(config, [node.cpus for node in anywhere.values()])
    _check_gpus(config, list(anywhere.values()))
    for role in _ROLES:  # reserved nodes must suffice for their role
        alone = config.pools.model_copy(update={r: 0 for r in _ROLES if r != role})
        if getattr(alone, role):
            part = config.model_copy(update={"pools": alone})
            theirs = usable(role, nodes, closed)
            check_capacity(part, [node.cpus for node in theirs])
            _check_gpus(part, theirs)


def _check_gpus(config: FleetConfig, nodes: Sequence[Node]) -> None:
    """Raise ``CapacityError`` if the GPUs of these nodes do not suffice for all replicas."""
    asked = config.pools.gpus
    rooms = [_room(node.cpus, node.gpus, config.cpus_per_rank, asked) for node in nodes]
    if asked and config.pools.total > sum(rooms):
        raise CapacityError(
            f"pools need {config.pools.total} workers of {asked} GPUs (pools.vllm.gpus) and "
            f"{config.cpus_per_rank:g} CPUs, the cluster has room for {sum(rooms)} ({len(nodes)} "
            f"nodes, {sum(node.gpus for node in nodes):g} GPUs): lower pools.prefill or "
            "pools.decode, or add nodes; Ray finds GPUs by itself, see `baton nodes`"
        )


def _room(free_cpus: float, free_gpus: float, cpus: float, gpus: int) -> int:
    """Return how many ranks fit."""
    room = math.floor(free_cpus / cpus + _ROUNDING)
    return min(room, math.floor(free_gpus / gpus + _ROUNDING)) if gpus else room


def check_capacity(config: FleetConfig, node_cpus: Sequence[float]) -> None:
    """Check that a fleet fits on nodes with these numbers of CPUs.

    Raises:
        CapacityError: A replica fits on no node, or not all replicas fit together.
    """
    if not config.pools.total:
        return
    asked = config.cpus_per_rank
    largest = max(node_cpus, default=0.0)
    if asked > largest:
        raise CapacityError(
            f"cpus_per_rank = {asked:g} exceeds the largest node, which has {largest:g} CPUs; "
            "lower cpus_per_rank or add a larger node"
        )
    free = [math.floor(cpus / asked + _ROUNDING) for cpus in node_cpus]
    places = sum(free)
    widths = sorted(config.pools.ranks, reverse=True)
    if widths[0] > max(free):
        raise CapacityError(
            f"pools.tensor_parallel = {widths[0]} ranks of {asked:g} CPUs exceed the largest node, "
            f"which has {largest:g} CPUs: lower pools.tensor_parallel or cpus_per_rank"
        )
    if not _all_fit(widths, free):
        raise CapacityError(
            f"pools need {sum(widths)} ranks of {asked:g} CPUs, the cluster has room for {places} "
            f"({len(node_cpus)} nodes, {sum(node_cpus):g} CPUs): lower pools.prefill, pools.decode "
            "or cpus_per_rank"
        )


def _all_fit(widths: Sequence[int], free: Sequence[int]) -> bool:
    """Return whether all replicas fit, each on one node.

    Pools have at most two widths, so this is exact: it computes, for each number of wide replicas
    on the nodes so far, the maximum of narrow ones that fit beside them. ``widths`` are the ranks
    of each replica, ``free`` those that each node has room for.
    """
    wide = max(widths)
    narrow = min(widths)
    wide_replicas = widths.count(wide)
    beside = {0: 0}
    for places in free:
        grown: dict[int, int] = {}
        for held, others in beside.items():
            for more in range(min(places // wide, wide_replicas - held) + 1):
                fit = others + (places - more * wide) // narrow
                grown[held + more] = max(fit, grown.get(held + more, 0))
        beside = grown
    return beside.get(wide_replicas, -1) >= len(widths) - wide_replicas


def _sizes(config: FleetConfig) -> dict[Role, int]:
    return {"prefill": config.pools.prefill, "decode": config.pools.decode}


def _described(nodes: Sequence[Node], closed: Collection[str]) -> str:
    texts = []
    for node in nodes:
        marks = ["head"] * node.head + ["closed"] * (node.address in closed) + sorted(node.roles)
        texts.append(f"{node.name}" + (f" ({', '.join(marks)})" if marks else ""))
    return "the nodes are " + ", ".join(texts) if texts else "there are no nodes"
