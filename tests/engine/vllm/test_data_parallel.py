"""Choice of a data-parallel rank, without a server."""

from collections import Counter

import msgspec

from baton.engine.core.sequence import Kind
from baton.engine.remote.cached_prefixes import ApproximatePrefixes
from baton.engine.remote.http import HttpOrigin
from baton.engine.remote.live_request import LiveRequest
from baton.engine.vllm.ranks import OnChange, RankedPrefixes, at_rank
from baton.types.events import CacheChanged
from tests.engine.remote.test_cached_prefixes import live, prompt_of

LONG = 640


class Ranks:
    """Ranks of a server without KV events, and what the index has."""

    def __init__(self, count: int = 2, blocks: int = 64) -> None:
        self._blocks = blocks  # of a rank
        self.held: set[bytes] = set()
        self.prefixes = RankedPrefixes(count, self._make, self._change)
        self._names = 0

    def _make(self, _: int, on_change: OnChange) -> ApproximatePrefixes:
        return ApproximatePrefixes(self._blocks, 16, on_change)

    def _change(self, change: CacheChanged) -> None:
        assert not self.held & set(change.stored)
        assert self.held >= set(change.removed)
        self.held |= set(change.stored)
        self.held -= set(change.removed)

    def send(self, prompt: list[int], kind: Kind = Kind.FULL) -> tuple[LiveRequest, int]:
        """Return a request, and its rank."""
        request = live(prompt)
        self._names += 1
        request.submit = msgspec.structs.replace(request.submit, request_id=f"r{self._names}")
        request.spec = msgspec.structs.replace(request.spec, kind=kind)
        rank = self.prefixes.choose(request)
        self.prefixes.sent(request)  # only this counts it: others are refused or cancelled before
        assert self.prefixes.choose(request) == rank
        return request, rank

    def end(self, request: LiveRequest) -> None:
        self.prefixes.computed(request)
        self.prefixes.responded(request, 0, None)
        self.prefixes.ended(request)


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    ranks = Ranks(4)
    homes = {}
    for first in range(0, 40_000, 10_000):
        request, homes[first] = ranks.send(prompt_of(first, LONG))
        assert ranks.prefixes.cached_of(request) == 0
        ranks.end(request)
    assert set(homes.values()) == set(range(4))  # an empty cache before one that is in use
    for first, home in homes.items():
        request, rank = ranks.send(prompt_of(first, LONG + 50))
        assert rank == home
        assert ranks.prefixes.cached_of(request) >= LONG - 16
        ranks.end(request)


def test_a_burst_is_spread_and_an_idle_rank_takes_what_waits_long() -> None:
    ranks = Ranks(4)
    strangers = [ranks.send(prompt_of(1000 * number, LONG))[1] for number in range(12)]
    assert Counter(strangers) == dict.fromkeys(range(4), 3)

    ranks = Ranks(2)
    first, home = ranks.send(prompt_of(0, LONG))
    ranks.end(first)
    same = [ranks.send(prompt_of(0, LONG + 160 * turn))[1] for turn in range(1, 9)]
    assert same[0] == home
    assert set(same) == {0, 1}  # in the end less work waits at the other


def test_what_has_ended_or_is_computed_waits_no_more() -> None:
    ranks = Ranks(2)
    open_ones = [ranks.send(prompt_of(1000 * number, LONG)) for number in range(6)]
    at_first = [request for request, rank in open_ones if rank == 0]
    ranks.prefixes.ended(at_first.pop())  # cancelled
    assert ranks.send(prompt_of(50_000, LONG))[1] == 0
    for request in at_first:
        ranks.prefixes.computed(request)
    assert [ranks.send(prompt_of(60_000 + 1000 * number, 64))[1] for number in range(3)] == [0] * 3
    again, rank = ranks.send(prompt_of(90_000, 9 * LONG), Kind.REMOTE)
    assert rank == 0  # its KV comes from another worker, so no prompt waits for it
    assert ranks.send(prompt_of(91_000, 64))[1] == 0
    ranks.prefixes.ended(again)


def test_the_index_has_a_block_as_long_as_a_rank_has_it() -> None:
    ranks = Ranks(2)
    both = [ranks.send(prompt_of(0, 321)) for _ in range(2)]
    assert {rank for _, rank in both} == {0, 1}
    for request, _ in both:
        ranks.end(request)
    assert len(ranks.held) == 20
    assert ranks.prefixes.held_blocks == 40
    for number in range(4):  # the ranks hold 64 blocks each
        request, _ = ranks.send(prompt_of(7000 + 1000 * number, LONG))
        ranks.end(request)
    ranks.prefixes.erased()
    assert not ranks.held
    assert ranks.prefixes.held_blocks == 0


def test_requests_of_a_rank_use_the_connections_and_the_key_of_the_server() -> None:
    origin = HttpOrigin.of_url("http://gpu-1:8000/v1-proxy", "old")
    origin.key = "new"
    there = at_rank(origin, 3)
    head = there.request_bytes("POST", "/inference/v1/generate", b"{}").decode()
    assert "X-data-parallel-rank: 3\r\n" in head
    assert "Bearer new\r\n" in head
    assert there.kept is origin.kept
    assert "parallel" not in origin.request_bytes("GET", "/health").decode()


def test_a_request_that_ends_before_it_is_sent_counts_nowhere() -> None:
    """Its exchange may begin when it is cancelled already, and a held prompt may be refused."""
    ranks = Ranks(2)
    for number in range(5):
        request, _ = ranks.send(prompt_of(1000 * number, LONG))
        ranks.prefixes.ended(request)
        ranks.prefixes.choose(request)
        late = live(prompt_of(1000 * number, LONG))
        ranks.prefixes.cached_of(late)
        ranks.prefixes.choose(late)
    assert not ranks.prefixes._places


def test_a_long_prefix_that_all_ask_for_does_not_keep_the_others_idle() -> None:
    """To compute it again costs as much as a thousand rows, and one rank cannot run so many."""
    ranks = Ranks(4, blocks=4096)
    request, home = ranks.send(prompt_of(0, 30_000))
    ranks.end(request)
    shared = Counter(ranks.send(prompt_of(0, 30_000 + 100))[1] for _ in range(120))
    assert shared[home] == max(shared.values()) <= 60
    assert min(shared[rank] for rank in range(4)) >= 15
