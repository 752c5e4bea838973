"""Who runs a fleet: one supervisor holds the fleet's lease in Redis, so that no second one starts.

A holder that died lets it lapse within `LEASE_S`. One that cannot reach Redis goes on: what is
lost with Redis is taken again when it is back, unless somebody else was faster, who then has it.
"""

import time

import msgspec

from baton.registry.redis_store import Registry

LEASE_S = 10.0
RENEW_EVERY_S = 2.0


class LeaseHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds it. ``life`` is random, and what counts; the rest is for people."""

    life: str
    host: str
    pid: int
    url: str
    since_s: float  # Unix time of the holder's clock

    def __str__(self) -> str:
        began = time.strftime("%H:%M:%S UTC", time.gmtime(self.since_s))
        return f"`baton up` on {self.host} (pid {self.pid}, {self.url}, since {began})"


class FleetLease:
    """One supervisor's view of its fleet's lease.

    Args:
        registry: Of the fleet. Every call may raise its ``RegistryUnavailableError``.
        me: The supervisor.
    """

    def __init__(self, registry: Registry, me: LeaseHolder) -> None:
        self._registry = registry
        self._key = registry.key("lease")
        self.me = me

    async def take(self, *, by_force: bool = False) -> LeaseHolder | None:
        """Take the lease if it is free, or in any case; who has it instead."""
        condition = () if by_force else ("NX",)
        await self._registry.send(self._set(*condition))
        return await self._other()

    async def renew(self) -> LeaseHolder | None:
        """Keep it, or take it again where it is gone; who has taken it meanwhile."""
        if (other := await self._other()) is not None:
            return other
        _, kept = await self._registry.send(
            self._set("NX"), ("PEXPIRE", self._key, int(LEASE_S * 1000))
        )
        return await self._other() if kept else None

    async def left_ms(self) -> int:
        """In how many milliseconds it lapses unless renewed; negative if nobody has it."""
        (left,) = await self._registry.send(("PTTL", self._key))
        return int(left)

    async def give_up(self) -> None:
        """Let others have it at once."""
        if await self._holder() == self.me:
            await self._registry.send(("DEL", self._key))

    def _set(self, *condition: str) -> tuple[object, ...]:
        raw = msgspec.msgpack.encode(self.me)
        return ("SET", self._key, raw, "PX", int(LEASE_S * 1000), *condition)

    async def _other(self) -> LeaseHolder | None:
        holder = await self._holder()
        return None if holder is None or holder.life == self.me.life else holder

    async def _holder(self) -> LeaseHolder | None:
        (raw,) = await self._registry.send(("GET", self._key))
        if raw is None:
            return None
        try:
            return msgspec.msgpack.decode(raw, type=LeaseHolder)
        except msgspec.DecodeError as error:
            self._registry.skip("lease", str(error))
            return None
