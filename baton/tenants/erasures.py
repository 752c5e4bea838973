"""Progress of deletions in Redis: what each router and worker has deleted.

    deletion:ID    hash: name of a router or worker -> JSON of its counts      1 hour

Workers read the tags to erase from the table of ``policies.py``.
"""

from collections.abc import Mapping

import msgspec

from baton.registry.redis_store import Registry
from baton.tenants.deletions import Forgotten

_TTL_MS = 3_600_000


class Erasures:
    """Reports about deletions. Every call may raise ``RegistryUnavailableError``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def forgotten(self) -> Forgotten:
        """Return the deletions; none if they are unreadable, which is logged."""
        (raw,) = await self._registry.send(("HGET", self._registry.key("tenants"), "forgotten"))
        known = self._registry.decoded("tenants", raw, Forgotten, msgspec.json.decode)
        return known or Forgotten()

    async def report(self, deletion: str, name: str, counts: Mapping[str, int]) -> None:
        """Report what a router or worker has deleted."""
        key = self._registry.key("deletion", deletion)
        await self._registry.send(
            ("HSET", key, name, msgspec.json.encode(dict(counts))),
            ("PEXPIRE", key, _TTL_MS),
        )

    async def reports(self, deletion: str) -> dict[str, dict[str, int]]:
        """Return the reports about a deletion, by router or worker."""
        (raw,) = await self._registry.send(("HGETALL", self._registry.key("deletion", deletion)))
        return {
            name.decode(): msgspec.json.decode(counts, type=dict[str, int])
            for name, counts in raw.items()
        }
