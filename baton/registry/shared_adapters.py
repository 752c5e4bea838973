"""LoRA adapters that clients may use, shared by all routers of a fleet."""

from collections.abc import Collection, Mapping

from baton.registry.redis_store import Registry

_TTL_MS = 24 * 3600 * 1000


class SharedAdapters:
    """Table of adapters; its entries are opaque bytes.

    Every call may raise the registry's ``RegistryUnavailableError``.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._key = registry.key("adapters")

    async def adapters(self) -> dict[str, bytes]:
        """Return the entries by name, and keep them for another day."""
        pairs, _ = await self._registry.send(
            ("HGETALL", self._key), ("PEXPIRE", self._key, _TTL_MS)
        )
        names = self._registry.names_in(pairs)
        return {name: bytes(pairs[raw]) for name, raw in names.items()}

    async def put_adapters(self, entries: Mapping[str, bytes]) -> None:
        """Write entries, replacing those of the same name."""
        fields = [part for name, raw in entries.items() for part in (name, raw)]
        await self._registry.send(("HSET", self._key, *fields))

    async def drop_adapters(self, names: Collection[str]) -> None:
        """Remove entries by name."""
        await self._registry.send(("HDEL", self._key, *names))
