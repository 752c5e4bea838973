"""Audit entries of the commands that the controller executes, and of the planner's turns."""

import socket
from collections.abc import Mapping
from typing import Any

from baton.registry.admin_commands import AdminCommand, CommandReply
from baton.tenants.audit.log import AuditLog

_READING = frozenset(("ping", "slots", "nodes", "logs", "plan"))


async def audit_order(
    log: AuditLog,
    order: AdminCommand,
    answer: CommandReply,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> None:
    """Write an entry about a command, unless it only reads.

    Args:
        log: Audit log.
        order: The command.
        answer: The controller's reply.
        before: State that operators requested, before the command.
        after: The same state, after it.
    """
    if order.verb in _READING:
        return
    changed = [name for name in after if before.get(name) != after[name]]
    done: dict[str, Any] = {name: after[name] for name in changed}
    done |= {"arguments": order.arguments} if order.arguments else {}
    done |= {"refused": answer.problem} if answer.problem else {}
    await log.record(
        order.verb,
        " ".join(order.worker_ids) or str(order.arguments.get("node", "")),
        who=order.who or f"baton at {socket.gethostname()}",
        source=order.source,
        before={name: before.get(name) for name in changed} or None,
        after=done or None,
    )
