"""Orders: what operators ask of a fleet's controller, and what it answers, by way of Redis.

Any process that reaches the fleet's Redis can ask; the controller takes orders in their turn.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.registry.redis_store import Registry

_ORDER_TTL_MS = 10_000  # nobody waits for an older one
_ANSWER_TTL_MS = 60_000
_POLL_S = 0.05


class Order(msgspec.Struct, frozen=True):
    """Something an operator asks of the controller."""

    token: str
    verb: str
    worker_ids: tuple[str, ...] = ()
    arguments: dict[str, int | str | bool] = {}


class Answer(msgspec.Struct, frozen=True):
    """What the controller says to it: ``problem`` is empty when it is being done."""

    problem: str = ""
    data: Any = None


class Orders:
    """Both ends of the way between operators and the controller.

    Args:
        registry: Of the fleet. Every call may raise its ``RegistryUnavailableError``.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def ask(
        self,
        verb: str,
        worker_ids: Sequence[str] = (),
        arguments: Mapping[str, int | str | bool] | None = None,
        timeout_s: float = 5.0,
    ) -> Answer | None:
        """Ask the controller for something.

        Args:
            verb: Such as ``drain``; ``fleet/pools/orders.py`` lists them.
            worker_ids: Which workers; empty for all.
            arguments: What else the verb needs.
            timeout_s: How long to wait for the answer.

        Returns:
            The answer; None when no controller gave one.
        """
        registry = self._registry
        order = Order(secrets.token_hex(8), verb, tuple(worker_ids), dict(arguments or {}))
        await registry.send(
            ("LPUSH", registry.key("orders"), msgspec.msgpack.encode(order)),
            ("PEXPIRE", registry.key("orders"), _ORDER_TTL_MS),
        )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            (raw,) = await registry.send(("GET", registry.key("answer", order.token)))
            if raw is not None:
                try:
                    return msgspec.msgpack.decode(raw, type=Answer)
                except msgspec.DecodeError as error:  # of a controller of another version
                    return Answer(f"the controller's answer cannot be read: {error}")
            await asyncio.sleep(_POLL_S)
        return None

    async def take(self) -> Order | None:
        """The oldest order, for the controller."""
        (raw,) = await self._registry.send(("RPOP", self._registry.key("orders")))
        if raw is None:
            return None
        try:
            return msgspec.msgpack.decode(raw, type=Order)
        except msgspec.DecodeError as error:
            self._registry.skip("orders", str(error))
            return None

    async def answer(self, order: Order, answer: Answer) -> None:
        """Answer an order."""
        key = self._registry.key("answer", order.token)
        raw = msgspec.msgpack.encode(answer)
        await self._registry.send(("SET", key, raw, "PX", _ANSWER_TTL_MS))
