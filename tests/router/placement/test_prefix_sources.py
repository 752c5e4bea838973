"""From whom a prefix is pulled: the cheapest of all chains that there are."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.placement.cost import WorkerLoad, price
from router.routing.placement.prefix_sources import (
    MAX_LINKS,
    MAX_SOURCES,
    PULL_OVERHEAD_S,
    Source,
    cheapest_chains,
)

BLOCK_BYTES = 368_640
PROMPT_TOKENS = 2000

rates = st.sampled_from((1e6, 3e6, 1e7, 1e8, 1e9, 1e10))
holders = st.lists(st.tuples(st.integers(1, 120), rates), max_size=MAX_SOURCES)


def chain_s(held: int, links) -> float:
    """A chain as it is described: each link brings what its source has beyond the one before."""
    seconds = 0.0
    for blocks, rate in links:
        seconds += PULL_OVERHEAD_S + (blocks - held) * BLOCK_BYTES / rate
        held = blocks
    return seconds


def priced(held: int, known, token_s: float = 1e-3):
    sources = tuple(Source(f"w{place}", blocks) for place, (blocks, _) in enumerate(known))
    worker = WorkerLoad(
        worker_id="decode-0",
        incarnation=b"",
        role="decode",
        cached_blocks=held,
        prefill_token_s=token_s,
        prefill_context_s=1e-7,
        block_bytes=BLOCK_BYTES,
        sources=sources,
        edges_bytes_per_s={f"w{place}": rate for place, (_, rate) in enumerate(known)},
    )
    return price(prefill=None, decode=worker, prompt_tokens=PROMPT_TOKENS, expected_tokens=1)


@given(st.integers(0, 100), holders, st.sampled_from((1e-5, 1e-4, 1e-3)))
def test_no_chain_and_no_computing_is_cheaper(held, known, token_s):
    known.sort(key=lambda one: -one[0])
    chosen = priced(held, known, token_s)
    costs = [priced(held, [], token_s).terms.compute_s]
    for count in range(1, MAX_LINKS + 1):
        for links in combinations(sorted(known), count):
            ends = [held, *(blocks for blocks, _ in links)]
            if all(a < b for a, b in pairwise(ends)):
                rest_s = priced(ends[-1], [], token_s).terms.compute_s
                costs.append(chain_s(held, links) + rest_s)
    found_s = chosen.terms.pull_s + chosen.terms.compute_s
    assert found_s == pytest.approx(min(costs), rel=1e-9)
    rate_of = {f"w{place}": rate for place, (_, rate) in enumerate(known)}
    links = [(source.blocks, rate_of[source.worker_id]) for source in chosen.links]
    assert chosen.terms.pull_s == pytest.approx(chain_s(held, links))


def test_who_is_near_gives_what_it_has_and_the_rest_comes_from_afar():
    near, far = (80, 1e10), (110, 2e8)
    chosen = priced(0, [far, near])
    assert chosen.links == (Source("w1", 80), Source("w0", 110))
    assert chosen.uncached_tokens == PROMPT_TOKENS - 110 * 16
    assert chosen.terms.pull_s == pytest.approx(chain_s(0, [near, far]))


@pytest.mark.parametrize(
    ("far_rate", "ends"),
    [(1e10, [110]), (2e8, [80, 110]), (1e6, [80])],
    ids=["as fast: one source", "slower: both", "slower than computing: the near one alone"],
)
def test_by_edge_and_block_range_pulled_or_computed(far_rate, ends):
    chosen = priced(0, [(110, far_rate), (80, 1e10)])
    assert [source.blocks for source in chosen.links] == ends


def test_what_is_here_is_asked_of_nobody():
    assert cheapest_chains(80, [Source("w0", 80), Source("w1", 3)], [1e9, 1e10], BLOCK_BYTES) == []


def test_of_equal_edges_the_one_with_most_is_asked_alone():
    sources = [Source(f"w{place}", 60 - 10 * place) for place in range(MAX_SOURCES)]
    (chain,) = cheapest_chains(0, sources, [1e9] * MAX_SOURCES, BLOCK_BYTES)
    assert chain.links == (sources[0],)
