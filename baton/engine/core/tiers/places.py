"""What one tier holds: which hash lies at which place, and who gives way. Pure.

    free ──take──▶ filling ──filled──▶ held ──oldest, when the tier is full──▶ taken by another
      ▲               └──failed──┐       └──lose (damaged)──┐
      └──────────────────────────┴──────────────────────────┘

A place that is being read stays until the last reader has let go.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from baton.telemetry.running_mean import RunningMean

_COPY_WEIGHT = 0.1  # of one block's copy in the mean of their times


class TierPlaces:
    """The places of a tier, each for one block.

    Args:
        name: As metrics and the index have it: ``memory`` or ``disk``.
        places: How many.
        found: What lies there already, as (hash, place): a disk outlives its worker.

    Attributes:
        block_ns: How long one block takes to come back, on average; 0 until one has.
        lost: Hashes that gave way before the next tier had them, since the start.
    """

    def __init__(self, name: str, places: int, found: Iterable[tuple[bytes, int]] = ()) -> None:
        self.name = name
        self.places = places
        self.block_ns = RunningMean(_COPY_WEIGHT)
        self.lost = 0
        self.has_next = False
        self.stored: list[bytes] = []  # since the last ``take_changes``; so is the next
        self.removed: list[bytes] = []
        self._held: OrderedDict[bytes, int] = OrderedDict(found)
        self._filling: dict[bytes, int] = {}
        self._readers: dict[bytes, int] = {}
        self._unsaved: OrderedDict[bytes, None] = OrderedDict()  # that the next tier lacks
        taken = set(self._held.values())
        self._free = [place for place in range(places - 1, -1, -1) if place not in taken]
        self.stored += self._held

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def untouched(self) -> int:
        """Places that can be taken without losing anything."""
        return len(self._free) + len(self._held) - len(self._unsaved)

    def take(self, block_hash: bytes) -> int | None:
        """A place to fill with a block that is not here; the oldest that nobody reads gives way.

        Returns:
            None where the block is here or on its way, or all others are being read or filled.
        """
        if block_hash in self._held or block_hash in self._filling:
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
        """The block lies in the place that was taken for it."""
        self._held[block_hash] = self._filling.pop(block_hash)
        if self.has_next and not saved_below:
            self._unsaved[block_hash] = None
        self.stored.append(block_hash)

    def failed(self, block_hash: bytes) -> None:
        """It could not be written there."""
        self._free.append(self._filling.pop(block_hash))

    def read(self, block_hash: bytes) -> int:
        """Somebody reads the block, until ``let_go``; it becomes the youngest."""
        self._held.move_to_end(block_hash)
        return self.hold(block_hash)

    def hold(self, block_hash: bytes) -> int:
        """The same for a copy to the next tier: that makes no block younger."""
        self._readers[block_hash] = self._readers.get(block_hash, 0) + 1
        return self._held[block_hash]

    def let_go(self, block_hash: bytes) -> None:
        """One reader less."""
        self._readers[block_hash] -= 1
        if not self._readers[block_hash]:
            del self._readers[block_hash]

    def lose(self, block_hash: bytes) -> None:
        """Forget a block that nobody reads, if it is here."""
        if block_hash in self._held and block_hash not in self._readers:
            self._free.append(self._held.pop(block_hash))
            self._unsaved.pop(block_hash, None)
            self.removed.append(block_hash)

    def oldest_unsaved(self, count: int) -> list[bytes]:
        """Blocks that the next tier lacks, the oldest first."""
        return list(islice(self._unsaved, count))

    def note_saved(self, block_hash: bytes) -> None:
        """The next tier has the block, or will not take it."""
        self._unsaved.pop(block_hash, None)

    def take_changes(self) -> list[bytes]:
        """Hashes that came or went since the last call."""
        changed = self.stored + self.removed
        self.stored = []
        self.removed = []
        return changed

    def check_integrity(self) -> None:
        """Recount.

        Raises:
            RuntimeError: A place is in two states or in none, or what is read is not here.
        """
        places = [*self._held.values(), *self._filling.values(), *self._free]
        if sorted(places) != list(range(self.places)):
            raise RuntimeError(f"{self.name}: places overlap or leak: {sorted(places)[:64]}")
        if not self._readers.keys() <= self._held.keys():
            raise RuntimeError(f"{self.name}: blocks are read that are not held")
        if not self._unsaved.keys() <= self._held.keys():
            raise RuntimeError(f"{self.name}: blocks wait to be saved that are not held")
