"""Audit entries of the commands that the controller executes, and of the planner's turns."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.planner.state import WorkerState
from baton.registry.admin_commands import AdminCommand, CommandReply
from baton.registry.types import Role
from baton.tenants.audit.chain import Entry
from baton.tenants.audit.log import AuditLog
from fleet.pools.admin_commands import CommandDesk

_READING = frozenset(("ping", "slots", "nodes", "logs", "plan"))
_planned = partial(Entry, who="planner")


async def audit_order(
    log: AuditLog,
    order: AdminCommand,
    answer: CommandReply,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> None:
    """Write an entry about a command, unless it only reads.

    ``before``: state that operators requested, before the command. ``after``: the same state, after
    it.
    """
    if order.verb in _READING:
        return
    changed = [name for name in after if before.get(name) != after[name]]
    done: dict[str, Any] = {name: after[name] for name in changed}
    done |= {"arguments": order.arguments} if order.arguments else {}
    done |= {"refused": answer.problem} if answer.problem else {}
    entry = Entry(
        verb=order.verb,
        what=" ".join(order.worker_ids) or str(order.arguments.get("node", "")),
        who=order.who or f"baton at {socket.gethostname()}",
        source=order.source,
        before={name: before.get(name) for name in changed} or None,
        after=done or None,
    )
    await log.write(entry)


@dataclass(frozen=True, slots=True)
class AuditedChanges:
    """Changes of the planner, each with an entry in the audit log."""

    desk: CommandDesk
    log: AuditLog

    @property
    def sizes(self) -> Mapping[Role, int]:
        """Return the pool sizes that were asked for last."""
        return self.desk.machine.wanted

    def workers(self) -> Sequence[WorkerState]:
        """Return the ready workers."""
        return self.desk.loads()

    async def change_role(self, worker_id: str, role: Role, reason: str) -> str:
        """Give a worker another role; return why it cannot have it, or ""."""
        slot = self.desk.machine.slots.get(worker_id)
        before = {"role": slot.role} if slot is not None else None
        refused = await self.desk.change_role(worker_id, role)
        if not refused:
            after = {"role": role, "why": reason}
            entry = _planned(verb="turn", what=worker_id, before=before, after=after)
            await self.log.write(entry)
        return refused

    async def resize(self, sizes: Mapping[Role, int], reason: str) -> str:
        """Change the pool sizes; return why that is not possible, or ""."""
        before = {"pools": self.sizes}
        refused = await self.desk.resize(sizes)
        if not refused:
            after = {"pools": dict(sizes), "why": reason}
            await self.log.write(_planned(verb="scale", before=before, after=after))
        return refused
