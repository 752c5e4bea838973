"""Credit for receiving: it is conserved, it keeps to the pace, and nobody waits for ever."""

import asyncio
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.types.events import StepDone
from decode_worker.credit import SAVED_UP_NS, ReceiveCredit, _Lowest
from decode_worker.pacing import ReceivePacer
from tests.soak import examples

MIB = 1 << 20
LIMIT_BYTES = 16 * MIB
SHARE = 0.05
BYTES_PER_CPU_NS = 0.4  # what is assumed of a peer that nothing was measured of
OWNERS = ("a", "b", "c", "d")
SIZES = st.lists(st.integers(1, 20 * MIB), min_size=1, max_size=8)  # some are above the limit


def bytes_per_s(credit: ReceiveCredit, peer: str) -> float:
    """Return the receive rate of a peer's KV while responses are generated."""
    return credit._cpu_share / credit._cost(peer).value * 1e9


def granted(credit: ReceiveCredit, now_ns: int = 0) -> dict[int, int]:
    return {grant.demand: grant.frames for grant in credit.grants(now_ns, 0)}


def test_while_nothing_is_decoded_only_bytes_in_flight_are_limited() -> None:
    credit = ReceiveCredit(SHARE, LIMIT_BYTES)
    large = credit.ask("a", "peer", [4 * MIB] * 6)
    assert granted(credit) == {large: 4}
    rest = credit.ask("a", "peer", [4 * MIB] * 2)
    assert granted(credit) == {}
    assert credit.due_ns(0) is None, "it waits for bytes, not for time"
    credit.give_back(large, 16 * MIB, 1, 1)
    assert granted(credit) == {rest: 2}


def test_a_small_hand_off_does_not_wait_behind_large_ones_and_equals_go_by_age() -> None:
    credit = ReceiveCredit(0, LIMIT_BYTES)
    first = credit.ask("a", "peer", [4 * MIB] * 8)
    assert granted(credit) == {first: 4}
    again, other = (credit.ask(owner, "peer", [4 * MIB] * 8) for owner in ("a", "b"))
    small = credit.ask("c", "peer", [MIB])
    credit.give_back(first, 16 * MIB, 1, 1)
    assert granted(credit) == {small: 1, again: 2, other: 1}


def test_two_pulls_of_one_hand_off_share_what_one_would_have() -> None:
    credit = ReceiveCredit(0, LIMIT_BYTES)
    first = credit.ask("a", "peer", [4 * MIB] * 4)
    granted(credit)
    a1, a2, b = (credit.ask(owner, "peer", [4 * MIB] * 4) for owner in ("a", "a", "b"))
    credit.give_back(first, 16 * MIB, 1, 1)
    assert granted(credit) == {a1: 2, b: 2}
    assert a2 not in granted(credit)


def test_what_streams_lose_is_a_part_of_one_core() -> None:
    """A frame of 4 MiB takes 10.5 ms of a core, so 5 % of a core are a frame in 210 ms."""
    credit = ReceiveCredit(SHARE, 1 << 40)
    credit.decoding(on=True, now_ns=0)
    credit.ask("a", "peer", [4 * MIB] * 100)
    (burst,) = granted(credit).values()
    assert burst * 4 * MIB == pytest.approx(SHARE * SAVED_UP_NS * BYTES_PER_CPU_NS, rel=0.1), (
        "of two seconds"
    )
    now_ns, frames = 0, 0
    while now_ns < 10e9:
        credit.ask("a", "peer", [4 * MIB])
        now_ns = credit.due_ns(now_ns)
        frames += sum(granted(credit, now_ns).values())
    assert frames * 4 * MIB / 10 == pytest.approx(bytes_per_s(credit, "peer"), rel=0.1)
    credit.ask("b", "peer", [4 * MIB] * 50)
    credit.decoding(on=False, now_ns=now_ns)
    assert sum(granted(credit, now_ns).values()) >= 50, "nobody loses anything now"


def test_nobody_is_held_back_for_longer_than_his_patience() -> None:
    credit = ReceiveCredit(SHARE, 1 << 40)
    credit.decoding(on=True, now_ns=0)
    credit.ask("a", "peer", [4 * MIB] * 100)
    granted(credit)  # what was saved up is gone
    held = credit.ask("b", "peer", [4 * MIB] * 4, urgent_ns=50)
    patient = credit.ask("c", "peer", [1])
    assert granted(credit, 49) == {}
    assert credit.due_ns(49) == 50
    assert granted(credit, 50) == {held: 4}, "all of it, and not the patient one"
    assert credit.due_ns(50) > 50
    assert patient in granted(credit, credit.due_ns(50))


def test_a_debt_is_forgotten_after_a_while() -> None:
    """Who had to receive more than the pace for an hour is not held back for an hour."""
    credit = ReceiveCredit(SHARE, LIMIT_BYTES)
    credit.decoding(on=True, now_ns=0)
    for cpu_ns in range(0, 10**10, 10**7):
        demand = credit.ask("a", "peer", [4 * MIB], urgent_ns=0)
        assert [grant.demand for grant in credit.grants(0, cpu_ns)] == [demand]
        credit.give_back(demand, 4 * MIB, 0, cpu_ns + 10**7)
    waits = credit.ask("b", "peer", [1])
    assert granted(credit) == {}
    assert credit.due_ns(0) == pytest.approx(SAVED_UP_NS, rel=0.01)
    assert granted(credit, credit.due_ns(0)) == {waits: 1}


def receive(credit: ReceiveCredit, at_ns: int, cpu_ns: int, *peers: str) -> None:
    """4 MiB from each of these at once, in 10 ms and so much CPU time."""
    demands = [credit.ask(peer, peer, [4 * MIB]) for peer in peers]
    assert len(credit.grants(at_ns, at_ns // 5)) == len(peers)
    for demand in demands:
        credit.give_back(demand, 4 * MIB, at_ns + 10**7, at_ns // 5 + cpu_ns)


def test_what_a_byte_costs_is_measured_peer_by_peer_less_what_all_else_takes() -> None:
    """The process takes a fifth of a core whatever comes: 2 ms of the 10 that a frame takes."""
    credit = ReceiveCredit(SHARE, LIMIT_BYTES)
    assumed = bytes_per_s(credit, "far")
    at_ns = 0
    for _ in range(20):
        at_ns += 10**9
        receive(credit, at_ns, 6_000_000, "near")
    assert bytes_per_s(credit, "near") == pytest.approx(SHARE * 4 * MIB / 4e-3, rel=0.02)
    receive(credit, at_ns + 10**9, 9_000_000, "near", "far")
    assert bytes_per_s(credit, "far") == assumed, "two at once tell of neither"


def test_what_took_more_than_was_expected_is_made_up_for() -> None:
    credit = ReceiveCredit(0.02, LIMIT_BYTES)
    credit.decoding(on=True, now_ns=0)
    size_bytes, expected_ns = 16 * MIB, 16 * MIB / BYTES_PER_CPU_NS
    demand = credit.ask("a", "peer", [size_bytes])
    credit.grants(0, 0)
    credit.give_back(demand, size_bytes, 1, round(1.5 * expected_ns))
    credit.ask("a", "peer", [1])
    debt_ns = 1.5 * expected_ns - 0.02 * SAVED_UP_NS
    assert credit.grants(1, 0) == []
    assert credit.due_ns(1) == pytest.approx(debt_ns / 0.02, rel=0.01)


def test_what_a_dead_hand_off_had_is_free_at_once() -> None:
    credit = ReceiveCredit(0, LIMIT_BYTES)
    dead = credit.ask("a", "peer", [4 * MIB] * 4)
    assert granted(credit) == {dead: 4}
    waits, other = credit.ask("a", "peer", [MIB]), credit.ask("b", "peer", [4 * MIB] * 4)
    assert granted(credit) == {}
    assert credit.drop("a", 0, 0) == [waits]
    assert granted(credit) == {other: 4}
    credit.give_back(dead, MIB, 1, 1)  # its last frame was on its way
    assert credit.in_flight_bytes == 16 * MIB


class CreditModel(RuleBasedStateMachine):
    """Any events in any order, beside what a reader would count by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.credit = ReceiveCredit(SHARE, LIMIT_BYTES)
        self.now_ns = self.cpu_ns = 0
        self.is_decoding = False
        self.asked: dict[int, tuple[str, list[int]]] = {}
        self.flying: dict[int, tuple[str, list[int]]] = {}
        self.overtaken: dict[int, dict[str, int]] = {}  # bytes to others since a demand was made
        self.bound_bytes: dict[int, int] = {}  # of them: what is before it, and a frame
        self.paced_ns = self.paced_bytes = self.missed_bytes = 0  # since decoding began

    def take_grants(self) -> int:
        total = 0
        for grant in self.credit.grants(self.now_ns, self.cpu_ns):
            owner, sizes = self.asked.pop(grant.demand)
            assert 1 <= grant.frames <= len(sizes)
            self.overtaken.pop(grant.demand)
            sizes = sizes[: grant.frames]
            self.flying[grant.demand] = (owner, sizes)
            for others in self.overtaken.values():
                others[owner] = others.get(owner, 0) + sum(sizes)
            total += sum(sizes)
        if self.is_decoding:
            self.paced_bytes += total
        return total

    @rule(owner=st.sampled_from(OWNERS), sizes=SIZES)
    def ask(self, owner: str, sizes: list[int]) -> None:
        own = sum(sum(others) for who, others in self.asked.values() if who == owner)
        demand = self.credit.ask(owner, owner, sizes)
        self.asked[demand] = (owner, sizes)
        self.overtaken[demand] = {}
        self.bound_bytes[demand] = own + sizes[0] + 20 * MIB
        self.take_grants()

    @rule(data=st.data(), part=st.sampled_from([0.0, 0.5, 1.0]))
    def end_one(self, data: st.DataObject, part: float) -> None:
        if self.flying:
            demand = data.draw(st.sampled_from(sorted(self.flying)))
            _, sizes = self.flying.pop(demand)
            came_bytes = int(part * sum(sizes))
            self.missed_bytes += sum(sizes) - came_bytes
            self.cpu_ns += round(came_bytes / BYTES_PER_CPU_NS)
            self.credit.give_back(demand, came_bytes, self.now_ns, self.cpu_ns)
            self.take_grants()

    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner: str) -> None:
        lost = [sum(sizes) for who, sizes in self.flying.values() if who == owner]
        self.missed_bytes += sum(lost)
        waited = self.credit.drop(owner, self.now_ns, self.cpu_ns)
        assert set(waited) == {c for c, (who, _) in self.asked.items() if who == owner}
        for demands in (self.asked, self.flying):
            for demand in [c for c, (who, _) in demands.items() if who == owner]:
                del demands[demand]
                self.overtaken.pop(demand, None)
        self.take_grants()

    @rule(passed_ns=st.integers(1, 3_000_000_000))
    def wait(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        self.paced_ns += passed_ns
        self.take_grants()

    @rule(on=st.booleans())
    def decode(self, on: bool) -> None:
        if on and not self.is_decoding:
            self.paced_ns = self.paced_bytes = self.missed_bytes = 0
        self.is_decoding = on
        self.credit.decoding(on=on, now_ns=self.now_ns)
        self.take_grants()

    @invariant()
    def credit_is_conserved(self) -> None:
        held = [sum(sizes) for _, sizes in self.flying.values()]
        assert self.credit.in_flight_bytes == sum(held)
        alone = sum(len(sizes) for _, sizes in self.flying.values()) == 1
        assert alone or sum(held) <= LIMIT_BYTES

    @invariant()
    def the_pace_is_kept(self) -> None:
        """Never more than was saved up, what came since, and one frame; what missed was free."""
        if self.is_decoding:
            paid_bytes = SHARE * (SAVED_UP_NS + self.paced_ns) * BYTES_PER_CPU_NS
            assert self.paced_bytes <= paid_bytes + 20 * MIB + self.missed_bytes

    @invariant()
    def nobody_is_overtaken_for_long(self) -> None:
        for demand, others in self.overtaken.items():
            others.pop(self.asked[demand][0], None)
            assert all(got_bytes <= self.bound_bytes[demand] for got_bytes in others.values())

    def teardown(self) -> None:
        """When all that flies ends and time goes on, all that waits is served."""
        for _ in range(10_000):
            for demand in list(self.flying):
                _, sizes = self.flying.pop(demand)
                self.cpu_ns += round(sum(sizes) / BYTES_PER_CPU_NS)
                self.credit.give_back(demand, sum(sizes), self.now_ns, self.cpu_ns)
            if not self.asked:
                break
            self.now_ns = self.credit.due_ns(self.now_ns) or self.now_ns
            assert self.take_grants(), "nothing flies, it is time, and nobody is served"
        assert not self.asked
        for demand in list(self.flying):
            self.credit.give_back(demand, 0, self.now_ns, self.cpu_ns)
        assert self.flying or self.credit.in_flight_bytes == 0


CreditModel.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, derandomize=True
)
test_any_schedule = CreditModel.TestCase


async def test_a_pull_waits_for_what_another_gives_back_and_a_dead_one_for_nothing() -> None:
    pacer = ReceivePacer(0.0)
    held = await pacer.take("a", "peer", [40 * MIB])
    first, second, dead = (
        asyncio.ensure_future(pacer.take(owner, "peer", [40 * MIB])) for owner in ("b", "c", "d")
    )
    await asyncio.sleep(0)
    assert pacer.waits("b") and not first.done()
    pacer.drop("d")
    assert (await dead).frames == 0
    first.cancel()  # its demand goes with it
    await asyncio.sleep(0)
    assert not pacer.waits("b")
    pacer.give_back(held, 40 * MIB)
    assert (await second).frames == 1
    assert not pacer.waits("c")


async def test_streams_that_run_hold_a_pull_back_until_they_end() -> None:
    pacer = ReceivePacer(0.001)
    pacer.after_step(StepDone(answering=1))
    assert (await pacer.take("a", "peer", [8 * MIB])).frames == 1
    waits = asyncio.ensure_future(pacer.take("b", "peer", [MIB]))
    await asyncio.sleep(0.01)
    assert pacer.waits("b"), "8 MiB are expected to take 21 ms of a core, 4 ms are saved up"
    pacer.after_step(StepDone(answering=0))
    assert (await waits).frames == 1


class Counted(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def calls_for(hand_offs: int) -> int:
    """Python calls while so many wait, are asked after each tick, and then end."""
    credit = ReceiveCredit(SHARE, LIMIT_BYTES)
    credit.decoding(on=True, now_ns=0)
    names = [Counted(f"request-{number}/1") for number in range(hand_offs)]
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        demands = []
        for urgent_ns, name in enumerate(names, 1):
            demands.append(credit.ask(name, "peer", [4 * MIB] * 16, urgent_ns=urgent_ns))
            credit.grants(0, 0)
            credit.due_ns(0)
        for name in names:
            credit.waits(name)
        for demand in demands[: hand_offs // 2]:
            credit.give_back(demand, 0, 0, 0)
            credit.grants(0, 0)
            credit.due_ns(0)
        for now_ns, name in enumerate(names):
            credit.drop(name, now_ns, 0)
            credit.grants(now_ns, 0)
    finally:
        sys.setprofile(None)
    return calls


def test_what_an_event_costs_does_not_grow_with_the_hand_offs_that_wait() -> None:
    assert calls_for(1600) < 6 * calls_for(400), "four times as many, a little more each"


async def test_a_pacer_with_many_that_wait_finds_one_of_them_without_looking_at_all() -> None:
    pacer = ReceivePacer(0.0)
    await pacer.take("first", "peer", [LIMIT_BYTES * 8])
    names = [Counted(f"request-{number}/1") for number in range(500)]
    takes = [asyncio.ensure_future(pacer.take(name, "peer", [MIB])) for name in names]
    await asyncio.sleep(0)
    Counted.compared = 0
    assert all(pacer.waits(Counted(name)) for name in names)
    assert Counted.compared < 10 * len(names)
    for name in names:
        pacer.drop(name)
    assert {room.frames for room in await asyncio.gather(*takes)} == {0}


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "take", "first"]), st.integers(0, 9), st.integers(0, 9))
    )
)
def test_the_lowest_of_a_queue_is_what_a_search_finds(events: list[tuple[str, int, int]]) -> None:
    queue = _Lowest()
    ranks: dict[int, int] = {}
    for what, number, rank in events:
        if what == "put":
            queue.put(number, rank)
            ranks[number] = rank
        elif what == "take":
            queue.discard(number)
            ranks.pop(number, None)
        assert queue.first() == min(((r, n) for n, r in ranks.items()), default=None)


def test_a_queue_does_not_keep_what_left_it() -> None:
    queue = _Lowest()
    queue.put(0, 0)
    for number in range(1, 1000):
        queue.put(number, number)
        queue.discard(number)
        assert queue.first() == (0, 0)
    assert len(queue._heap) < 50
