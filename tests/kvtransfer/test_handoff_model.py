"""Reservation and transfer under every interleaving that hypothesis can think of.

Real scheduler, real pools, real digests on both sides; only the network is played by the test.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.core.draft_tokens import oracle
from tests.kvtransfer.duo import Duo, ReceiverState, golden
from tests.soak import examples

GOLDEN = {length: golden(list(range(length))) for length in (1, 15, 16, 17, 40, 64, 90)}


def test_the_undisturbed_path():
    duo = Duo()
    for length in (1, 16, 40, 64, 90):
        handover = duo.submit(list(range(length)))
        duo.settle()
        assert handover.tokens == GOLDEN[length]
        assert handover.ends == [""]
    assert duo.decode.core.pool.counts().in_use == 0
    assert duo.prefill.core.pool.counts().in_use == 0


def test_only_blocks_that_decode_lacks_travel():
    duo = Duo()
    first = duo.submit(list(range(64)))
    duo.settle()
    second = duo.submit(list(range(90)))
    duo.settle()
    assert first.intake.payload_bytes == 64 * 3 * 2 * 2 * 4 * 2
    assert second.intake.payload_bytes == (90 - 64) * 3 * 2 * 2 * 4 * 2
    assert second.tokens == GOLDEN[90]


def test_a_fully_cached_prompt_moves_nothing():
    duo = Duo()
    duo.submit(list(range(64)))
    duo.settle()
    again = duo.submit(list(range(64)))
    duo.settle()
    assert again.intake.payload_bytes == 0
    assert again.tokens == GOLDEN[64]


def test_opposite_tickets_do_not_deadlock_in_tiny_pools():
    duo = Duo(prefill_blocks=7, decode_blocks=7)
    for length in (90, 64, 90, 40, 90):
        duo.submit(list(range(length)))
    duo.settle()
    assert duo.stuck() == []


def test_damage_is_repaired_by_pulling_again():
    duo = Duo()
    handover = duo.submit(list(range(90)))
    for _ in range(60):
        duo.step_prefill()
        duo.step_decode()
        duo.hear_engine()
        duo.hear(handover)
        duo.fetch(handover, damage="flip" if handover.intake.repairs < 3 else "")
        duo.store(handover)
    assert handover.intake.repairs == 3
    assert handover.tokens == GOLDEN[90]


def test_pages_that_are_read_after_their_loan_ran_out_are_refused():
    """A reader that stood still: by the time it reads, the pages hold another prompt's KV."""
    duo = Duo(prefill_blocks=6)
    late = duo.submit(list(range(90)))
    while not late.asked:
        duo.step_prefill()
        duo.step_decode()
        duo.hear_engine()
        duo.hear(late)
    duo.fetch(late, lend=True)
    duo.lapse()
    duo.overdue()
    other = duo.submit([7] * 90)
    for _ in range(20):
        duo.step_prefill()
        duo.step_decode()
        duo.hear_engine()
        duo.hear(other)
    duo.store(late)
    assert late.intake.repairs == 1
    duo.settle()
    assert late.tokens == GOLDEN[90]
    assert other.tokens == golden([7] * 90)


def test_the_decode_side_may_speculate():
    known = {(tuple(range(length)), 0): answer for length, answer in GOLDEN.items()}
    speculation = oracle(known, 1.0)
    duo = Duo(speculation=speculation)
    handover = duo.submit(list(range(90)))
    duo.settle()
    assert handover.tokens == GOLDEN[90]
    assert speculation.accepted_tokens == 3, "5 tokens: the first from prefill, then 3 + 1"


def test_a_lost_ask_does_not_hang_the_request():
    """Defect 4: nobody else asks again."""
    duo = Duo()
    handover = duo.submit(list(range(90)))
    duo.step_decode()
    duo.hear_engine()
    duo.kill_prefill()
    while not handover.needs_peer:
        duo.hear(handover)
    duo.lose_ask(handover)
    duo.settle()
    assert handover.ends == [""]
    assert handover.tokens == GOLDEN[90]


def test_a_death_after_pulls_that_broke_is_still_told_as_a_death():
    """Defect 1: the pull that breaks once too often may be the one that the peer died of."""
    duo = Duo()
    handover = duo.submit(list(range(90)))
    for _ in range(3):
        while not handover.asked:
            duo.step_prefill()
            duo.step_decode()
            duo.hear_engine()
            duo.hear(handover)
        while handover.asked:
            duo.fetch(handover, "lost")
        duo.heartbeat(handover)
    duo.kill_prefill()
    while handover.asked:
        duo.fetch(handover)  # asserts that nobody is blamed before the control stream knows
    duo.settle()
    assert handover.tokens == GOLDEN[90]


def test_frames_that_arrive_while_the_stream_is_opened_anew_are_kept():
    """They were dropped and never asked for again: a healthy peer was replaced after 10 s."""
    duo = Duo()
    handover = duo.submit(list(range(90)))
    while not handover.asked:
        duo.step_prefill()
        duo.step_decode()
        duo.hear_engine()
        duo.hear(handover)
    duo.lose_stream(handover)
    assert handover.intake.state is ReceiverState.OPENING
    while handover.asked:
        duo.fetch(handover)
    duo.check()
    duo.settle()
    assert duo.stuck() == []
    assert handover.tokens == GOLDEN[90]


class Handovers(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        known = {(tuple(range(length)), 0): answer for length, answer in GOLDEN.items()}
        # every other draft token is wrong: speculation adds its own kinds of trouble
        self.duo = Duo(prefill_blocks=9, decode_blocks=9, speculation=oracle(known, 0.5))

    def pick(self, index):
        names = list(self.duo.requests)
        return self.duo.requests[names[index % len(names)]]

    @rule(length=st.sampled_from(list(GOLDEN)))
    @precondition(lambda self: len(self.duo.requests) < 6)
    def submit(self, length):
        self.duo.submit(list(range(length)))

    @rule()
    def step_prefill(self):
        self.duo.step_prefill()

    @rule()
    def step_decode(self):
        self.duo.step_decode()

    @rule()
    def hear_engine(self):
        self.duo.hear_engine()

    @rule(index=st.integers(0, 5), count=st.integers(1, 4))
    @precondition(lambda self: self.duo.requests)
    def hear(self, index, count):
        for _ in range(count):
            self.duo.hear(self.pick(index))

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.duo.requests)
    def heartbeat(self, index):
        self.duo.heartbeat(self.pick(index))

    @rule(
        index=st.integers(0, 5),
        damage=st.sampled_from(["", "", "", "flip", "twice", "lost"]),
        lend=st.booleans(),
    )
    @precondition(lambda self: self.duo.requests)
    def fetch(self, index, damage, lend):
        self.duo.fetch(self.pick(index), damage, lend)

    @rule(index=st.integers(0, 5), count=st.integers(1, 3))
    @precondition(lambda self: self.duo.requests)
    def store(self, index, count):
        for _ in range(count):
            self.duo.store(self.pick(index))

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.duo.requests)
    def lose_stream(self, index):
        self.duo.lose_stream(self.pick(index))

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.duo.requests)
    def cancel(self, index):
        self.duo.cancel(self.pick(index))

    @rule(index=st.integers(0, 5), locally=st.booleans())
    @precondition(lambda self: self.duo.requests)
    def replace(self, index, locally):
        handover = self.pick(index)
        (self.duo.compute_locally if locally else self.duo.replace)(handover)

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.duo.requests)
    def lose_ask(self, index):
        self.duo.lose_ask(self.pick(index))

    @rule()
    def kill_prefill(self):
        self.duo.kill_prefill()

    @rule()
    def lapse(self):
        self.duo.lapse()

    @rule()
    def overdue(self):
        self.duo.overdue()

    @invariant()
    def nothing_leaks(self):
        self.duo.check()

    def teardown(self):
        self.duo.settle()
        assert self.duo.stuck() == []
        for handover in self.duo.requests.values():
            want = GOLDEN[len(handover.prompt)]
            if not handover.cancelled:
                assert handover.ends == [""]
                assert handover.tokens == want
            assert handover.tokens == want[: len(handover.tokens)], "never a wrong token"
            assert handover.intake.state in (ReceiverState.DONE, ReceiverState.COMMITTED)
        for engine in (self.duo.prefill, self.duo.decode):
            counts = engine.core.pool.counts()
            assert (counts.in_use, counts.quarantined) == (0, 0)


TestHandovers = Handovers.TestCase
TestHandovers.settings = settings(max_examples=examples(200), stateful_step_count=60, deadline=None)
