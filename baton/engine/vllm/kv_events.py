"""vLLM's KV events as changes of Baton's index, without I/O.

vLLM numbers its batches from 0 and repeats them on request. ``EventOrder`` puts them in order and
notices gaps; ``CachedBlocks`` follows the cache and translates names:

    vLLM   [ block of 32 tokens, hash A ][ block of 32 tokens, hash B, parent A ]
    Baton  [ 16 tokens ][ 16 tokens     ][ 16 tokens ][ 16 tokens               ]

Baton's hashes are computed from the token ids. The first block of a prompt names its seed, which is
the cache salt of the request (``protocol.py``), or that of a client past Baton; the following ones
name their parent. A block that contains a part of an image names it, with the place at which the
image begins (``baton/types/images.py``).

Events of vLLM's OffloadingConnector name blocks that are in host memory, by the names under which
the pool had them. The tier of Baton's index has the blocks of both.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from baton.engine.block_names import block_names
from baton.types.block_hashes import block_hashes, seed_past_baton
from baton.types.events import CacheChanged
from baton.types.geometry import BLOCK_TOKENS
from baton.types.images import words_named
from baton.types.pool_counts import TierChange

REPLAY_END = -1

MEMORY = "memory"
"""Tier of the blocks that vLLM has in host memory or in its pool."""

Name = int | bytes
"""Hash of a block in vLLM."""


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Event: blocks of one sequence were computed, in order."""

    block_hashes: tuple[Name, ...]
    parent_block_hash: Name | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Event: blocks were evicted."""

    block_hashes: tuple[Name, ...]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Event: the cache was reset."""


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one engine step."""

    ts: float
    events: "tuple[Event, ...]"


Event = BlockStored | BlockRemoved | AllBlocksCleared

_decoder = msgspec.msgpack.Decoder(KvEventBatch)
_PART_BLOCKS = 1000  # they take 8 ms


def parts_of(payload: bytes) -> Iterator[list[Event]]:
    """Return the events of a batch in parts of a bounded number of blocks.

    Raises:
        msgspec.DecodeError: The batch is of an unknown format.
    """
    part: list[Event] = []
    blocks = 0
    for event in _decoder.decode(payload).events:
        for piece in _pieces(event):
            part.append(piece)
            blocks += 1 if isinstance(piece, AllBlocksCleared) else len(piece.block_hashes) + 1
            if blocks >= _PART_BLOCKS:
                yield part
                part = []
                blocks = 0
    yield part


def _pieces(event: Event) -> Iterator[Event]:
    """Return an event of many blocks as several ones."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= _PART_BLOCKS:
        yield event
        return
    for at in range(0, len(event.block_hashes), _PART_BLOCKS):
        of = slice(at, at + _PART_BLOCKS)
        piece = msgspec.structs.replace(event, block_hashes=event.block_hashes[of])
        if isinstance(event, BlockStored) and isinstance(piece, BlockStored):
            size = event.block_size
            piece = msgspec.structs.replace(
                piece,
                parent_block_hash=event.block_hashes[at - 1] if at else event.parent_block_hash,
                token_ids=event.token_ids[of.start * size : of.stop * size],
                extra_keys=event.extra_keys[of] if event.extra_keys else None,
            )
        yield piece


class EventOrder:
    """Order of numbered batches from the live stream and from replays.

    Attributes:
        misses: Whether the replay must repeat batches, from the one with number ``next`` on.
    """

    def __init__(self) -> None:
        self.misses = True  # the stream may begin before the subscription
        self.next = 0
        self._held: dict[int, bytes] = {}  # live batches behind a gap

    def live(self, number: int, payload: bytes) -> list[bytes]:
        """Take a batch of the live stream, and return those that can be applied."""
        if number >= self.next:
            self._held[number] = payload
            self.misses = self.misses or number > self.next
        return self.take_ready()

    def replayed(self, number: int, payload: bytes) -> list[bytes]:
        """Take a repeated batch, and return those that can be applied."""
        if number >= self.next:
            self._held[number] = payload
        return self.take_ready()

    def replay_ended(self) -> bool:
        """Note the end of a replay; return whether batches are lost, so the cache is unknown."""
        self.misses = False
        lost = bool(self._held) and self.next not in self._held
        if lost:
            self.next = min(self._held)
        return lost

    def take_ready(self) -> list[bytes]:
        """Return the batches that can be applied, in order."""
        ready = []
        while (payload := self._held.pop(self.next, None)) is not None:
            ready.append(payload)
            self.next += 1
        return ready


class CachedBlocks:
    """Blocks that vLLM holds, by its names and by Baton's.

    Args:
        has_tier: Whether vLLM holds blocks in host memory, too.
    """

    def __init__(self, *, has_tier: bool = False) -> None:
        self._has_tier = has_tier
        self._copies: Counter[Name] = Counter()  # vLLM may hold a block more than once
        self._hashes: dict[Name, tuple[bytes, ...]] = {}  # Baton's hashes of one vLLM block
        self._held: Counter[bytes] = Counter()
        self._below: Counter[Name] = Counter()  # copies in host memory, of blocks with known hashes
        self._reach: Counter[bytes] = Counter()  # vLLM's blocks in pool or host memory

    @property
    def held_blocks(self) -> int:
        """Number of Baton's blocks that vLLM holds."""
        return len(self._held)

    @property
    def tier_blocks(self) -> int:
        """Number of vLLM's blocks in host memory."""
        return len(self._below)

    def cached_tokens(self, hashes: Sequence[bytes], block_tokens: int) -> int:
        """Return the cached tokens of a prompt with these block hashes, in whole vLLM blocks."""
        tokens = 0
        for block_hash in hashes:
            if block_hash not in self._held:
                break
            tokens += BLOCK_TOKENS
        return tokens - tokens % block_tokens

    def apply(self, payload: bytes) -> CacheChanged:
        """Apply one batch, and return what Baton's index gains and loses.

        Raises:
            msgspec.DecodeError: The batch is of an unknown format.
        """
        return self.take(_decoder.decode(payload).events)

    def take(self, events: Iterable[Event]) -> CacheChanged:
        """Apply events of a batch, and return what Baton's index gains and loses."""
        pool = _Changes(self._held)
        reach = _Changes(self._reach, counts_any=self._has_tier)
        for event in events:
            match event:
                case BlockStored() if _in_pool(event.medium, event.group_idx):
                    self._store(event, pool, reach)
                case BlockRemoved() if _in_pool(event.medium, event.group_idx):
                    for name in event.block_hashes:
                        self._remove(name, pool, reach)
                case BlockStored(medium="CPU", group_idx=None | 0):
                    for name in event.block_hashes:
                        self._store_below(name, reach)
                case BlockRemoved(medium="CPU", group_idx=None | 0):
                    for name in event.block_hashes:
                        self._remove_below(name, reach)
                case AllBlocksCleared():
                    pool.clear()
                    reach.clear()
                    self.clear()
        return self._change(pool, reach)

    def clear(self) -> CacheChanged:
        """Forget all blocks, and return what Baton's index loses."""
        pool = _Changes(self._held)
        reach = _Changes(self._reach, counts_any=self._has_tier)
        pool.clear()
        reach.clear()
        self._copies.clear()
        self._hashes.clear()
        self._below.clear()
        return self._change(pool, reach)

    def _change(self, pool: "_Changes", reach: "_Changes") -> CacheChanged:
        below = (TierChange(MEMORY, *reach.result()),) if self._has_tier else ()
        return CacheChanged(*pool.result(), below)

    def _store_below(self, name: Name, reach: "_Changes") -> None:
        if name in self._hashes:  # others were not named by the pool: their tokens are unknown
            self._below[name] += 1
            if self._below[name] == 1:
                reach.add(self._hashes[name])

    def _remove_below(self, name: Name, reach: "_Changes") -> None:
        if self._below[name] > 1:
            self._below[name] -= 1
        elif self._below.pop(name, 0):
            reach.remove(self._hashes[name])
            if name not in self._copies:
                del self._hashes[name]

    def _store(self, event: BlockStored, pool: "_Changes", reach: "_Changes") -> None:
        parent = self._parent(event)
        size = event.block_size
        texts = _names_of_texts(parent, event)
        for place, name in enumerate(event.block_hashes):
            self._copies[name] += 1
            if (known := self._hashes.get(name)) is not None:
                if self._copies[name] == 1:  # it was in host memory only
                    pool.add(known)
                    reach.add(known)
                parent = known[-1]
                continue
            if parent is None:
                continue
            if texts:
                count = size // BLOCK_TOKENS
                hashes = tuple(texts[place * count : (place + 1) * count])
            else:
                keys = (event.extra_keys[place] if event.extra_keys else None) or ()
                tokens = _hashed(event.token_ids[place * size : (place + 1) * size], keys)
                if tokens is None:  # an image that Baton has not sent
                    parent = None
                    continue
                hashes = tuple(block_hashes(parent, tokens))
            self._hashes[name] = hashes
            pool.add(hashes)
            reach.add(hashes)
            parent = hashes[-1]

    def _parent(self, event: BlockStored) -> bytes | None:
        """Return the hash before the first block; None if it is unknown."""
        if event.parent_block_hash is not None:
            known = self._hashes.get(event.parent_block_hash)
            return known[-1] if known is not None else None
        keys = (event.extra_keys[0] if event.extra_keys else None) or ()
        return seed_past_baton([key for key in keys if isinstance(key, str)])

    def _remove(self, name: Name, pool: "_Changes", reach: "_Changes") -> None:
        if self._copies[name] > 1:
            self._copies[name] -= 1
            return
        if not self._copies.pop(name, 0):
            return
        hashes = self._hashes.get(name, ())
        pool.remove(hashes)
        reach.remove(hashes)
        if name not in self._below:
            self._hashes.pop(name, None)


class _Changes:
    """Hashes that a count of blocks gains and loses in a batch, in order."""

    def __init__(self, counts: Counter[bytes], *, counts_any: bool = True) -> None:
        self._counts = counts
        self._counts_any = counts_any
        self._gained: dict[bytes, None] = {}
        self._lost: dict[bytes, None] = {}

    def add(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes if self._counts_any else ():
            self._counts[block_hash] += 1
            if self._counts[block_hash] == 1:
                _note(block_hash, self._gained, self._lost)

    def remove(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes if self._counts_any else ():
            self._counts[block_hash] -= 1
            if not self._counts[block_hash]:
                del self._counts[block_hash]
                _note(block_hash, self._lost, self._gained)

    def clear(self) -> None:
        self._lost |= dict.fromkeys(name for name in self._counts if name not in self._gained)
        self._gained.clear()
        self._counts.clear()

    def result(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        return tuple(self._gained), tuple(self._lost)


def _hashed(tokens: Sequence[int], keys: Sequence[Any]) -> Sequence[int] | None:
    """Return the tokens by which a block is named; None if it has more than texts and images."""
    hashed = list(tokens)
    for key in keys:
        match key:
            case str():
                continue
            case [str() as name, int() as begin] if (words := words_named(name)) is not None:
                for at in range(max(begin, 0), min(begin + len(words), len(hashed))):
                    hashed[at] = words[at - begin]
            case _:
                return None
    return hashed


def _names_of_texts(parent: bytes | None, event: BlockStored) -> list[bytes]:
    """Return Baton's hashes of all blocks of an event; none if a block has more than texts."""
    keys = (key for keys_of_one in event.extra_keys or () for key in keys_of_one or ())
    if parent is None or not all(isinstance(key, str) for key in keys):
        return []
    return [] if event.block_size % BLOCK_TOKENS else block_names(parent, event.token_ids)


def _in_pool(medium: str | None, group: int | None) -> bool:
    """Return whether an event is of the pool of the first KV group, by which models are indexed."""
    return medium in (None, "GPU") and not group


def _note(block_hash: bytes, gained: dict[bytes, None], lost: dict[bytes, None]) -> None:
    """Add a hash to ``gained``, or take back its entry in ``lost`` of the same batch."""
    if block_hash in lost:
        del lost[block_hash]
    else:
        gained[block_hash] = None
