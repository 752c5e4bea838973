"""Load of each router of a fleet, shared with the others a few times a second."""

from collections.abc import Mapping

import msgspec

from baton.registry.redis_store import Registry
from baton.registry.types import WorkDemand

_TTL_MS = 60_000


class TenantDemand(msgspec.Struct, frozen=True, array_like=True):
    """Load of one tenant at one router: running and waiting sequences, tokens served so far."""

    running: int = 0
    waiting: int = 0
    served_tokens: float = 0.0


class RouterDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one router: ``queued`` requests wait there; ``beat`` counts its reports.

    It places by all workers' turns up to number ``turn``. ``work`` is for the planner of roles;
    routers ignore each other's.
    """

    beat: int
    queued: int = 0
    turn: int = 0
    tenants: dict[str, TenantDemand] = {}
    work: WorkDemand = WorkDemand()


class RouterDemands:
    """Loads of all routers, in one hash.

    Every call may raise the registry's ``RegistryUnavailableError``.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def exchange(self, router_id: str, own: RouterDemand) -> dict[str, RouterDemand]:
        """Report the load of one router and return the loads of all others."""
        key = self._registry.key("routers")
        _, found, _ = await self._registry.send(
            ("HSET", key, router_id, msgspec.msgpack.encode(own)),
            ("HGETALL", key),
            ("PEXPIRE", key, _TTL_MS),
        )
        names = self._registry.names_in(found)
        return self._readable({name: found[raw] for name, raw in names.items()}, router_id)

    async def read(self) -> dict[str, RouterDemand]:
        """Return the loads of all routers, also of some that are gone."""
        (found,) = await self._registry.send(("HGETALL", self._registry.key("routers")))
        names = self._registry.names_in(found)
        return self._readable({name: found[raw] for name, raw in names.items()}, "")

    def _readable(self, found: Mapping[str, bytes], own_id: str) -> dict[str, RouterDemand]:
        demands = {}
        for router_id, raw in found.items():
            try:
                if router_id != own_id:
                    demands[router_id] = msgspec.msgpack.decode(raw, type=RouterDemand)
            except msgspec.DecodeError as error:  # another version
                self._registry.skip(f"router {router_id}", str(error))
        return demands

    async def forget(self, *router_ids: str) -> None:
        """Remove routers that are gone."""
        await self._registry.send(("HDEL", self._registry.key("routers"), *router_ids))
