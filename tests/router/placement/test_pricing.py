"""Prices in C++: the bits of Python's, over all workers."""

import random
import re
from pathlib import Path

import msgspec
import pytest
from batonpb.common_pb2 import EdgeRate

from baton.registry.types import TIERS, EventBatch, tier_incarnation
from benchmarks.placement import fleet
from router.routing.placement import cost, pricing
from router.routing.placement.booked_load import Booking, LoadBook
from router.routing.placement.congestion import Crowding
from router.routing.placement.cost import candidates
from router.routing.placement.native.library import load
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.prefix_sources import (
    ENGINE_PULL_OVERHEAD_S,
    MAX_LINKS,
    MAX_SOURCES,
    PULL_OVERHEAD_S,
    Source,
    cheapest_chains,
)
from router.routing.placement.pricing import Asked, Pricing
from router.routing.placement.shortlist import Shortlist, described
from router.routing.placement.worker_load import Reports, loads_of

pytestmark = pytest.mark.skipif(load() is None, reason="no compiler")
MODES = ("auto", "disaggregated", "colocated")


def drawn(seed: int):
    """A fleet with caches, queues, bookings, unlike reports, and a few formats."""
    draw = random.Random(seed)
    slots, index, book = (
        fleet(draw.randrange(9), draw.randrange(1, 9), draw),
        PrefixIndex(),
        LoadBook(),
    )
    hashes = [draw.randbytes(16) for _ in range(64)]
    for slot in slots:
        status, link = slot.link.status, slot.link
        if draw.random() < 0.3:
            status.ClearField("answering")
        if draw.random() < 0.3:
            status.prefill_tokens_per_s = status.prefill_token_s = status.decode_step_s = 0
        if draw.random() < 0.7:
            status.decode_base_s, status.decode_row_s = draw.uniform(0, 0.02), draw.uniform(0, 1e-3)
            status.decode_context_s = draw.uniform(0, 1e-6)
            status.answering_context = draw.randrange(2000)
            status.coming_context = draw.randrange(10**6)
        status.kv_blocks.free, status.kv_blocks.cached = draw.randrange(60), draw.randrange(60)
        status.queued_prompt_context = draw.randrange(10**6)
        status.identity.host = draw.choice(("here", "there"))
        for edge in status.edges:
            edge.bytes_per_s = draw.choice((0, 1e6, 1e9))
        if draw.random() < 0.2:
            link.capabilities.numerics_id = "exact/other"
        if draw.random() < 0.5:
            stored = tuple(hashes[: draw.randrange(1, 65)])
            index.apply(EventBatch(incarnation=slot.incarnation, sequence=1, stored=stored))
        if draw.random() < 0.4:  # what lies below its pool: the disk has what the memory has
            status.kv_tiers.add(name="memory", block_s=draw.choice((0, 1e-5, 1e-3)))
            status.kv_tiers.add(name="disk", block_s=draw.choice((0, 1e-4, 1e-2)))
            for tier, blocks in zip(TIERS, sorted(draw.choices(range(1, 65), k=2)), strict=True):
                name = tier_incarnation(slot.incarnation, tier)
                stored = tuple(hashes[:blocks])
                index.apply(EventBatch(incarnation=name, sequence=1, stored=stored))
        if draw.random() < 0.5:
            tokens, streams = draw.randrange(500), draw.randrange(3)
            figures = {"tokens": tokens, "streams": streams, "stream_tokens": 900 * streams}
            book.book(slot.worker_id, slot.worker_id, Booking(**figures, at_ns=0))
            if draw.random() < 0.3:  # reported, and then it ends
                book.reported(slot.worker_id, 10**9)
                book.release(slot.worker_id, 2 * 10**9)
    return draw, slots, index.prefixes(hashes, 0), book, index, hashes


class Slots(list):
    def get(self, worker_id):
        return next((slot for slot in self if slot.worker_id == worker_id), None)


def with_tiers(loads, short, held):
    for place, (blocks, seconds) in short.tiers(held).items():
        below = {"tier_blocks": blocks, "tier_s": seconds}
        loads[place] = msgspec.structs.replace(loads[place], **below)
    return loads


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(25))
def test_what_is_found_is_what_python_finds_among_all(seed, mode):
    draw, slots, held, book, index, hashes = drawn(seed)
    for slot in slots if seed % 2 else ():
        slot.link.capabilities.hand_off = "its own"
    asked = Asked(mode, draw.randrange(1, 1500), draw.randrange(1, 300), draw.choice((1, 4)), True)
    crowding, short = Crowding(), Shortlist(Reports(), Crowding(), seed)
    rates = short.update(Slots(slots), 0)
    placed = short.cheapest(asked, held, book, 0)
    found = described(placed, asked, rates, {"prefill": 0.0, "decode": 0.0})
    loads = with_tiers(loads_of(slots, hashes, index, book, 0), short, held)
    if held and mode == MODES[seed % 3]:  # somebody gives what it holds
        sources = short.sources(held)
        overhead_s = ENGINE_PULL_OVERHEAD_S if seed % 2 else PULL_OVERHEAD_S
        assert all(source.overhead_s >= overhead_s for source in sources)
        asked = asked._replace(sources=sources)
        loads = [msgspec.structs.replace(load, sources=sources) for load in loads]
        placed = short.cheapest(asked, held, book, 0)
        found = described(placed, asked, rates, {"prefill": 0.0, "decode": 0.0})
    work = ("mode", "prompt_tokens", "expected_tokens", "choices", "moves_kv")
    expected = candidates(loads, **{name: getattr(asked, name) for name in work})
    assert crowding.wait_per_s("prefill") == 0.0
    assert [one.terms.total_s for one in found] == pytest.approx(
        [one.terms.total_s for one in expected], rel=1e-12
    )
    assert [one.cost_s for one in placed] == pytest.approx(
        [one.terms.total_s for one in found], rel=1e-12
    )
    if expected:
        assert found[0].terms == expected[0].terms


@pytest.mark.parametrize("seed", range(40))
def test_chains_over_unlike_edges_are_priced_as_in_python(seed):
    """As many workers as are priced anew with the rates of their own edges."""
    draw, slots, _, book, index, hashes = drawn(seed)
    slots = slots[: cost.COMPARED]
    for slot in slots:
        del slot.link.status.edges[:]
        slot.link.status.edges.extend(
            EdgeRate(prefill_worker_id=other.worker_id, bytes_per_s=draw.choice((1e6, 1e8, 3e9)))
            for other in slots
            if draw.random() < 0.8
        )
    short = Shortlist(Reports(), Crowding(), seed)
    rates, held = short.update(Slots(slots), 0), index.prefixes(hashes, 0)
    asked = Asked("colocated", draw.randrange(1000, 4000), 64, 1, True, short.sources(held))
    placed = short.cheapest(asked, held, book, 0)
    found = described(placed, asked, rates, {"prefill": 0.0, "decode": 0.0})
    loads = with_tiers(loads_of(slots, hashes, index, book, 0), short, held)
    loads = [msgspec.structs.replace(load, sources=asked.sources) for load in loads]
    expected = candidates(
        loads, mode="colocated", prompt_tokens=asked.prompt_tokens, expected_tokens=64
    )
    assert [one.cost_s for one in placed] == pytest.approx(
        [one.terms.total_s for one in expected], rel=1e-12
    )
    assert [one.links for one in found] == [one.links for one in expected]
    # Nothing of it is left for the next prompt.
    bare = asked._replace(sources=())
    costs = [one.cost_s for one in short.cheapest(bare, held, book, 0)]
    fresh = Shortlist(Reports(), Crowding(), seed)
    fresh.update(Slots(slots), 0)
    assert costs == [one.cost_s for one in fresh.cheapest(bare, held, book, 0)]


def test_a_worker_that_just_failed_is_in_none():
    _, slots, held, book, _, _ = drawn(3)
    short = Shortlist(Reports(), Crowding(), 0)
    short.update(Slots(slots), 0)
    avoid = slots[0].incarnation
    placed = short.cheapest(Asked("auto", 500, 64, 1, True), held, book, 0, avoid=avoid)
    assert placed
    assert all(avoid not in (one.computes.incarnation, one.holds.incarnation) for one in placed)


def test_equal_workers_are_paired_in_turns():
    slots = fleet(40, 40, random.Random(1))
    for slot in slots:
        slot.link.status = slots[0 if slot.role == "prefill" else -1].link.status
    short, book, seen = Shortlist(Reports(), Crowding(), 0), LoadBook(), set()
    short.update(Slots(slots), 0)
    for _ in range(200):
        placed = short.cheapest(Asked("disaggregated", 500, 64, 1, True), {}, book, 0)
        seen |= {one.computes.slot.worker_id for one in placed}
    assert len(seen) == 40


def test_what_a_prompt_found_leaves_nothing_for_the_next():
    _, slots, held, book, _, _ = drawn(7)
    asked = Asked("auto", 900, 64, 1, True)
    fresh, used = (Shortlist(Reports(), Crowding(), 0) for _ in range(2))
    for short in (fresh, used):
        short.update(Slots(slots), 0)
    used.cheapest(asked._replace(prompt_tokens=17), held, book, 0)
    used._random = random.Random(0)
    costs = [
        [one.cost_s for one in short.cheapest(asked, {}, LoadBook(), 0)] for short in (fresh, used)
    ]
    assert costs[0] == costs[1]


def test_bookings_that_change_are_priced_and_those_that_go_leave_nothing():
    _, slots, held, book, index, hashes = drawn(11)
    asked, kept = Asked("auto", 700, 64, 1, True), Shortlist(Reports(), Crowding(), 0)
    kept.update(Slots(slots), 0)
    names, draw = [slot.worker_id for slot in slots], random.Random(3)
    for number in range(40):
        book.book(draw.choice(names), f"r{number}", Booking(tokens=number, streams=2, at_ns=number))
        if number % 3 == 0:
            book.reported(draw.choice(names), 10**9)
        book.release(f"r{draw.randrange(number + 1)}", 10**9 + number)
        fresh = Shortlist(Reports(), Crowding(), 0)
        fresh.update(Slots(slots), 0)
        costs = [
            [one.cost_s for one in short.cheapest(asked, held, book, 0)] for short in (kept, fresh)
        ]
        loads = with_tiers(loads_of(slots, hashes, index, book, 0), fresh, held)
        work = ("mode", "prompt_tokens", "expected_tokens", "choices", "moves_kv")
        expected = candidates(loads, **{name: getattr(asked, name) for name in work})
        assert costs[0] == pytest.approx(costs[1], rel=1e-12)
        assert costs[0] == pytest.approx([one.terms.total_s for one in expected], rel=1e-12)


def test_the_work_for_a_prompt_grows_with_reports_and_not_with_workers(monkeypatch):
    """Counted: rows that are written, and slots that are looked at."""
    written = []
    real = Pricing.write
    monkeypatch.setattr(Pricing, "write", lambda *said: written.append(1) or real(*said))
    slots = Slots(fleet(100, 100, random.Random(1)))
    looked: list[str] = []
    named = {slot.worker_id: slot for slot in slots}

    class Counted(Slots):
        def get(self, worker_id):
            looked.append(worker_id)
            return named[worker_id]

        def __iter__(self):
            looked.extend("all" for _ in range(len(self)))
            return super().__iter__()

    counted, news = Counted(slots), {slot.worker_id for slot in slots}
    short = Shortlist(Reports(), Crowding(), 0)
    short.update(counted, 0, news)
    assert (len(written), news) == (400, set())  # once more with what is usual among them
    written.clear(), looked.clear()
    for _ in range(10):
        short.update(counted, 0, news)
        short.cheapest(Asked("auto", 500, 64, 1, True), {}, LoadBook(), 0)
    assert (written, looked) == ([], [])
    slots[3].link.status = type(slots[3].link.status)(state="ready")
    news.add(slots[3].worker_id)
    short.update(counted, 0, news)
    assert (len(written), looked) == (1, [slots[3].worker_id])


def test_python_and_cpp_share_constants_and_fields():
    source = Path(pricing.__file__).with_name("native").joinpath("pricing.cpp").read_text()
    assert (cost.PAIRED_OF_A_ROLE, MAX_SOURCES, MAX_LINKS) == (6, 4, 3)
    assert "kPaired = 6, kSources = 4, kLinks = 3;" in source
    for struct, name_in_cpp in ((pricing.PricingRow, "Row"), (pricing.Prompt, "Prompt")):
        body = source.split(f"struct Baton{name_in_cpp} {{")[1].split("};")[0]
        fields = re.findall(r"\w+(?=[,;[])", re.sub("//.*", "", body))
        assert [name for name in fields if name != "kSources"] == [
            name for name, _ in struct._fields_
        ]


def test_a_block_costs_what_its_tier_costs():
    """The same prompt in the pool, below it, or nowhere; then a disk slower than the model."""
    slots = fleet(0, 4, random.Random(1))
    hashes = [bytes([i]) * 16 for i in range(60)]
    index, stored = PrefixIndex(), tuple(hashes)
    for slot, tier in zip(slots, ("", "memory", "disk", None), strict=True):
        slot.link.status = type(slot.link.status).FromString(
            slots[0].link.status.SerializeToString()
        )
        del slot.link.status.kv_tiers[:]
        slot.link.status.kv_tiers.add(name="memory", block_s=1e-4)
        slot.link.status.kv_tiers.add(name="disk", block_s=1e-3)
        if tier is not None:
            name = tier_incarnation(slot.incarnation, tier) if tier else slot.incarnation
            index.apply(EventBatch(incarnation=name, sequence=1, stored=stored))
    short = Shortlist(Reports(), Crowding(), 0)
    short.update(Slots(slots), 0)
    held = index.prefixes(hashes, 0)
    asked = Asked("colocated", 1000, 64, 1, True)
    placed = short.cheapest(asked, held, LoadBook(), 0)
    assert [one.holds.slot for one in placed] == slots
    assert placed[1].cost_s - placed[0].cost_s == pytest.approx(0.002 + 60e-4, rel=1e-6)
    for slot in slots:
        later = type(slot.link.status).FromString(slot.link.status.SerializeToString())
        later.kv_tiers[1].block_s = 10.0
        slot.link.status = later
    short.update(Slots(slots), 1)
    placed = short.cheapest(asked, held, LoadBook(), 1)
    costs = {one.holds.slot.worker_id: one.cost_s for one in placed}
    assert costs[slots[2].worker_id] == pytest.approx(costs[slots[3].worker_id])
    sources = short.sources(held)
    assert [source.worker_id for source in sources] == [slot.worker_id for slot in slots[:3]]
    bring_s = [source.overhead_s - PULL_OVERHEAD_S for source in sources]
    assert bring_s == pytest.approx([0, 0.002 + 60e-4, 0.002 + 600])


def test_a_prefix_on_a_disk_is_pulled_where_that_is_cheaper_than_a_shorter_one_in_a_pool():
    """A pool has 40 of 60 blocks. A fast disk pays for the other 20, a slow one does not."""
    for block_s, expected in ((1e-5, 60), (10.0, 40)):
        sources = (Source("disk", 60, PULL_OVERHEAD_S + 60 * block_s), Source("pool", 40))
        chains = cheapest_chains(0, sources, (1e9, 1e9), 1 << 20)
        best = min(chains, key=lambda chain: chain.seconds + (60 - chain.links[-1].blocks) * 0.05)
        assert best.links[-1].blocks == expected
