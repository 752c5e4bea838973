"""The cost of a placement: seconds, and no worker left behind."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from batonpb.common_pb2 import Capabilities, EdgeRate, WorkerStatus
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.registry.types import EventBatch
from baton.types.step_lines import DecodeLine
from router.routing.placement.booked_load import Booking, LoadBook, Unreported
from router.routing.placement.cost import (
    EDGE_OVERHEAD_S,
    PRIOR_ADAPTER_LOAD_S,
    PRIOR_PREFILL_TOKENS_PER_S,
    Candidate,
    Terms,
    WorkerLoad,
    candidates,
    choose,
)
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.prefix_sources import PULL_OVERHEAD_S, Source
from router.routing.placement.worker_load import LoadReader, loads_of

TRACE = Path(__file__).with_name("conversation_sample.jsonl")


def worker(worker_id: str, **more) -> WorkerLoad:
    base = WorkerLoad(
        worker_id=worker_id,
        incarnation=worker_id.encode(),
        role=worker_id.split("-")[0],
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.02,
        block_bytes=368_640,
        total_blocks=1024,
    )
    return replace(base, **more)


def ranked(workers, mode="auto", prompt=1000, expected=100, choices=1, **more):
    return candidates(
        workers, mode=mode, prompt_tokens=prompt, expected_tokens=expected, choices=choices, **more
    )


def test_the_candidates_are_every_pair_and_every_worker_alone():
    workers = [worker(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
    names = {(c.prefill and c.prefill.worker_id, c.decode.worker_id) for c in ranked(workers)}
    assert len(names) == 8
    assert (None, "prefill-0") in names
    assert all(c.prefill is not None for c in ranked(workers, "disaggregated"))
    assert len(ranked(workers, "disaggregated")) == 4
    assert all(c.prefill is None for c in ranked(workers, "colocated"))
    assert ranked(workers[:2], "disaggregated") == []


def test_pairs_of_different_formats_are_not_candidates():
    workers = [worker("prefill-0", format_id="a"), worker("decode-0", format_id="b")]
    assert ranked(workers, "disaggregated") == []


def test_an_idle_fleet_computes_where_it_decodes():
    best = ranked([worker("prefill-0"), worker("decode-0")])[0]
    assert best.mode == "colocated"


def test_a_busy_decode_worker_is_spared_the_prompt():
    workers = [worker("prefill-0", decode_step_s=0.1), worker("decode-0", streams=16)]
    best = ranked(workers)[0]
    assert best.mode == "disaggregated"


def test_what_prefill_says_by_itself_is_not_charged_for_a_transfer():
    workers = [worker("prefill-0"), worker("decode-0")]
    [pair] = ranked(workers, "disaggregated", expected=1)
    [alone] = ranked(workers, "disaggregated", expected=1, moves_kv=False)
    assert alone.terms.transfer_s == EDGE_OVERHEAD_S < pair.terms.transfer_s


def test_a_slow_edge_makes_the_hand_off_not_worth_it():
    fast, slow = 1e10, 1e5
    prefill = worker("prefill-0", decode_step_s=0.1)
    decode = worker("decode-0", streams=8, edges_bytes_per_s={"prefill-0": fast})
    assert ranked([prefill, decode])[0].mode == "disaggregated"
    assert (
        ranked([prefill, replace(decode, edges_bytes_per_s={"prefill-0": slow})])[0].mode
        == "colocated"
    )


def test_a_cached_prefix_is_worth_its_compute_and_no_more():
    warm = worker("decode-0", cached_blocks=60)
    cold = worker("decode-1")
    assert ranked([warm, cold])[0].decode.worker_id == "decode-0"
    # Longest-prefix-first would stay; the queue in front of the warm one costs more.
    assert ranked([replace(warm, queued_tokens=2000), cold])[0].decode.worker_id == "decode-1"


def test_where_the_fleet_is_busy_a_cached_prefix_is_worth_a_longer_wait():
    """Who computes it again delays those who come later too."""
    warm, cold = worker("prefill-0", cached_blocks=60, queued_tokens=2000), worker("prefill-1")
    decode = worker("decode-0")

    def best(crowding: float) -> Candidate:
        workers = [replace(one, crowding=crowding) for one in (warm, cold)]
        return ranked([*workers, decode], "disaggregated")[0]

    assert best(0.0).computes.worker_id == "prefill-1"
    assert best(3.0).computes.worker_id == "prefill-0"
    terms = best(3.0).terms
    assert terms.crowding_s == pytest.approx(3 * terms.compute_s)
    assert best(0.0).terms.crowding_s == 0


def test_a_token_behind_a_long_context_takes_longer():
    fitted = {"prefill_token_s": 1e-3, "prefill_context_s": 1e-6}
    cold = worker("decode-0", **fitted)
    warm = replace(cold, cached_blocks=60)
    terms = ranked([warm], prompt=1000)[0].terms
    assert terms.compute_s == pytest.approx(0.01 + 40e-3 + 40 * 979.5e-6)
    assert ranked([cold], prompt=1000)[0].terms.compute_s == pytest.approx(0.01 + 1 + 0.4995)
    queued = replace(cold, queued_tokens=40, queued_context=39_180)
    assert ranked([queued])[0].terms.queue_s == pytest.approx(40e-3 + 40 * 979.5e-6)


def test_even_a_whole_prefix_leaves_a_token_to_compute():
    best = ranked([worker("decode-0", cached_blocks=1000)], prompt=160)[0]
    assert best.uncached_tokens == 1


def test_blocks_that_decode_holds_do_not_travel():
    prefill = worker("prefill-0")
    edge = {"prefill-0": 1e6}
    cold = ranked([prefill, worker("decode-0", edges_bytes_per_s=edge)], "disaggregated")[0]
    warm = ranked(
        [prefill, worker("decode-0", edges_bytes_per_s=edge, cached_blocks=62)], "disaggregated"
    )[0]  # fmt: skip
    assert warm.terms.transfer_s < cold.terms.transfer_s / 10
    assert warm.terms.compute_s == cold.terms.compute_s


def lacking(**more) -> WorkerLoad:
    return worker("decode-0", sources=(Source("decode-9", 60),), **more)


class TestAPrefixThatAnotherWorkerHolds:
    """1,000 tokens take a second to compute; 60 blocks of them are 22 MB."""

    def alone(self, **more) -> Candidate:
        (chosen,) = ranked([lacking(**more)], "colocated")
        return chosen

    def test_is_pulled_where_that_takes_less_time_than_to_compute_it(self):
        chosen = self.alone(edges_bytes_per_s={"decode-9": 1e9})
        assert chosen.links == (Source("decode-9", 60),) and chosen.uncached_tokens == 40
        assert chosen.terms.pull_s == pytest.approx(PULL_OVERHEAD_S + 60 * 368_640 / 1e9)
        assert chosen.terms.compute_s < 0.1
        assert chosen.explain()["prefix_from"] == [{"worker_id": "decode-9", "blocks": 60}]

    def test_is_computed_if_the_engines_take_long_to_respond(self):
        slow = (Source("decode-9", 60, 1.2),)
        (chosen,) = ranked([worker("decode-0", sources=slow)], "colocated")
        assert chosen.links == ()

    def test_is_computed_over_a_slow_edge(self):
        chosen = self.alone(edges_bytes_per_s={"decode-9": 2e6})
        assert (chosen.links, chosen.uncached_tokens) == ((), 1000)
        assert chosen.terms.pull_s == 0 and chosen.explain()["prefix_from"] == []

    @pytest.mark.parametrize(("own", "pulled"), [(0, 60), (30, 60), (59, 0), (60, 0), (62, 0)])
    def test_only_what_is_lacking_is_worth_asking_for(self, own, pulled):
        chosen = self.alone(cached_blocks=own)
        assert chosen.links == ((Source("decode-9", 60),) if pulled else ())
        assert chosen.uncached_tokens == 1000 - 16 * max(own, pulled)

    def test_lets_an_idle_worker_help_one_that_is_busy_and_holds_it(self):
        busy = worker("decode-9", cached_blocks=60, queued_tokens=3000)
        idle = lacking()
        chosen = ranked([busy, idle], "colocated")[0]
        assert chosen.decode.worker_id == "decode-0" and chosen.links[0].blocks == 60
        assert ranked([replace(busy, queued_tokens=0), idle])[0].decode.worker_id == "decode-9"


def test_a_full_pool_costs():
    roomy, full = worker("decode-0"), worker("decode-1", room_blocks=0)
    assert ranked([full, roomy])[0].decode.worker_id == "decode-0"
    assert ranked([full])[0].terms.room_s > 0


LOADS = st.builds(
    worker,
    st.sampled_from(["prefill-0", "decode-0", "decode-1"]),
    queued_tokens=st.integers(0, 10**6),
    streams=st.integers(0, 500),
    cached_blocks=st.integers(0, 1000),
    room_blocks=st.integers(0, 1024),
    prefill_tokens_per_s=st.floats(1, 1e6),
    decode_step_s=st.floats(1e-4, 10),
)


@given(load=LOADS, prompt=st.integers(1, 10**5), expected=st.integers(1, 10**4))
def test_costs_are_positive_seconds_and_more_load_never_costs_less(load, prompt, expected):
    workers = [load, worker("prefill-9")]
    for candidate in ranked(workers, prompt=prompt, expected=expected):
        parts = [getattr(candidate.terms, name) for name in Terms._fields]
        assert all(part >= 0 for part in parts)
        assert candidate.terms.total_s == pytest.approx(sum(parts))
    busier = replace(load, queued_tokens=load.queued_tokens + 100, streams=load.streams + 1)
    before = ranked([load], "colocated", prompt, expected)[0].terms.total_s
    assert ranked([busier], "colocated", prompt, expected)[0].terms.total_s > before


def test_near_ties_are_drawn_and_clear_winners_are_not():
    equal = ranked([worker(f"decode-{i}") for i in range(4)])
    generator = random.Random(1)
    drawn = {choose(equal, tie_s=0.002, pick=generator.choice).decode.worker_id for _ in range(99)}
    assert len(drawn) == 4
    clear = ranked([worker("decode-0"), worker("decode-1", queued_tokens=500)])
    drawn = {choose(clear, tie_s=0.002, pick=generator.choice).decode.worker_id for _ in range(99)}
    assert drawn == {"decode-0"}


class TestLoadBook:
    """Load that the workers' reports do not show yet."""

    def test_a_booking_counts_until_a_younger_report(self):
        book = LoadBook()
        book.book("w", "r", Booking(tokens=100, streams=2, at_ns=0))
        assert book.unreported("w") == Unreported(tokens=100, streams=2)
        book.reported("w", as_of_ns=10_000_000)  # too soon: it may not have arrived there
        assert book.unreported("w") == Unreported(tokens=100, streams=2)
        book.reported("w", as_of_ns=300_000_000)
        assert book.unreported("w") == Unreported()

    def test_the_first_token_takes_the_prompt_off_and_the_end_the_rest(self):
        book = LoadBook()
        book.book("w", "r", Booking(tokens=100, streams=2, at_ns=0))
        book.computed("r", now_ns=1)
        assert book.unreported("w") == Unreported(streams=2)
        book.release("r")
        assert book.unreported("w") == Unreported()

    def test_an_end_is_taken_off_until_a_report_shows_it(self):
        book = LoadBook()
        book.book("w", "r", Booking(tokens=100, streams=2, at_ns=0))
        book.reported("w", as_of_ns=300_000_000)  # it shows the two streams
        book.release("r", now_ns=400_000_000)
        assert book.unreported("w") == Unreported(streams=-2)
        book.reported("w", as_of_ns=390_000_000)  # how things stood before the end
        assert book.unreported("w") == Unreported(streams=-2)
        book.reported("w", as_of_ns=410_000_000)
        assert book.unreported("w") == Unreported()

    def test_a_computed_prompt_that_was_reported_whole_is_taken_off_until_a_report_shows_it(self):
        book = LoadBook()
        book.book("w", "r", Booking(tokens=100, context=4950, streams=1, at_ns=0, whole=True))
        book.reported("w", as_of_ns=300_000_000)  # it shows the prompt
        book.computed("r", now_ns=400_000_000)
        assert book.unreported("w") == Unreported(tokens=-100, context=-4950)
        book.reported("w", as_of_ns=390_000_000)
        assert book.unreported("w") == Unreported(tokens=-100, context=-4950)
        book.reported("w", as_of_ns=410_000_000)
        assert book.unreported("w") == Unreported()
        book.release("r")
        book.book("w", "r", Booking(tokens=100, streams=1, at_ns=0))
        book.reported("w", as_of_ns=500_000_000)  # it shows what is left of the prompt
        book.computed("r", now_ns=600_000_000)
        assert book.unreported("w") == Unreported()

    def test_an_end_that_no_report_has_shown_is_taken_off_once(self):
        book = LoadBook()
        book.book("w", "r", Booking(tokens=100, streams=2, at_ns=0))
        book.release("r", now_ns=10_000_000)
        assert book.unreported("w") == Unreported()
        assert not list(book.booked())

    def test_the_tokens_of_a_stream_are_booked_as_long_as_the_stream(self):
        book = LoadBook()
        book.book("w", "r", Booking(tokens=100, streams=2, stream_tokens=600, at_ns=0))
        book.computed("r", now_ns=1)
        assert book.unreported("w") == Unreported(streams=2, stream_tokens=600)
        book.reported("w", as_of_ns=300_000_000)
        assert book.unreported("w") == Unreported()
        book.release("r", now_ns=400_000_000)
        assert book.unreported("w") == Unreported(streams=-2, stream_tokens=-600)
        book.reported("w", as_of_ns=410_000_000)
        assert book.unreported("w") == Unreported()

    def test_it_says_once_of_which_workers_it_has_changed(self):
        book = LoadBook()
        book.book("w", "r", Booking(tokens=100, streams=2, at_ns=0))
        assert (book.changed(), book.changed()) == ({"w"}, set())
        book.release("r")
        assert book.changed() == {"w"}

    def test_a_worker_that_is_gone_takes_its_bookings_along(self):
        book = LoadBook()
        for name in ("p", "d"):
            book.book(name, "r", Booking(tokens=100, context=4950, streams=1, at_ns=0))
        book.forget("p")
        assert book.unreported("p") == Unreported()
        assert book.unreported("d") == Unreported(100, 4950, 1)
        book.take_back("p", "r")
        book.computed("r", now_ns=1)
        assert book.unreported("d") == Unreported(streams=1)
        book.release("r")
        assert book.unreported("d") == Unreported()

    def test_a_burst_spreads_before_any_report_comes(self):
        book, generator = LoadBook(), random.Random(7)
        counts = dict.fromkeys(("decode-0", "decode-1", "decode-2", "decode-3"), 0)
        for number in range(40):
            loads = []
            for name in counts:
                booked = book.unreported(name)
                loads.append(worker(name, queued_tokens=booked.tokens, streams=booked.streams))
            best = choose(ranked(loads), tie_s=0.002, pick=generator.choice)
            counts[best.decode.worker_id] += 1
            book.book(best.decode.worker_id, str(number), Booking(tokens=1000, streams=1, at_ns=0))
        assert max(counts.values()) <= 11


def test_conversations_keep_eight_nodes_within_one_and_a_half_of_the_mean():
    """Reuse is near the bound of one endless cache, and does not pile work up on one node.

    Replays a sample of Mooncake's conversation trace (its LICENSE lies beside it).
    """
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    nodes, rate, reused = 8, 8000.0, 0
    prefix_index, generator = PrefixIndex(), random.Random(3)
    names = [f"decode-{i}" for i in range(nodes)]
    sequences, work, busy_until_s = [0] * nodes, [0.0] * nodes, [0.0] * nodes
    seen: set[bytes] = set()
    bound = 0
    for row in rows:
        now_s = row["timestamp"] / 1000
        # A block of the trace has 512 tokens; the model's blocks have 16.
        blocks = [
            f"{i}/{part:02}".encode().rjust(16) for i in row["hash_ids"] for part in range(32)
        ]
        blocks = blocks[: row["input_length"] // 16]
        loads = [
            worker(
                name,
                queued_tokens=int(max(busy_until_s[i] - now_s, 0) * rate),
                cached_blocks=prefix_index.prefixes(blocks).get(name.encode(), 0),
                prefill_tokens_per_s=rate,
            )
            for i, name in enumerate(names)
        ]
        best = choose(
            ranked(loads, prompt=row["input_length"], expected=row["output_length"]),
            tie_s=0.002,
            pick=generator.choice,
        )
        node = names.index(best.decode.worker_id)
        sequences[node] += 1
        prefix_index.apply(
            EventBatch(
                incarnation=names[node].encode(), sequence=sequences[node], stored=tuple(blocks)
            )
        )
        work[node] += best.uncached_tokens
        busy_until_s[node] = max(busy_until_s[node], now_s) + best.uncached_tokens / rate
        known = [block in seen for block in blocks]
        bound += 16 * (known.index(False) if False in known else len(known))
        seen.update(blocks)
        reused += row["input_length"] - best.uncached_tokens
    assert max(work) / (sum(work) / nodes) < 1.5
    assert reused > 0.8 * bound


def test_a_worker_that_holds_the_adapter_is_preferred_until_it_is_busy():
    lacking = {"adapter_s": PRIOR_ADAPTER_LOAD_S}
    others = [worker("prefill-0", **lacking), worker("decode-0", **lacking)]
    best = ranked([*others, worker("decode-1")])[0]
    assert (best.prefill, best.decode.worker_id) == (None, "decode-1")
    assert (
        ranked([*others, worker("decode-1", queued_tokens=200)])[0].decode.worker_id != "decode-1"
    )
    pair, alone = ranked(others, "disaggregated")[0], ranked(others[1:], "colocated")[0]
    assert pair.terms.adapter_s == pytest.approx(2 * alone.terms.adapter_s)
    assert alone.terms.first_token_s >= alone.terms.adapter_s == PRIOR_ADAPTER_LOAD_S


def test_an_adapter_is_at_hand_where_it_was_reported_or_is_on_its_way():
    held, other, book = "aa" * 16, "bb" * 16, LoadBook()
    status = WorkerStatus(adapters=[bytes.fromhex(held)])
    link = SimpleNamespace(status=status, capabilities=Capabilities(), incarnation=b"d")
    slot = SimpleNamespace(worker_id="decode-0", role="decode", link=link)
    costs = [LoadReader(book).of(slot, 0, adapter).adapter_s for adapter in ("", held, other)]
    assert costs == [0.0, 0.0, PRIOR_ADAPTER_LOAD_S]
    book.book("decode-0", "r", Booking(tokens=1, streams=1, at_ns=0, adapter=other))
    assert LoadReader(book).of(slot, 0, other).adapter_s == 0.0, "a burst does not spread over all"
    book.release("r")
    assert LoadReader(book).of(slot, 0, other).adapter_s > 0


def test_a_measured_edge_is_taken_as_it_is_reported():
    status = WorkerStatus(edges=[EdgeRate(prefill_worker_id="prefill-0", bytes_per_s=1e9)])
    link = SimpleNamespace(status=status, capabilities=Capabilities(), incarnation=b"d")
    slot = SimpleNamespace(worker_id="decode-0", role="decode", link=link)
    assert LoadReader(LoadBook()).of(slot, 0).edges_bytes_per_s == {"prefill-0": 1e9}


def test_who_has_not_measured_is_expected_to_be_like_its_peers():
    """A prior that is faster than this machine would draw requests away from what is cached."""

    def slot(name: str, **measured: float) -> SimpleNamespace:
        status = WorkerStatus(**measured)
        link = SimpleNamespace(status=status, capabilities=Capabilities(), incarnation=b"i")
        return SimpleNamespace(
            worker_id=name, role="prefill", link=link, incarnation=link.incarnation
        )

    slots = [
        slot("prefill-0", prefill_tokens_per_s=100.0, decode_step_s=0.2),
        slot("prefill-1", prefill_tokens_per_s=300.0),
        slot("prefill-2"),
    ]
    loads = loads_of(slots, [], PrefixIndex(), LoadBook(), 0)
    assert [load.prefill_tokens_per_s for load in loads] == [100.0, 300.0, 200.0]
    assert [load.decode_step_s for load in loads] == [0.2, 0.2, 0.2]
    slots[2].link.status = WorkerStatus()
    (alone,) = loads_of(slots[2:], [], PrefixIndex(), LoadBook(), 0)
    assert alone.prefill_tokens_per_s == PRIOR_PREFILL_TOKENS_PER_S


@pytest.mark.parametrize("prompt_tokens", [100, 100_000])
def test_responses_go_where_steps_are_shorter_whatever_their_prompt(prompt_tokens):
    """By what a prompt adds to others, long ones would go where few streams run, and stay there."""
    line = DecodeLine(0.015, 5e-5, 7e-8)
    few = worker("decode-0", streams=10, decode_line=line, answering_context=300_000)
    many = worker("decode-1", streams=30, decode_line=line, answering_context=200_000)
    prefill = worker("prefill-0")
    best = candidates(
        [prefill, few, many],
        mode="disaggregated",
        prompt_tokens=prompt_tokens,
        expected_tokens=300,
    )[0]
    assert best.decode.worker_id == "decode-1"
    busy_s = 30 * 5e-5 + 200_000 * 7e-8
    assert best.terms.decode_s == pytest.approx(
        300 * (0.015 + 5e-5 + busy_s + prompt_tokens * 7e-8)
    )
    assert best.terms.slowdown_s == pytest.approx(300 * busy_s)


def test_contexts_of_streams_are_reported_and_what_was_booked_since():
    status = WorkerStatus(
        running=5,
        answering=3,
        decode_base_s=0.01,
        decode_row_s=1e-4,
        decode_context_s=1e-7,
        answering_context=30_000,
        coming_context=20_000,
    )
    link = SimpleNamespace(status=status, capabilities=Capabilities(), incarnation=b"i")
    slot = SimpleNamespace(worker_id="d", role="decode", link=link, incarnation=b"i")
    book = LoadBook()

    def contexts() -> tuple[int, int]:
        (load,) = loads_of([slot], [], PrefixIndex(), book, 0)
        assert load.decode_line == DecodeLine(0.01, 1e-4, 1e-7)
        return load.answering_context, load.coming_context

    assert contexts() == (30_000, 20_000)
    book.book("d", "new", Booking(tokens=0, streams=1, stream_tokens=7000, at_ns=0))
    assert contexts() == (30_000, 27_000)
    book.reported("d", as_of_ns=300_000_000)
    book.release("new", now_ns=400_000_000)
    assert contexts() == (23_000, 20_000)


def test_a_difference_that_is_noise_does_not_break_ties():
    """Else every prompt that is cached nowhere goes to the worker with the luckiest fit."""

    def slot(name: str, **measured: float) -> SimpleNamespace:
        status = WorkerStatus(**measured)
        link = SimpleNamespace(status=status, capabilities=Capabilities(), incarnation=b"i")
        role = name.split("-")[0]
        return SimpleNamespace(worker_id=name, role=role, link=link, incarnation=link.incarnation)

    def fitted(name: str, token_s: float) -> SimpleNamespace:
        line = {"prefill_token_s": token_s, "prefill_context_s": token_s * 1e-5}
        return slot(name, prefill_tokens_per_s=0.9 / token_s, **line)

    slots = [fitted(f"prefill-{i}", token_s) for i, token_s in enumerate((1.01e-4, 1e-4, 0.99e-4))]
    slots += [fitted("prefill-3", 2e-4), slot("prefill-4"), fitted("decode-0", 3e-4)]
    loads = loads_of(slots, [], PrefixIndex(), LoadBook(), 0)
    assert [load.prefill_token_s for load in loads] == [1.01e-4] * 3 + [2e-4, 1.01e-4, 3e-4]
    assert loads[0].prefill_context_s == loads[4].prefill_context_s == pytest.approx(1.01e-9)
