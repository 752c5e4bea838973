"""Which nodes a replica goes to, and whether a fleet fits a cluster. Does no I/O.

The rules, hard ones first:

1. A node that was closed takes nothing (``baton drain --node``).
2. Where nodes offer the custom resource ``baton_prefill`` or ``baton_decode``, that role goes to
   them alone. ``ray start --resources='{"baton_decode": 1}'`` says so of a node.
3. Ray's head takes nothing, unless it is the only node.
4. A node that has just failed comes last.
5. Replicas of a role are spread over nodes, then replicas of any role.
6. All ranks of a replica go to one node. Only where none has room for all, and the fleet file says
   ``nodes: several``, they go to as few as there can be: each of them can end the replica, and
   every layer's gathers wait for the slowest link.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from baton.config.fleet_file import FleetConfig
from baton.registry.types import Role

_ROLES: tuple[Role, ...] = get_args(Role)
_ROUNDING = 1e-9  # fractions such as 0.1 do not add up exactly


class CapacityError(RuntimeError):
    """The cluster cannot hold the fleet; the message has the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a Ray cluster.

    Attributes:
        id: Ray's, new with each start of it.
        name: Its host name.
        address: Its IP address.
        port: Of its raylet.
        head: Whether Ray's head runs there.
        cpus: What it offers Ray.
        free_cpus: What of that is not given away.
        roles: Those that it was reserved for; empty: not for any.
    """

    id: str
    name: str
    address: str
    port: int = 0
    head: bool = False
    cpus: float = 0.0
    free_cpus: float = 0.0
    roles: frozenset[Role] = frozenset()


def usable(role: Role, nodes: Sequence[Node], closed: Collection[str] = ()) -> list[Node]:
    """The nodes that may take a replica of this role, by the hard rules.

    Args:
        role: Of the replica.
        nodes: Of the cluster, those that live.
        closed: Addresses of nodes that take nothing.
    """
    workers = [node for node in nodes if not node.head and node.cpus > 0] or list(nodes)
    reserved = any(role in node.roles for node in workers)
    return [
        node
        for node in workers
        if node.address not in closed and (role in node.roles or not reserved)
    ]


def choose(
    role: Role,
    cpus: float,
    nodes: Sequence[Node],
    placed: Mapping[str, tuple[Collection[str], Role]],
    *,
    ranks: int = 1,
    apart: bool = False,
    closed: Collection[str] = (),
    avoid: Collection[str] = (),
) -> list[Node]:
    """The node of each rank of a replica, the leader's first; empty while there is no room.

    Args:
        role: Of the replica.
        cpus: What one rank takes.
        nodes: Of the cluster, those that live.
        placed: The other replicas: worker id -> (addresses of its ranks, role).
        ranks: How many.
        apart: Whether they may be on several nodes.
        closed: Addresses of nodes that take nothing.
        avoid: Addresses of nodes that are taken only if the others have no room.
    """

    def order(node: Node) -> tuple[int, int, float, str]:
        here = [held for addresses, held in placed.values() if node.address in addresses]
        return here.count(role), len(here), -node.free_cpus, node.address

    able = sorted(usable(role, nodes, closed), key=order)
    wanted = [node for node in able if node.address not in avoid]
    for among in (wanted, wanted + [node for node in able if node.address in avoid]):
        room = {node.id: math.floor(node.free_cpus / cpus + _ROUNDING) for node in among}
        if whole := next((node for node in among if room[node.id] >= ranks), None):
            return [whole] * ranks
        if apart and sum(room.values()) >= ranks:
            in_turn = sorted(among, key=lambda node: (node.address in avoid, -room[node.id]))
            return [node for node in in_turn for _ in range(room[node.id])][:ranks]
    return []


def plan(
    config: FleetConfig, nodes: Sequence[Node], closed: Collection[str] = ()
) -> dict[str, list[Node]]:
    """Where an empty cluster's nodes would take each replica: worker id -> node of each rank."""
    free = {node.address: node.cpus for node in nodes}
    placed: dict[str, tuple[Collection[str], Role]] = {}
    result: dict[str, list[Node]] = {}
    for role, replicas in _sizes(config).items():
        for index in range(replicas):
            now = [_with_free(node, free[node.address]) for node in nodes]
            chosen = choose(
                role,
                config.cpus_per_rank,
                now,
                placed,
                ranks=config.pools.width(role),
                apart=config.pools.ranks_apart(role),
                closed=closed,
            )
            worker_id = f"{role}-{index}"
            result[worker_id] = chosen
            for node in chosen:
                free[node.address] -= config.cpus_per_rank
            placed[worker_id] = ({node.address for node in chosen}, role)
    return result


def check_nodes(config: FleetConfig, nodes: Sequence[Node], closed: Collection[str] = ()) -> None:
    """Refuse a fleet that would wait for ever for a place in this cluster.

    Raises:
        CapacityError: A replica fits on no usable node, or not all replicas fit together.
    """
    for role, replicas in _sizes(config).items():
        if replicas and not usable(role, nodes, closed):
            raise CapacityError(
                f"no node may take {role} workers: {_told(nodes, closed)}; open one with "
                "`baton drain --node NAME --undo`, or add one"
            )
    anywhere = {n.id: n for role in _ROLES for n in usable(role, nodes, closed)}
    check_capacity(config, [node.cpus for node in anywhere.values()])
    for role in _ROLES:  # of a cluster with reserved nodes each part must do for its role
        alone = config.pools.model_copy(update={r: 0 for r in _ROLES if r != role})
        if getattr(alone, role):
            part = config.model_copy(update={"pools": alone})
            check_capacity(part, [node.cpus for node in usable(role, nodes, closed)])


def check_capacity(config: FleetConfig, node_cpus: Sequence[float]) -> None:
    """Refuse what Ray would wait for forever.

    Args:
        config: The fleet.
        node_cpus: CPUs of each node of the cluster.

    Raises:
        CapacityError: A replica fits on no node, or not all replicas fit together.
    """
    asked = config.cpus_per_rank
    largest = max(node_cpus, default=0.0)
    if asked > largest:
        raise CapacityError(
            f"cpus_per_rank = {asked:g} fits on no node: the largest has {largest:g} CPUs; "
            "lower cpus_per_rank or add a larger node"
        )
    free = [math.floor(cpus / asked + _ROUNDING) for cpus in node_cpus]
    places = sum(free)
    widths = sorted(config.pools.ranks, reverse=True)
    if config.pools.tensor_parallel.nodes == "several":  # each rank by itself
        widths = [1] * sum(widths)
    if widths[0] > max(free):
        raise CapacityError(
            f"pools.tensor_parallel = {widths[0]} ranks of {asked:g} CPUs fit on no node: the "
            f"largest has {largest:g} CPUs, and a replica stays on one node; lower "
            "pools.tensor_parallel or cpus_per_rank, or say `nodes: several` there"
        )
    if not _all_fit(widths, free):
        raise CapacityError(
            f"pools need {sum(widths)} ranks of {asked:g} CPUs, the cluster has room for {places} "
            f"({len(node_cpus)} nodes, {sum(node_cpus):g} CPUs): lower pools.prefill, pools.decode "
            "or cpus_per_rank"
        )


def _all_fit(widths: Sequence[int], free: Sequence[int]) -> bool:
    """Whether each replica can have a node with so many places for itself.

    Pools have two widths at most, so this is exact: for each number of wide replicas that the
    nodes so far may hold, the most narrow ones that fit beside them.

    Args:
        widths: Places that each replica takes, all on one node.
        free: Places of each node.
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


def _with_free(node: Node, free_cpus: float) -> Node:
    return replace(node, free_cpus=free_cpus)


def _told(nodes: Sequence[Node], closed: Collection[str]) -> str:
    said = []
    for node in nodes:
        marks = ["head"] * node.head + ["closed"] * (node.address in closed) + sorted(node.roles)
        said.append(f"{node.name}" + (f" ({', '.join(marks)})" if marks else ""))
    return "the nodes are " + ", ".join(said) if said else "there are no nodes"
