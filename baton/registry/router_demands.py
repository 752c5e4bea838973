"""What each router of a fleet has to do, told to the others a few times a second."""

from collections.abc import Mapping

import msgspec

from baton.registry.redis_store import Registry

_TTL_MS = 60_000


class TenantDemand(msgspec.Struct, frozen=True, array_like=True):
    """One tenant at one router: sequences that run and that wait, tokens served so far."""

    running: int = 0
    waiting: int = 0
    served_tokens: float = 0.0


class RouterDemand(msgspec.Struct, frozen=True, kw_only=True):
    """One router.

    ``beat`` counts what it has told; ``queued`` are requests that wait there.
    """

    beat: int
    queued: int = 0
    tenants: dict[str, TenantDemand] = {}


class RouterDemands:
    """All routers' demands, in one hash.

    Args:
        registry: Of the fleet. Every call may raise its ``RegistryUnavailableError``.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def exchange(self, router_id: str, own: RouterDemand) -> dict[str, RouterDemand]:
        """Tell of one router, and hear of all others."""
        key = self._registry.key("routers")
        _, found, _ = await self._registry.send(
            ("HSET", key, router_id, msgspec.msgpack.encode(own)),
            ("HGETALL", key),
            ("PEXPIRE", key, _TTL_MS),
        )
        names = self._registry.names_in(found)
        return self._readable({name: found[raw] for name, raw in names.items()}, router_id)

    def _readable(self, found: Mapping[str, bytes], own_id: str) -> dict[str, RouterDemand]:
        demands = {}
        for router_id, raw in found.items():
            try:
                if router_id != own_id:
                    demands[router_id] = msgspec.msgpack.decode(raw, type=RouterDemand)
            except msgspec.DecodeError as error:  # of another version
                self._registry.skip(f"router {router_id}", str(error))
        return demands

    async def forget(self, *router_ids: str) -> None:
        """Take routers out that are gone."""
        await self._registry.send(("HDEL", self._registry.key("routers"), *router_ids))
