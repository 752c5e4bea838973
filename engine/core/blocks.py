"""Who owns which block of the KV pool.

    free ──allocate──▶ leased ──release──▶ cached (has a name) ──evict──▶ leased by another
                         │  └──release──▶ free   (has no name)
                         └──quarantine──▶ quarantined ──absolve──▶ free

Every block is in exactly one of the four states, so ``free + cached + leased + quarantined ==
total`` holds by construction; ``check_integrity`` recounts it the slow way.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state."""

    total: int
    free: int
    cached: int
    leased: int
    quarantined: int


class BlockPool:
    """Reference counts, names and LRU order of ``total`` blocks.

    A released block keeps its name until the block is taken for something else; blocks are evicted
    oldest release first, and within one release tails go before roots.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: set[int] = set(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * total
        self._quarantined: set[int] = set()
        self._name_of: list[bytes | None] = [None] * total
        self._block_of: dict[bytes, int] = {}
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self.evictions = 0

    def available(self) -> int:
        """Blocks that ``allocate`` could hand out now."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free, cached, quarantined = len(self._free), len(self._cached), len(self._quarantined)
        leased = self.total - free - cached - quarantined
        return BlockCounts(self.total, free, cached, leased, quarantined)

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of ``names``, from the first, that the pool holds."""
        found = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def pin(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each block (a cached or a leased one)."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Lease ``count`` nameless blocks, contiguous where that is possible.

        Args:
            count: How many.
            after: Prefer the blocks that follow this one, so that a sequence stays one run.

        Returns:
            Block ids, or None when fewer than ``count`` are available (nothing is taken then).
        """
        if count > self.available():
            return None
        taken = self._run_of_free(count, after)
        missing = count - len(taken)
        if missing:
            rest = sorted(self._free)[:missing]
            self._free.difference_update(rest)
            taken += rest + self._evict(missing - len(rest))
            taken.sort()
        for block in taken:
            self._references[block] = 1
        return taken

    def _run_of_free(self, count: int, after: int | None) -> list[int]:
        """Take up to ``count`` free blocks that follow each other; all of them, or few, or none."""
        run: list[int] = []
        if after is not None:
            block = after + 1
            while len(run) < count and block in self._free:
                run.append(block)
                block += 1
        elif count > 1:
            for block in sorted(self._free):
                if run and block != run[-1] + 1:
                    run = []
                run.append(block)
                if len(run) == count:
                    break
            else:
                run = []
        self._free.difference_update(run)
        return run

    def _evict(self, count: int) -> list[int]:
        evicted = []
        for _ in range(count):
            block, _ = self._cached.popitem(last=False)
            self._forget_name(block)
            self.evictions += 1
            evicted.append(block)
        return evicted

    def _forget_name(self, block: int) -> None:
        name = self._name_of[block]
        if name is not None:
            self._name_of[block] = None
            del self._block_of[name]
            self._removed.append(name)

    def name(self, block: int, name: bytes) -> None:
        """Give a leased, fully computed block its name; a name already taken stays where it is."""
        if name in self._block_of or self._name_of[block] is not None:
            return
        self._name_of[block] = name
        self._block_of[name] = block
        self._stored.append(name)

    def shared(self, block: int) -> bool:
        """Whether more than one sequence holds the block (write to a copy then)."""
        return self._references[block] > 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block of a sequence, given in sequence order."""
        for block in reversed(blocks):  # tails become older than roots
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._name_of[block] is None:
                self._free.add(block)
            else:
                self._cached[block] = None

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Put leased, unshared blocks aside: someone may still be writing into them."""
        for block in blocks:
            self._references[block] = 0
            self._forget_name(block)
            self._quarantined.add(block)

    def absolve(self, blocks: Sequence[int]) -> None:
        """Free quarantined blocks: the writer is proven to have stopped."""
        self._quarantined.difference_update(blocks)
        self._free.update(blocks)

    def names(self) -> list[bytes]:
        """All names held, for a snapshot."""
        return list(self._block_of)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Names stored and removed since the last call; one name is in one of them at most."""
        stored, removed = self._stored, self._removed
        self._stored, self._removed = [], []
        if stored and removed:
            here = self._block_of
            stored, removed = (
                list(dict.fromkeys(name for name in stored if name in here)),
                list(dict.fromkeys(name for name in removed if name not in here)),
            )
        return stored, removed

    def check_integrity(
        self, holders: Iterable[Sequence[int]], draining: Sequence[int] | None = None
    ) -> None:
        """Recount everything from the block tables of all ``holders``.

        Args:
            holders: Each table once for each reference that it took.
            draining: What the quarantine must consist of; None = not known.

        Raises:
            RuntimeError: A count differs, a block is in two places, or a name is; the text says
                which.
        """
        references = [0] * self.total
        for table in holders:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a table holds a block twice: {list(table)[:64]}")
            for block in table:
                references[block] += 1
        if references != self._references:
            wrong = [b for b in range(self.total) if references[b] != self._references[b]]
            raise RuntimeError(f"blocks {wrong[:8]}: references differ from the tables that hold")
        leased = {block for block in range(self.total) if references[block]}
        parts = [self._free, set(self._cached), leased, self._quarantined]
        union = set().union(*parts)
        if sum(map(len, parts)) != self.total or len(union) != self.total:
            raise RuntimeError(f"block states overlap or leak: {list(map(len, parts))}")
        if draining is not None and sorted(draining) != sorted(self._quarantined):
            raise RuntimeError(f"quarantined {sorted(self._quarantined)[:8]}: not what drains")
        self._check_names()

    def _check_names(self) -> None:
        for name, block in self._block_of.items():
            if self._name_of[block] != name:
                raise RuntimeError(f"block {block} does not carry the name that points to it")
        named = {block for block in range(self.total) if self._name_of[block] is not None}
        if len(named) != len(self._block_of):
            raise RuntimeError("two blocks carry one name, or a name that nobody finds")
        if named & (self._free | self._quarantined) or not named.issuperset(self._cached):
            raise RuntimeError("a free block has a name, or a cached one has none")
