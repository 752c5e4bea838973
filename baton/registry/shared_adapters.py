"""The LoRA adapters that clients may name, as routers share them."""

from collections.abc import Collection, Mapping

from baton.registry.redis_store import Registry

_TTL_MS = 24 * 3600 * 1000


class SharedAdapters:
    """The table of all routers of a fleet; what an entry is, its users know.

    Args:
        registry: Of the fleet. Every call may raise its ``RegistryUnavailableError``.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._key = registry.key("adapters")

    async def adapters(self) -> dict[str, bytes]:
        """What routers wrote, by name. Each read keeps it for another day."""
        pairs, _ = await self._registry.send(
            ("HGETALL", self._key), ("PEXPIRE", self._key, _TTL_MS)
        )
        names = self._registry.names_in(pairs)
        return {name: bytes(pairs[raw]) for name, raw in names.items()}

    async def put_adapters(self, entries: Mapping[str, bytes]) -> None:
        """Write entries, over those of the same name."""
        fields = [part for name, raw in entries.items() for part in (name, raw)]
        await self._registry.send(("HSET", self._key, *fields))

    async def drop_adapters(self, names: Collection[str]) -> None:
        """Remove entries."""
        await self._registry.send(("HDEL", self._key, *names))
