"""States of the blocks of the KV pool.

    free ──allocate──▶ in use ──release──▶ cached (has a hash) ──evict──▶ in use by another
                         │  └──release──▶ free   (has no hash)
                         └──quarantine──▶ quarantined ──absolve──▶ free

Every block is in exactly one of the four states, so ``free + cached + in_use + quarantined ==
total`` holds by construction; ``check_integrity`` recounts it the slow way. A block's hash is set
once it is full and computed; outside the engine, blocks in use are called ``leased``.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

from baton.engine.core.block_owners import BlockOwners, CacheOwner
from baton.engine.core.pinned_blocks import PinnedBlocks, Retention
from baton.types.block_hashes import tag_in
from baton.types.geometry import BLOCK_TOKENS
from baton.types.pool_counts import BlockCounts

_NOBODY = CacheOwner()
_MOST_PASSED = 4096  # pinned blocks that one eviction passes over


class _FreeMap:
    """Set of free blocks: one byte per block, so that ``find`` finds contiguous runs."""

    def __init__(self, total: int) -> None:
        self._bytes = bytearray(b"\1" * total)
        self._count = total

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        block = self._bytes.find(1)
        while block >= 0:
            yield block
            block = self._bytes.find(1, block + 1)

    def add(self, block: int) -> None:
        self._count += not self._bytes[block]
        self._bytes[block] = 1

    def take(self, blocks: Iterable[int]) -> list[int]:
        taken = list(blocks)
        for block in taken:
            self._bytes[block] = 0
        self._count -= len(taken)
        return taken

    def run_from(self, first: int, count: int) -> range:
        end = min(first + count, len(self._bytes))
        used = self._bytes.find(0, first, end)
        return range(first, used if used >= 0 else max(end, first))

    def first_run(self, count: int) -> range:
        first = self._bytes.find(b"\1" * count)
        return range(first, first + count) if first >= 0 else range(0)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Blocks that are not evicted, or not before others."""

    guarded: set[int]
    pins: PinnedBlocks

    def __contains__(self, block: object) -> bool:
        return block in self.guarded or self.pins.holds(cast(int, block))


class BlockPool:
    """Reference counts, hashes and LRU order of ``total`` blocks.

    A released block keeps its hash until the block is reused. Blocks are evicted in order of
    release, and within one release from the tail to the root; first those of tenants above their
    share, and pinned ones last.
    """

    def __init__(self, total: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self._free = _FreeMap(total)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._owners = BlockOwners(total)
        self.pins = PinnedBlocks(total)
        self._references = [0] * total
        self._quarantined: set[int] = set()
        self._hash_of: list[bytes | None] = [None] * total
        self._block_of: dict[bytes, int] = {}
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._written: set[int] = set()  # see ``StepPlan.written``
        self._forgotten: frozenset[bytes] = frozenset()
        self.evictions = 0
        # With tiers (``baton/engine/core/tiers``): hashes that the first tier holds, cached blocks
        # that it lacks, and blocks that are being copied to it.
        self._saved: Container[bytes] | None = None
        self._unsaved: OrderedDict[int, None] = OrderedDict()
        self.guarded: set[int] = set()  # not evicted; their LRU position stays
        self.unsaved_evictions = 0

    def available(self) -> int:
        """Return the number of blocks that ``allocate`` can take now."""
        guarded = sum(block in self._cached for block in self.guarded)
        return len(self._free) + len(self._cached) - guarded

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens occupy."""
        return -(-tokens // self.block_tokens)

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state."""
        free = len(self._free)
        cached = len(self._cached)
        quarantined = len(self._quarantined)
        return BlockCounts(
            total=self.total,
            free=free,
            cached=cached,
            in_use=self.total - free - cached - quarantined,
            quarantined=quarantined,
        )

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the pool's blocks for the longest prefix of ``hashes``."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, cached or in use."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
                self._owners.taken(block)
                self._unsaved.pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Take ``count`` blocks without hashes; None if fewer are available.

        Blocks behind ``after`` are preferred, so that a sequence stays contiguous.
        """
        if count > self.available():
            return None
        taken = self._run_of_free(count, after)
        missing = count - len(taken)
        if missing:
            rest = self._free.take(islice(self._free, missing))
            taken += rest + self._evict(missing - len(rest))
            taken.sort()
        for block in taken:
            self._references[block] = 1
        return taken

    def _run_of_free(self, count: int, after: int | None) -> list[int]:
        """Take up to ``count`` contiguous free blocks."""
        if after is not None:
            return self._free.take(self._free.run_from(after + 1, count))
        return self._free.take(self._free.first_run(count)) if count > 1 else []

    def _evict(self, count: int) -> list[int]:
        kept = _Kept(self.guarded, self.pins) if self.pins else self.guarded
        evicted = self._owners.above_share(count, len(self._cached) - count, kept)
        for block in evicted:
            self._forget_cached(block)
        rest = self._oldest(count - len(evicted))
        for block in rest:
            self._forget_cached(block)
        return evicted + rest

    def _oldest(self, count: int) -> list[int]:
        """Return the cached blocks that are evicted next.

        Pinned ones that are passed over become the newest, so that they are passed once.
        """
        oldest: list[int] = []
        passed: list[int] = []
        for block in self._cached:
            if len(oldest) == count:
                break
            if block in self.guarded:
                continue
            passes = len(passed) < _MOST_PASSED and self.pins.holds(block)
            (passed if passes else oldest).append(block)
        missing = count - len(oldest)
        for block in passed[missing:]:
            self._cached.move_to_end(block)
        return oldest + passed[:missing]

    def _forget_cached(self, block: int) -> None:
        del self._cached[block]
        self._owners.taken(block)
        if block in self._unsaved:
            del self._unsaved[block]
            self.unsaved_evictions += 1
        self._forget_hash(block)
        self.evictions += 1

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._block_of[block_hash]
            self._owners.forget(block)
            self.pins.forget(block)
            self._removed.append(block_hash)

    def set_hash(self, block: int, block_hash: bytes, owner: CacheOwner = _NOBODY) -> None:
        """Make a computed block in use findable, unless another block has the hash."""
        if block_hash in self._block_of or self._hash_of[block] is not None:
            return
        if self._forgotten and tag_in(block_hash) in self._forgotten:
            return
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        self._stored.append(block_hash)
        self._owners.own(block, owner)

    def forget(self, tags: frozenset[bytes]) -> int:
        """Make no block with these tags findable any more; return the number of known ones."""
        self._forgotten |= tags
        blocks = [block for name, block in self._block_of.items() if tag_in(name) in tags]
        for block in blocks:
            self.drop_forgotten(block)
        return len(blocks)

    def drop_cached(self) -> None:
        """Free all cached blocks that are not being copied."""
        for block in [cached for cached in self._cached if cached not in self.guarded]:
            self._forget_cached(block)
            self._free.add(block)

    def drop_forgotten(self, block: int) -> None:
        """Free a block that is to be forgotten, or only its hash while sequences use it.

        A block that is being copied is dropped by another call, after the copy.
        """
        block_hash = self._hash_of[block]
        if block_hash is None or tag_in(block_hash) not in self._forgotten:
            return
        if block in self.guarded:
            return
        self._unsaved.pop(block, None)
        if block in self._cached:
            del self._cached[block]
            self._owners.taken(block)
            self._free.add(block)
        self._forget_hash(block)

    def note_written(self, blocks: Iterable[int]) -> None:
        """Note blocks that the worker's shell or the tier copier has filled."""
        self._written.update(blocks)

    def take_written(self) -> tuple[int, ...]:
        """Return the blocks noted since the last call, in order."""
        written = tuple(sorted(self._written))
        self._written.clear()
        return written

    def shared(self, block: int) -> bool:
        """Return whether several sequences hold the block; writers then need a copy."""
        return self._references[block] > 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block; the blocks are given in sequence order."""
        for block in reversed(blocks):  # tails become older than roots
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                self._free.add(block)
            else:
                self._cached[block] = None
                self._owners.cached(block)
                if self._saved is not None and self._hash_of[block] not in self._saved:
                    self._unsaved[block] = None

    def keep(self, blocks: Sequence[int], tenant: str, retention: Retention) -> None:
        """Pin those leading blocks of a sequence that are findable, or end their pins."""
        findable = [block for block in blocks if self._hash_of[block] is not None]
        self.pins.keep(findable, tenant, retention)

    def save_into(self, tier: Container[bytes]) -> None:
        """Track the cached blocks that ``tier`` lacks."""
        self._saved = tier

    @property
    def untouched(self) -> int:
        """Number of blocks that can be taken without losing data that no tier has."""
        return len(self._free) + len(self._cached) - len(self._unsaved)

    def oldest_unsaved(self, count: int) -> list[int]:
        """Return unguarded cached blocks that the tier lacks, next to be evicted first."""
        waiting = (block for block in self._unsaved if block not in self.guarded)
        return list(islice(waiting, count))

    def note_saved(self, block: int) -> None:
        """Note that the tier holds the block's data or refused it."""
        self._unsaved.pop(block, None)

    def holds(self, block_hash: bytes) -> bool:
        """Return whether a block with this hash is in the pool."""
        return block_hash in self._block_of

    def hash_of(self, block: int) -> bytes:
        """Return the hash of a findable block; raise ``KeyError`` for other blocks."""
        block_hash = self._hash_of[block]
        if block_hash is None:
            raise KeyError(block)
        return block_hash

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Set unshared blocks in use aside, because a peer may still write to them."""
        for block in blocks:
            self._references[block] = 0
            self._forget_hash(block)
            self._quarantined.add(block)

    def absolve(self, blocks: Sequence[int]) -> None:
        """Free quarantined blocks after their writer has stopped."""
        self._quarantined.difference_update(blocks)
        for block in blocks:
            self._free.add(block)

    def hashes(self) -> list[bytes]:
        """Return the hashes of all findable blocks, for a snapshot."""
        return list(self._block_of)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return hashes stored and removed since the last call; the lists are disjoint."""
        stored = self._stored
        removed = self._removed
        self._stored = []
        self._removed = []
        if stored and removed:
            held = self._block_of
            stored = list(dict.fromkeys(block_hash for block_hash in stored if block_hash in held))
            removed = list(
                dict.fromkeys(block_hash for block_hash in removed if block_hash not in held)
            )
        return stored, removed

    def check_integrity(
        self, tables: Iterable[Sequence[int]], draining: Sequence[int] | None = None
    ) -> None:
        """Recount everything from block tables, one per reference; raise ``RuntimeError`` if wrong.

        ``draining`` is the expected content of the quarantine, if known.
        """
        references = [0] * self.total
        for table in tables:
            if len(set(table)) != len(table):
                raise RuntimeError(f"block table contains a block twice: {list(table)[:64]}")
            for block in table:
                references[block] += 1
        if references != self._references:
            wrong = [b for b in range(self.total) if references[b] != self._references[b]]
            raise RuntimeError(f"blocks {wrong[:8]}: reference counts differ from the block tables")
        in_use = {block for block in range(self.total) if references[block]}
        free = set(self._free)
        parts = [free, set(self._cached), in_use, self._quarantined]
        union = set().union(*parts)
        if len(free) != len(self._free):
            raise RuntimeError(f"{len(free)} blocks are free, but the count is {len(self._free)}")
        if sum(map(len, parts)) != self.total or len(union) != self.total:
            raise RuntimeError(f"block states overlap or leak: {list(map(len, parts))}")
        if draining is not None and sorted(draining) != sorted(self._quarantined):
            raise RuntimeError(f"quarantined {sorted(self._quarantined)[:8]} are not what drains")
        self._check_hashes()

    def _check_hashes(self) -> None:
        for block_hash, block in self._block_of.items():
            if self._hash_of[block] != block_hash:
                raise RuntimeError(f"block {block} lacks the hash under which it is listed")
        hashed = {block for block in range(self.total) if self._hash_of[block] is not None}
        if len(hashed) != len(self._block_of):
            raise RuntimeError("two blocks have the same hash, or a hash is not listed")
        if not self._unsaved.keys() <= self._cached.keys() or not self.guarded <= hashed:
            raise RuntimeError("a block to be saved or guarded is not cached")
        if hashed & (set(self._free) | self._quarantined) or not hashed.issuperset(self._cached):
            raise RuntimeError("a free block has a hash, or a cached one has none")
        self._owners.check(self._cached, hashed)
        self.pins.check(hashed)
