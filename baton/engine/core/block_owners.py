"""Cached blocks by tenant, for tenants that have a share of the cache.

A tenant that holds more than its share of the cached blocks loses its own blocks, oldest first,
before other tenants lose theirs. The share is soft: nothing is evicted while there are free blocks.
A block belongs to the tenant that computed it first.
"""

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class CacheOwner(NamedTuple):
    """Tenant of a request, and its share of the cached blocks; 0: it has none."""

    tenant: str = ""
    share: float = 0.0


@dataclass(slots=True, eq=False)
class _Owner:
    tenant: str
    share: float
    blocks: int = 0  # with a hash, cached or in use
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)


class BlockOwners:
    """Owners of the blocks of a pool, as far as they have a share."""

    def __init__(self, total: int) -> None:
        self._owner_of: list[_Owner | None] = [None] * total
        self._owners: dict[str, _Owner] = {}

    def own(self, block: int, owner: CacheOwner) -> None:
        """Note the owner of a block in use that has got its hash."""
        known = self._owners.get(owner.tenant)
        if known is None:
            if not owner.share:
                return
            known = self._owners[owner.tenant] = _Owner(owner.tenant, owner.share)
        known.share = owner.share or 1.0  # without a share it is never above it
        known.blocks += 1
        self._owner_of[block] = known

    def cached(self, block: int) -> None:
        """Note that a block is cached now, as the newest."""
        owner = self._owner_of[block]
        if owner is not None:
            owner.cached[block] = None

    def taken(self, block: int) -> None:
        """Note that a cached block is in use again, or evicted."""
        owner = self._owner_of[block]
        if owner is not None:
            del owner.cached[block]

    def forget(self, block: int) -> None:
        """Note that a block has lost its hash."""
        owner = self._owner_of[block]
        if owner is None:
            return
        self._owner_of[block] = None
        owner.blocks -= 1
        if not owner.blocks:
            del self._owners[owner.tenant]

    def above_share(self, count: int, cached_after: int, kept: Container[int]) -> list[int]:
        """Return up to ``count`` cached blocks of owners above their shares, to be evicted.

        Owners lose blocks in the order of their excess, each down to its share. The cost grows with
        the number of owners, not with that of blocks.

        Args:
            count: Number of blocks to evict.
            cached_after: Number of cached blocks after the eviction, of which shares are parts.
            kept: Blocks that are not evicted.
        """
        above = []
        for owner in self._owners.values():
            excess = len(owner.cached) - int(owner.share * cached_after)
            if excess > 0:
                above.append((excess, owner))
        above.sort(key=lambda entry: entry[0], reverse=True)
        blocks: list[int] = []
        for excess, owner in above:
            oldest = (block for block in owner.cached if block not in kept)
            blocks += islice(oldest, min(excess, count - len(blocks)))
            if len(blocks) == count:
                break
        return blocks

    def check(self, cached: Container[int], hashed: Container[int]) -> None:
        """Recount everything; raise ``RuntimeError`` if it is wrong."""
        counts: dict[str, int] = {}
        for block, owner in enumerate(self._owner_of):
            if owner is None:
                continue
            counts[owner.tenant] = counts.get(owner.tenant, 0) + 1
            if block not in hashed or (block in cached) != (block in owner.cached):
                raise RuntimeError(f"block {block} of {owner.tenant} is in a wrong state")
        owned = {name: owner.blocks for name, owner in self._owners.items()}
        listed = sum(len(owner.cached) for owner in self._owners.values())
        in_cache = [b for b, owner in enumerate(self._owner_of) if owner and b in owner.cached]
        if counts != owned or listed != len(in_cache):
            raise RuntimeError(f"blocks by tenant are {counts}, but the counts are {owned}")
