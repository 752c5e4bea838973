"""Contents of one tier: the place of each block hash, and eviction. Pure.

    free ──take──▶ filling ──filled──▶ held ──oldest, if the tier is full──▶ reused
      ▲               └──failed──┐       └──lose (damaged)──┐
      └──────────────────────────┴──────────────────────────┘

A place with readers is not evicted. Blocks of other workers that this one may read have no place
here: their owners evict them.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from baton.telemetry.running_mean import RunningMean
from baton.types.block_hashes import tag_in

ELSEWHERE = -1
"""Place of a block that another worker stores."""

_COPY_WEIGHT = 0.1  # of one copy in the mean copy time


class TierPlaces:
    """Places of a tier, each for one block.

    Args:
        name: Name in metrics and in the prefix index: ``memory`` or ``disk``.
        found: Existing contents as (hash, place); files outlive their worker.

    Attributes:
        block_ns: Mean time to restore one block; 0 before the first.
        lost: Number of hashes evicted before the next tier had them.
    """

    def __init__(self, name: str, places: int, stored: Iterable[tuple[bytes, int]] = ()) -> None:
        self.name = name
        self.places = places
        self.block_ns = RunningMean(_COPY_WEIGHT)
        self.lost = 0
        self.has_next = False
        self.stored: list[bytes] = []  # since the last ``take_changes``, as is ``removed``
        self.removed: list[bytes] = []
        self._held: OrderedDict[bytes, int] = OrderedDict(stored)
        self._elsewhere: set[bytes] = set()
        self._filling: dict[bytes, int] = {}
        self._readers: dict[bytes, int] = {}
        self._forgotten: frozenset[bytes] = frozenset()
        self._unsaved: OrderedDict[bytes, None] = OrderedDict()  # blocks that the next tier lacks
        taken = set(self._held.values())
        self._free = [place for place in range(places - 1, -1, -1) if place not in taken]
        self.stored += self._held

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._held or block_hash in self._elsewhere

    def __len__(self) -> int:
        return len(self._held)

    @property
    def elsewhere(self) -> int:
        """Number of blocks that other workers store, as far as known."""
        return len(self._elsewhere)

    @property
    def untouched(self) -> int:
        """Number of places that can be taken without losing data."""
        return len(self._free) + len(self._held) - len(self._unsaved)

    def take(self, block_hash: bytes) -> int | None:
        """Return a place for a new block, if needed that of the oldest block without readers.

        Returns None if the block is present, being written or forgotten, or all places are in use.
        """
        if block_hash in self or block_hash in self._filling:
            return None
        if tag_in(block_hash) in self._forgotten:
            return None
        if not self._free:
            victim = next((held for held in self._held if held not in self._readers), None)
            if victim is None:
                return None
            self.lost += self.has_next and victim in self._unsaved
            self.lose(victim)
        place = self._filling[block_hash] = self._free.pop()
        return place

    def filled(self, block_hash: bytes, *, saved_below: bool) -> None:
        """Record that the block was written to its place."""
        self._held[block_hash] = self._filling.pop(block_hash)
        if self.has_next and not saved_below:
            self._unsaved[block_hash] = None
        self.stored.append(block_hash)
        self._lose_forgotten(block_hash)

    def failed(self, block_hash: bytes) -> None:
        """Free the place of a block that could not be written."""
        self._free.append(self._filling.pop(block_hash))

    def read(self, block_hash: bytes) -> int:
        """Add a reader until ``let_go`` and make the block the youngest; return its place.

        A block ``ELSEWHERE`` may be gone before it is read.
        """
        if block_hash not in self._held:
            return ELSEWHERE
        self._held.move_to_end(block_hash)
        return self.hold(block_hash)

    def hold(self, block_hash: bytes) -> int:
        """Add a reader for a copy to the next tier; the block's age stays."""
        self._readers[block_hash] = self._readers.get(block_hash, 0) + 1
        return self._held[block_hash]

    def let_go(self, block_hash: bytes) -> None:
        """Remove one reader of a block."""
        self._readers[block_hash] -= 1
        if not self._readers[block_hash]:
            del self._readers[block_hash]
            self._lose_forgotten(block_hash)

    def lose(self, block_hash: bytes) -> None:
        """Forget a block, unless it has readers."""
        if block_hash in self._held and block_hash not in self._readers:
            self._free.append(self._held.pop(block_hash))
            self._unsaved.pop(block_hash, None)
            self.removed.append(block_hash)

    def note_elsewhere(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Note blocks that other workers have stored or removed."""
        gained = {name for name in stored if tag_in(name) not in self._forgotten}
        lost = self._elsewhere.intersection(removed)
        self._elsewhere |= gained
        self._elsewhere -= lost
        self.stored += gained
        self.removed += lost

    def forget(self, tags: frozenset[bytes]) -> None:
        """Lose the blocks with these tags, those with readers after the last one, and take none."""
        self._forgotten |= tags
        for block_hash in list(self._held):
            self._lose_forgotten(block_hash)
        self.note_elsewhere((), [name for name in self._elsewhere if tag_in(name) in tags])

    def _lose_forgotten(self, block_hash: bytes) -> None:
        if tag_in(block_hash) in self._forgotten:
            self.lose(block_hash)

    def oldest_unsaved(self, count: int) -> list[bytes]:
        """Return blocks that the next tier lacks, the oldest first."""
        return list(islice(self._unsaved, count))

    def note_saved(self, block_hash: bytes) -> None:
        """Note that the next tier holds the block or refused it."""
        self._unsaved.pop(block_hash, None)

    def take_changes(self) -> list[bytes]:
        """Return hashes added or removed since the last call."""
        changed = self.stored + self.removed
        self.stored = []
        self.removed = []
        return changed

    def check_integrity(self) -> None:
        """Recount the places; raise ``RuntimeError`` at a wrong state."""
        places = [*self._held.values(), *self._filling.values(), *self._free]
        if sorted(places) != list(range(self.places)):
            raise RuntimeError(f"{self.name}: places overlap or leak: {sorted(places)[:64]}")
        if not self._readers.keys() <= self._held.keys():
            raise RuntimeError(f"{self.name}: blocks with readers are missing")
        if not self._unsaved.keys() <= self._held.keys():
            raise RuntimeError(f"{self.name}: blocks to be saved are missing")
