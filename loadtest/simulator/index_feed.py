"""Changes of the workers' caches on their way to the prefix index."""

from collections import defaultdict

from baton.registry.types import TIERS, EventBatch, tier_incarnation
from baton.types import events as ev
from router.routing.placement.prefix_index import PrefixIndex


class IndexFeed:
    """Numbers the batches of each incarnation and tier, and applies them."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._sequences: defaultdict[bytes, int] = defaultdict(int)

    def apply(self, incarnation: bytes, change: ev.CacheChanged) -> None:
        """Apply a change of a worker's cache, its tiers included."""
        self._apply(incarnation, change.stored, change.removed)
        for below in change.tiers:
            self._apply(tier_incarnation(incarnation, below.tier), below.stored, below.removed)

    def forget(self, incarnation: bytes) -> None:
        """Forget a worker's cache and tiers."""
        self._index.forget(incarnation)
        for tier in TIERS:
            self._index.forget(tier_incarnation(incarnation, tier))

    def _apply(
        self, incarnation: bytes, stored: tuple[bytes, ...], removed: tuple[bytes, ...]
    ) -> None:
        if stored or removed:
            self._sequences[incarnation] += 1
            sequence = self._sequences[incarnation]
            self._index.apply(
                EventBatch(
                    incarnation=incarnation, sequence=sequence, stored=stored, removed=removed
                )
            )
