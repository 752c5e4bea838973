"""Prefixes that a server behind HTTP has cached, as far as they can be known.

A server that sends KV events is known exactly. For others the requests to it are remembered:

    prompt and response of a request  ──▶  blocks, the most recently used last
    more blocks than the server has   ──▶  the least recently used are forgotten
    the server had fewer cached than expected
                                      ──▶  the first missing block is forgotten, and all blocks
                                           that were used before it
"""

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from itertools import takewhile
from typing import Any

from baton.engine.block_names import block_names
from baton.engine.remote.live_request import LiveRequest
from baton.types.events import CacheChanged
from baton.types.geometry import BLOCK_TOKENS
from baton.types.images import hashed_tokens

Work = tuple[Coroutine[Any, Any, None], str]
"""Task to run as long as the engine, and its name."""


class CachedPrefixes:
    """Blocks that a server has cached, by Baton's hashes."""

    @property
    def held_blocks(self) -> int:
        """Number of Baton's blocks that are cached."""
        raise NotImplementedError

    def works(self) -> list[Work]:
        """Return the tasks that keep this up to date."""
        return []

    def cached_tokens(self, hashes: Sequence[bytes]) -> int:
        """Return the cached tokens of a prompt with these block hashes."""
        raise NotImplementedError

    def cached_of(self, request: LiveRequest) -> int:
        """Return the cached tokens of a prompt where it is computed."""
        return self.cached_tokens(request.hashes)

    def sent(self, request: LiveRequest) -> None:
        """Note that a prompt was sent to the server."""

    def computed(self, request: LiveRequest) -> None:
        """Note that the server has computed a prompt."""

    def responded(self, request: LiveRequest, choice: int, cached_tokens: int | None) -> None:
        """Note the end of a response, with the cached prompt tokens that the server reports."""

    def ended(self, request: LiveRequest) -> None:
        """Note the end of a request, whatever it has brought."""

    def erased(self) -> None:
        """Note that the server has erased its whole cache."""

    def close(self) -> None:
        """Free what this holds; the tasks have ended."""


class RecentBlocks:
    """Most recently used blocks, by Baton's hashes.

    Args:
        blocks: Number of Baton's blocks that the server can hold; 0: it caches nothing.
        block_tokens: Tokens of one of its blocks, a multiple of Baton's.
        on_change: Called with each change of Baton's index.
        by_slot: Whether each slot of the server keeps the KV of its last prompt, as llama-server's
            do. A prompt in another slot misses its blocks there, and shows nothing of others.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        on_change: Callable[[CacheChanged], None],
        *,
        by_slot: bool = False,
    ) -> None:
        self._by_slot = by_slot
        self._most = blocks
        self._block_tokens = block_tokens
        self._on_change = on_change
        self._used: OrderedDict[bytes, int] = OrderedDict()  # when, the longest ago first
        self._time = 0

    def expected(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Return when each of the first blocks was used that are cached, in whole blocks."""
        known = sum(1 for _ in takewhile(self._used.__contains__, hashes))
        return tuple(self._used[name] for name in hashes[: self._whole(known)])

    def use(self, hashes: Sequence[bytes]) -> None:
        """Note the use of a chain of blocks: its end is forgotten before its beginning."""
        if not self._most:
            return
        stored: list[bytes] = []
        for name in reversed(hashes[: self._whole(len(hashes))]):
            self._time += 1
            if name not in self._used:
                stored.append(name)
            self._used[name] = self._time
            self._used.move_to_end(name)
        removed: list[bytes] = []
        while len(self._used) > self._most:
            removed.append(self._used.popitem(last=False)[0])
        self._report(stored, removed)

    def correct(self, expected: tuple[int, ...], cached_tokens: int) -> tuple[int, ...]:
        """Take the cached tokens that the server reports, and return what was cached."""
        blocks = cached_tokens // BLOCK_TOKENS
        if blocks >= len(expected) or self._by_slot:
            return expected[:blocks]
        removed: list[bytes] = []
        while self._used and next(iter(self._used.values())) <= expected[blocks]:
            removed.append(self._used.popitem(last=False)[0])
        self._report([], removed)
        return expected[:blocks]

    def disable(self) -> None:
        """Forget all blocks, and remember none from now on."""
        self._most = 0
        self.erased()

    def erased(self) -> None:
        """Forget all blocks."""
        removed = tuple(self._used)
        self._used.clear()
        self._report([], removed)

    def _whole(self, blocks: int) -> int:
        """Return how many of the first blocks are in whole blocks of the server."""
        return blocks - blocks % (self._block_tokens // BLOCK_TOKENS)

    def _report(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        kept = [name for name in stored if name in self._used]
        gone = set(removed).difference(stored)
        if kept or gone:
            self._on_change(CacheChanged(tuple(reversed(kept)), tuple(gone)))


class ApproximatePrefixes(RecentBlocks, CachedPrefixes):
    """Blocks of own requests, without I/O."""

    @property
    def held_blocks(self) -> int:
        """Number of Baton's blocks that are cached."""
        return len(self._used)

    def cached_tokens(self, hashes: Sequence[bytes]) -> int:
        """Return the cached tokens of a prompt with these block hashes, in whole blocks."""
        return len(self.expected(hashes)) * BLOCK_TOKENS

    def sent(self, request: LiveRequest) -> None:
        """Note what is expected of a prompt, before others use the same blocks."""
        request.expected = self.expected(request.hashes)

    def computed(self, request: LiveRequest) -> None:
        """Remember the blocks of a prompt."""
        self.use(request.hashes)

    def responded(self, request: LiveRequest, choice: int, cached_tokens: int | None) -> None:
        """Remember the blocks of a response, and correct what was expected of the prompt's."""
        if cached_tokens is not None:
            request.expected = self.correct(request.expected, cached_tokens)
        hashes = request.hashes
        parent = hashes[-1] if hashes else request.spec.hash_seed
        hashed = hashed_tokens(request.prompt, request.spec.images)
        behind = hashed[len(hashes) * BLOCK_TOKENS :]
        behind = [*behind, *request.emitted(choice), *request.generated.pop(choice, ())]
        self.use([*hashes, *block_names(parent, behind[:-1])])  # not the last token
