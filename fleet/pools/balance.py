"""Which workers turn, leave or come, so that the pools get the sizes that are asked for. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from baton.registry.types import Role
from fleet.pools.slots import Slot

MayTurn = Callable[[str, Role], bool]
"""Function that returns whether a worker may get a role; its node may be reserved for the other."""

LeavingOrder = Callable[[str], tuple[int, ...]]
"""Function that returns a worker's place among those that may leave: the smallest leaves first."""

_ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Balance:
    """Changes that give the pools their sizes.

    Attributes:
        returning: Workers that were leaving and stay.
        turned: Workers that get the other role, which is named.
        removed: Workers to drain and remove.
        added: Roles of the workers to add.
    """

    returning: tuple[str, ...] = ()
    turned: tuple[tuple[str, Role], ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[Role, ...] = ()


def always(worker_id: str, role: Role) -> bool:
    """Return True for every turn."""
    return True


def same(worker_id: str) -> tuple[int, ...]:
    """Give all workers the same place in the order of leaving."""
    return ()


def balance(
    members: Iterable[Slot],
    sizes: Mapping[Role, int],
    may_turn: MayTurn = always,
    leaving_order: LeavingOrder = same,
) -> Balance:
    """Return the changes; workers turn before any is removed or added.

    Workers that serve turn first. Those without a process leave first, then those that start, then
    by ``leaving_order``; among equals the highest number. A worker that an operator has drained
    does not turn, since it would not serve.
    """
    everyone = sorted(members, key=lambda member: member.number, reverse=True)
    staying = {role: [m for m in everyone if m.role == role and not m.leaving] for role in _ROLES}
    leaving = {role: [m for m in everyone if m.role == role and m.leaving] for role in _ROLES}
    returning: list[str] = []
    lacking = dict.fromkeys(_ROLES, 0)
    for role in _ROLES:
        lacking[role] = max(sizes.get(role, 0) - len(staying[role]), 0)
        while lacking[role] and leaving[role]:
            returning.append(leaving[role].pop().worker_id)
            lacking[role] -= 1
    turned: list[tuple[str, Role]] = []
    removed: list[str] = []
    for role, other in zip(_ROLES, reversed(_ROLES), strict=True):
        surplus = len(staying[role]) - sizes.get(role, 0)
        turning = [m for m in staying[role] if not m.down and may_turn(m.worker_id, other)]
        turning.sort(key=lambda member: not member.ready)
        for member in turning[: max(min(surplus, lacking[other]), 0)]:
            turned.append((member.worker_id, other))
            staying[role].remove(member)
            lacking[other] -= 1
            surplus -= 1
        staying[role].sort(key=lambda m: (m.has_process, m.ready, leaving_order(m.worker_id)))
        removed += [member.worker_id for member in staying[role][: max(surplus, 0)]]
    added = [role for role in _ROLES for _ in range(lacking[role])]
    return Balance(tuple(returning), tuple(turned), tuple(removed), tuple(added))
