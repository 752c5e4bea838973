"""The few workers that are priced: the best are among them, and most are not looked at twice."""

import random
from statistics import fmean

import msgspec

from baton.registry.types import EventBatch
from baton.types.params import SamplingParams
from benchmarks.placement import fleet
from router.request import GenerationRequest
from router.routing.placement import cost
from router.routing.placement.block_table import HASH_BYTES
from router.routing.placement.booked_load import Booking, LoadBook
from router.routing.placement.congestion import Crowding
from router.routing.placement.cost import candidates
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.shortlist import PromptToPlace, Shortlist
from router.routing.placement.worker_load import ParsedReport, Reports, loads_of

KEEP = cost.PAIRED_OF_A_ROLE


def request(**more) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt=tuple(range(1024)),
        sampling=SamplingParams(max_tokens=64),
        arrived_ns=0,
        deadline_ns=10**18,
        **more,
    )


def shortlist(seed: int = 0) -> Shortlist:
    return Shortlist(Reports(), Crowding(), seed)


def best_of(short: Shortlist, slots, held=None, book=None, asked=None, avoid=b""):
    short.update(slots, 0)
    prompt = PromptToPlace(asked or request(), bytes(64 * HASH_BYTES), held or {}, (), avoid)
    return short.best(prompt, book or LoadBook(), 0, keep=KEEP)


def test_the_best_placement_is_hardly_ever_missed(monkeypatch):
    """Against the price of every pair, over many fleets with caches, queues and bookings."""
    regrets = []
    for seed in range(40):
        draw = random.Random(seed)
        slots, index, book = fleet(24, 24, draw), PrefixIndex(), LoadBook()
        hashes = [draw.randbytes(16) for _ in range(64)]
        for slot in draw.sample(slots, 12):
            stored = tuple(hashes[: draw.randrange(1, 65)])
            index.apply(EventBatch(incarnation=slot.incarnation, sequence=1, stored=stored))
            book.book(
                slot.worker_id, f"{seed}", Booking(tokens=draw.randrange(500), streams=1, at_ns=0)
            )
        kept = {
            slot.worker_id
            for slot, _ in best_of(shortlist(seed), slots, index.prefixes(hashes, 0), book)
        }
        loads = loads_of(slots, hashes, index, book, 0)
        work = {"mode": "auto", "prompt_tokens": 1024, "expected_tokens": 64}
        few = candidates([load for load in loads if load.worker_id in kept], **work)
        with monkeypatch.context() as patch:
            patch.setattr(cost, "PAIRED_OF_A_ROLE", 1000)
            every = candidates(loads, **work)
        regrets.append(few[0].terms.total_s / every[0].terms.total_s - 1)
    assert fmean(regrets) < 0.01
    assert max(regrets) < 0.05


def test_only_what_workers_have_said_anew_is_read(monkeypatch):
    read = []
    real = ParsedReport.__init__
    monkeypatch.setattr(ParsedReport, "__init__", lambda *said: read.append(1) or real(*said))
    draw = random.Random(1)
    slots, short = fleet(50, 50, draw), shortlist()
    best_of(short, slots)
    assert len(read) == 100
    best_of(short, slots)
    assert len(read) == 100
    others = fleet(50, 50, draw)
    for place in (3, 70):
        slots[place].link.status = others[place].link.status
    best_of(short, slots)
    assert len(read) == 102


def test_of_a_thousand_workers_a_dozen_and_a_half_are_priced():
    assert len(best_of(shortlist(), fleet(500, 500, random.Random(2)))) <= 3 * KEEP


def test_whoever_has_the_prompt_is_among_them():
    slots = fleet(100, 100, random.Random(3))
    held = {slots[42].incarnation: 64, slots[142].incarnation: 60}
    found = {slot.worker_id: blocks for slot, blocks in best_of(shortlist(), slots, held)}
    assert found[slots[42].worker_id] == 64
    assert found[slots[142].worker_id] == 60


def test_workers_come_and_go():
    slots, short = fleet(3, 3, random.Random(4)), shortlist()
    assert len(best_of(short, slots)) == 6
    slots[0].link.live = False
    assert {slot.worker_id for slot, _ in best_of(short, slots)} == {s.worker_id for s in slots[1:]}
    slots[0].link.live = True
    slots[5].link.incarnation = b"another life".rjust(16)
    slots[5].link.status = type(slots[5].link.status)(state="ready")
    held = {b"another life".rjust(16): 9}
    found = {slot.worker_id: blocks for slot, blocks in best_of(short, slots, held)}
    assert (len(found), found["decode-2"]) == (6, 9)
    assert len(best_of(short, slots[:4])) == 4
    assert short.usable == slots[:4]


def test_a_worker_that_changes_its_role_is_listed_under_the_new_one():
    slots = fleet(2, 3, random.Random(0))
    short = shortlist()
    best_of(short, slots)
    before = {role: len(members) for role, members in short._workers.members.items()}
    slot = slots[-1]
    slot.record = msgspec.structs.replace(slot.record, role="prefill")
    best_of(short, slots)
    after = {role: len(members) for role, members in short._workers.members.items()}
    assert (before, after) == ({"decode": 3, "prefill": 2}, {"decode": 2, "prefill": 3})


def test_who_failed_is_left_out():
    slots, short = fleet(2, 2, random.Random(5)), shortlist()
    found = best_of(short, slots, avoid=slots[0].incarnation)
    assert {slot.worker_id for slot, _ in found} == {slot.worker_id for slot in slots[1:]}


def test_among_equals_the_choice_is_not_always_the_same():
    slots = fleet(40, 40, random.Random(6))
    for slot in slots:
        slot.link.status = slots[0].link.status
    short = shortlist()
    first = {best_of(short, slots)[0][0].worker_id for _ in range(40)}
    assert len(first) > 15


def test_a_burst_sees_what_was_just_booked():
    slots, book, short = fleet(4, 4, random.Random(7)), LoadBook(), shortlist()
    for number, slot in enumerate(slots[:4]):
        slot.link.status = slots[0].link.status
        book.book(
            slot.worker_id, f"r{number}", Booking(tokens=1000 * (4 - number), streams=0, at_ns=0)
        )
    prefills = [s.worker_id for s, _ in best_of(short, slots, book=book) if s.role == "prefill"]
    assert prefills[0] == "prefill-3"
    book.computed("r0", now_ns=1)
    prefills = [s.worker_id for s, _ in best_of(short, slots, book=book) if s.role == "prefill"]
    assert prefills[0] == "prefill-0"
