"""Data-parallel ranks of an attached vLLM, each with a cache of its own. No I/O.

vLLM sends a request to the rank with the fewest requests, whatever the others have cached. So
requests name their rank, which is the one with the least of:

    2 x the prompt tokens that it has not cached    this request waits for them, and later ones
    + those of the prompts that wait there
    + ``ROW_TOKENS`` for each response that it computes

A rank with more than twice the responses of the emptiest one, and ``SPARE_ROWS``, takes none: all
requests over one long prefix would queue there.

A block is stored when the first rank stores it, and removed when the last one removes it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from baton.engine.remote.cached_prefixes import CachedPrefixes, Work
from baton.engine.remote.http import HttpOrigin
from baton.engine.remote.live_request import LiveRequest
from baton.types.events import CacheChanged

ROW_TOKENS = 64
"""Prompt tokens that take about as long as the steps of a short response."""
SPARE_ROWS = 8

OnChange = Callable[[CacheChanged], None]


def at_rank(origin: HttpOrigin, rank: int) -> HttpOrigin:
    """Return the server with requests for one of its ranks; connections are those of all."""
    return replace(origin, headers=f"X-data-parallel-rank: {rank}\r\n")


@dataclass(slots=True)
class _Place:
    """Rank of a request, the tokens to compute before its first one, and its responses."""

    rank: int
    waiting_tokens: int
    rows: int


class RankedPrefixes(CachedPrefixes):
    """Prefixes of all ranks, of which each request has one.

    Args:
        count: Number of ranks.
        make: Returns the prefixes of a rank, which report their changes to its second argument.
        on_change: Called with each change of Baton's index.
    """

    def __init__(
        self, count: int, make: Callable[[int, OnChange], CachedPrefixes], on_change: OnChange
    ) -> None:
        self._on_change = on_change
        self._holders: dict[bytes, int] = {}  # a bit for each rank
        self._ranks = [make(rank, partial(self._changed, 1 << rank)) for rank in range(count)]
        self._places: dict[str, _Place] = {}

    def choose(self, request: LiveRequest) -> int:
        """Return the rank of a request, which is chosen once."""
        if request.rank is None:
            request.rank = self._cheapest(request)
        return request.rank

    def _cheapest(self, request: LiveRequest) -> int:
        rows = [0] * len(self._ranks)
        waiting = [0] * len(self._ranks)
        for other in self._places.values():
            rows[other.rank] += other.rows
            waiting[other.rank] += other.waiting_tokens
        costs = [
            (
                2 * self._uncached(request, rank) + waiting[rank] + ROW_TOKENS * rows[rank],
                one.held_blocks,
                rank,
            )
            for rank, one in enumerate(self._ranks)
            if rows[rank] <= 2 * min(rows) + SPARE_ROWS
        ]
        return min(costs)[-1]

    def _uncached(self, request: LiveRequest, rank: int) -> int:
        return len(request.prompt) - self._ranks[rank].cached_tokens(request.hashes)

    @property
    def held_blocks(self) -> int:
        """Number of Baton's blocks that all ranks have cached together."""
        return sum(rank.held_blocks for rank in self._ranks)

    def works(self) -> list[Work]:
        """Return the tasks that keep all ranks up to date."""
        return [work for rank in self._ranks for work in rank.works()]

    def cached_of(self, request: LiveRequest) -> int:
        """Return the cached tokens of a prompt at its rank."""
        return self._ranks[self.choose(request)].cached_tokens(request.hashes)

    def sent(self, request: LiveRequest) -> None:
        """Count a request at its rank, until it ends."""
        rank = self.choose(request)
        tokens = self._uncached(request, rank) if request.computes else 0
        place = _Place(rank, tokens, len(request.open_choices))
        self._places[request.submit.request_id] = place
        self._ranks[rank].sent(request)

    def computed(self, request: LiveRequest) -> None:
        """Note that its rank has computed a prompt."""
        if (place := self._places.get(request.submit.request_id)) is not None:
            place.waiting_tokens = 0
        self._ranks[self.choose(request)].computed(request)

    def responded(self, request: LiveRequest, choice: int, cached_tokens: int | None) -> None:
        """Note the end of a response."""
        self._ranks[self.choose(request)].responded(request, choice, cached_tokens)

    def ended(self, request: LiveRequest) -> None:
        """Count a request no more."""
        self._places.pop(request.submit.request_id, None)

    def erased(self) -> None:
        """Note that all ranks have erased their caches."""
        for rank in self._ranks:
            rank.erased()

    def close(self) -> None:
        """Free what the prefixes of all ranks hold."""
        for rank in self._ranks:
            rank.close()

    def _changed(self, bit: int, change: CacheChanged) -> None:
        stored: list[bytes] = []
        for name in change.stored:
            held = self._holders.get(name, 0)
            self._holders[name] = held | bit
            if not held:
                stored.append(name)
        removed: list[bytes] = []
        for name in change.removed:
            left = self._holders.get(name, 0) & ~bit
            if left:
                self._holders[name] = left
            elif self._holders.pop(name, 0):
                removed.append(name)
        if stored or removed:
            self._on_change(CacheChanged(tuple(stored), tuple(removed)))
