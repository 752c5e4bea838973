"""Lease of a fleet in Redis: one supervisor has it, so that no second one starts.

The lease of a dead holder lapses within `LEASE_S`. A holder that cannot reach Redis continues. If
the lease is gone afterwards, it takes it again, unless another supervisor was faster.
"""

import time

import msgspec

from baton.registry.redis_store import Registry

LEASE_S = 10.0
RENEW_EVERY_S = 2.0


class LeaseHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Holder of a lease. ``life`` is a random id that decides; the rest is for messages."""

    life: str
    host: str
    pid: int
    url: str
    since_s: float  # Unix time of the holder's clock
    pid_space: str = ""  # namespace of the pid: containers of a host may have its name

    def __str__(self) -> str:
        began = time.strftime("%H:%M:%S UTC", time.gmtime(self.since_s))
        return f"`baton up` on {self.host} (pid {self.pid}, {self.url}, since {began})"


class FleetLease:
    """Lease of a fleet, used by the supervisor ``me``.

    Every call may raise the registry's ``RegistryUnavailableError``.
    """

    def __init__(self, registry: Registry, me: LeaseHolder) -> None:
        self._registry = registry
        self._key = registry.key("lease")
        self.me = me

    async def take(self, *, by_force: bool = False) -> LeaseHolder | None:
        """Take the lease if it is free, or always by force. Returns another holder, if any."""
        condition = () if by_force else ("NX",)
        await self._registry.send(self._set(*condition))
        return await self._other()

    async def renew(self) -> LeaseHolder | None:
        """Renew the lease, or take it again if it is gone. Returns another holder, if any."""
        if (other := await self._other()) is not None:
            return other
        _, kept = await self._registry.send(
            self._set("NX"), ("PEXPIRE", self._key, int(LEASE_S * 1000))
        )
        return await self._other() if kept else None

    async def left_ms(self) -> int:
        """Return the milliseconds until the lease lapses; negative if it is free."""
        (left,) = await self._registry.send(("PTTL", self._key))
        return int(left)

    async def give_up(self) -> None:
        """Release the lease at once."""
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
        return self._registry.decoded("lease", raw, LeaseHolder)
