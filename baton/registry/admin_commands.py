"""Admin commands: requests of operators to a fleet's controller, sent through Redis.

Any process that reaches the fleet's Redis can send one. The controller runs them in order.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.registry.redis_store import Registry

_ORDER_TTL_MS = 10_000  # senders have given up by then
_ANSWER_TTL_MS = 60_000
_POLL_S = 0.05


class AdminCommand(msgspec.Struct, frozen=True):
    """Admin command for the controller; ``who`` and ``source`` are for the audit log."""

    token: str
    verb: str
    worker_ids: tuple[str, ...] = ()
    arguments: dict[str, int | str | bool] = {}
    who: str = ""
    source: str = ""


class CommandReply(msgspec.Struct, frozen=True):
    """Reply of the controller; ``problem`` is empty if the command is accepted."""

    problem: str = ""
    data: Any = None


class AdminCommands:
    """Queue of admin commands, for operators and the controller.

    Every call may raise the registry's ``RegistryUnavailableError``.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def ask(
        self,
        verb: str,
        worker_ids: Sequence[str] = (),
        arguments: Mapping[str, int | str | bool] | None = None,
        timeout_s: float = 5.0,
        who: str = "",
        source: str = "",
    ) -> CommandReply | None:
        """Send a command to the controller and return the reply, or None if there is none.

        ``fleet/pools/admin_commands.py`` lists the verbs. Without ids, all workers are meant.
        """
        registry = self._registry
        order = AdminCommand(
            secrets.token_hex(8), verb, tuple(worker_ids), dict(arguments or {}), who, source
        )
        await registry.send(
            ("LPUSH", registry.key("orders"), msgspec.msgpack.encode(order)),
            ("PEXPIRE", registry.key("orders"), _ORDER_TTL_MS),
        )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            (raw,) = await registry.send(("GET", registry.key("answer", order.token)))
            if raw is not None:
                try:
                    return msgspec.msgpack.decode(raw, type=CommandReply)
                except msgspec.DecodeError as error:  # a controller of another version
                    return CommandReply(f"the controller's reply cannot be read: {error}")
            await asyncio.sleep(_POLL_S)
        return None

    async def take(self) -> AdminCommand | None:
        """Take the oldest command, for the controller."""
        (raw,) = await self._registry.send(("RPOP", self._registry.key("orders")))
        return self._registry.decoded("orders", raw, AdminCommand)

    async def answer(self, order: AdminCommand, answer: CommandReply) -> None:
        """Reply to a command."""
        key = self._registry.key("answer", order.token)
        raw = msgspec.msgpack.encode(answer)
        await self._registry.send(("SET", key, raw, "PX", _ANSWER_TTL_MS))
