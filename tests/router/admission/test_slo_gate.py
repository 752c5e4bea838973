"""The gate: requests on time, late ones, and refused ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.types.slo import Slo
from baton.types.step_lines import DecodeLine
from router.routing.admission.promises import HOLD_S
from router.routing.admission.slo_gate import (
    HEADROOM,
    LANE_WAIT,
    LANE_WORK,
    GateRequest,
    Prediction,
    SloDecision,
    SloGate,
)
from router.routing.placement.cost import WorkerLoad, price

SLO = Slo(ttft_s=10.0, itl_s=0.05)
SECOND = 10**9
LIMIT_S = HEADROOM * SLO.ttft_s


def prediction(wait_s: float = 0.0, compute_s: float = 1.0, streams: float = 0.0, step_s=0.02):
    return Prediction(wait_s=wait_s, compute_s=compute_s, streams=streams, step_s=step_s)


def judge(gate: SloGate, name: str, asked: Prediction, now_s: float = 0.0, **fields) -> SloDecision:
    workers = fields.pop("workers", 2)
    request = GateRequest(name, SLO, **{"waited_s": 0.0, "caller": name, **fields})
    return gate.judge(request, asked, workers=workers, now_ns=round(now_s * SECOND))


def test_a_request_on_time_is_placed_however_long_its_prompt():
    for compute_s in (0.01, 1.0, 100.0):
        gate = SloGate(64, 256)
        assert judge(gate, "a", prediction(LIMIT_S - 0.1, compute_s)) is SloDecision.PLACE
        assert judge(gate, "b", prediction(LIMIT_S + 0.1, compute_s)) is SloDecision.WAIT


def test_the_time_that_it_has_waited_counts():
    gate = SloGate(64, 256)
    assert judge(gate, "a", prediction(4.0), waited_s=LIMIT_S - 3.9) is SloDecision.WAIT


def test_slow_steps_and_full_batches_make_it_wait():
    gate = SloGate(64, 256)
    assert judge(gate, "slow", prediction(step_s=0.051, streams=2)) is SloDecision.WAIT
    assert judge(gate, "slow", prediction(step_s=0.051, streams=2)) is SloDecision.WAIT, (
        "still slow"
    )
    assert judge(gate, "slow", prediction(step_s=0.049, streams=2)) is SloDecision.PLACE
    full = prediction(streams=40.0)._replace(begun=64)
    assert judge(gate, "full", full) is SloDecision.WAIT, "though most have ended when it begins"
    assert judge(gate, "fits", full._replace(begun=63)) is SloDecision.PLACE


def test_a_tenant_with_more_than_its_share_is_late_first():
    gate = SloGate(64, 256)
    half = prediction(LIMIT_S * 0.75)
    assert judge(gate, "heavy", half, over_share=True) is SloDecision.WAIT
    assert judge(gate, "light", half) is SloDecision.PLACE


def test_a_late_request_is_placed_when_it_is_on_time_after_all_or_a_worker_is_idle():
    gate = SloGate(64, 256)
    assert judge(gate, "a", prediction(20.0)) is SloDecision.WAIT
    assert judge(gate, "a", prediction(5.0), waited_s=5.0) is SloDecision.WAIT
    assert judge(gate, "a", prediction(1.0), waited_s=5.0) is SloDecision.PLACE
    assert judge(gate, "b", prediction(20.0)) is SloDecision.WAIT
    assert judge(gate, "b", prediction(0.0), waited_s=50.0) is SloDecision.PLACE
    assert not gate.late


def test_a_late_request_runs_beside_others_when_no_new_one_was_late_for_a_while():
    gate = SloGate(64, 256)
    idle = prediction(0.0, streams=2)
    assert judge(gate, "a", prediction(20.0)) is SloDecision.WAIT
    assert judge(gate, "b", prediction(20.0), now_s=24.0) is SloDecision.WAIT
    assert judge(gate, "a", idle, now_s=24.9, waited_s=24.9) is SloDecision.WAIT, (
        "b was late just now"
    )
    assert judge(gate, "a", idle, now_s=25.0, waited_s=25.0) is SloDecision.PLACE


def test_steps_are_predicted_so_that_all_but_one_of_20_keep_the_limit():
    gate = SloGate(64, 256)
    for number in range(1000):
        gate.learn_step(0.04, 0.04 * (1.2 if number % 25 == 0 else 1.0), 64)
    assert judge(gate, "a", prediction(step_s=0.049, streams=2)) is SloDecision.PLACE
    for number in range(1000):
        gate.learn_step(0.04, 0.04 * (1.2 if number % 13 == 0 else 1.0), 64)
    assert judge(gate, "b", prediction(step_s=0.049, streams=2)) is SloDecision.WAIT


def test_a_full_lane_refuses_with_a_later_time_for_each():
    gate = SloGate(64, 256)
    names = [f"r{number}" for number in range(1000)]
    waiting = 0
    for name in names:
        if judge(gate, name, prediction(20.0, compute_s=1.0)) is SloDecision.REFUSE:
            break
        waiting += 1
    assert waiting == LANE_WORK * SLO.ttft_s * 2
    asked = prediction(20.0, compute_s=4.0)
    times = [gate.retry_after_s(asked, 2, 0, number) for number in range(5)]
    assert times == sorted(times)
    assert times[-1] - times[0] >= 4 * 4.0 / 2, "what the workers compute between two of them"
    assert times[0] >= waiting / 2, "the lane goes first"


def test_the_lane_is_bounded_however_little_work_its_requests_are():
    gate = SloGate(64, 5)
    verdicts = [judge(gate, f"r{n}", prediction(20.0, compute_s=1e-6)) for n in range(7)]
    assert verdicts == [SloDecision.WAIT] * 5 + [SloDecision.REFUSE] * 2


def test_nobody_waits_in_the_lane_for_ever():
    gate = SloGate(64, 256)
    judge(gate, "a", prediction(20.0))
    assert gate.expired(round((LANE_WAIT * SLO.ttft_s - 0.1) * SECOND)) == []
    assert gate.expired(round(LANE_WAIT * SLO.ttft_s * SECOND)) == ["a"]


def test_the_newest_is_asked_first():
    gate = SloGate(64, 256)
    for name in "abcdef":
        judge(gate, name, prediction(20.0, compute_s=0.1))
    assert gate.next() == ["f", "e", "d", "c"]


def test_it_learns_how_far_predictions_are_from_the_truth():
    gate = SloGate(64, 256)
    for _ in range(64):
        gate.learn_wait(1.0, 4.0, 1000)
        gate.learn_step(0.02, 0.04, tokens=100)
    assert judge(gate, "a", prediction(LIMIT_S - 3.1)) is SloDecision.PLACE
    assert judge(gate, "b", prediction(LIMIT_S - 2.9)) is SloDecision.WAIT
    assert judge(gate, "c", prediction(step_s=0.0249)) is SloDecision.PLACE
    assert judge(gate, "d", prediction(step_s=0.0251, streams=2)) is SloDecision.WAIT


def test_predictions_that_scatter_leave_more_room():
    gate = SloGate(64, 256)
    for number in range(64):
        gate.learn_step(0.02, 0.03 if number % 8 == 0 else 0.02, tokens=100)
    assert judge(gate, "a", prediction(step_s=0.034, streams=2)) is SloDecision.WAIT
    assert judge(gate, "b", prediction(step_s=0.033, streams=2)) is SloDecision.PLACE


def test_short_responses_teach_nothing_about_steps():
    gate = SloGate(64, 256)
    for _ in range(64):
        gate.learn_step(0.02, 0.2, tokens=3)
    assert judge(gate, "a", prediction(step_s=0.04)) is SloDecision.PLACE


def load(name: str, role: str, **fields) -> WorkerLoad:
    return WorkerLoad(worker_id=name, incarnation=name.encode(), role=role, **fields)


@given(answering=st.integers(0, 60), coming=st.integers(0, 60), queued=st.integers(0, 200_000))
def test_streams_are_those_that_will_run_when_the_prompt_is_done(answering, coming, queued):
    prefill = load("p", "prefill", queued_tokens=queued)
    decode = load("d", "decode", streams=answering + coming, answering=answering)
    chosen = price(prefill=prefill, decode=decode, prompt_tokens=1000, expected_tokens=100)
    gate = SloGate(64, 256)
    found = gate.predict(chosen, 1000, answer_tokens=100)
    assert 0 <= found.streams <= answering + coming == found.begun
    assert abs(found.wait_s - prefill.queue_s) < 1e-9
    now = gate.predict(
        price(
            prefill=load("p", "prefill", prefill_token_s=1e-9),
            decode=decode,
            prompt_tokens=10,
            expected_tokens=100,
        ),
        10,
        answer_tokens=1e6,
    )
    assert abs(now.streams - answering - coming) < 0.01, "nothing ends in no time"


LINE = DecodeLine(step_s=0.015, row_s=5e-5, context_s=7e-8)


def placed(decode: WorkerLoad, prompt_tokens: int = 1000, queued_tokens: int = 0):
    prefill = load("p", "prefill", prefill_token_s=1e-4, queued_tokens=queued_tokens)
    return price(prefill=prefill, decode=decode, prompt_tokens=prompt_tokens, expected_tokens=100)


def test_a_step_is_predicted_by_the_contexts_of_all_its_rows():
    figures = {"streams": 30, "answering": 20, "decode_step_s": 0.03, "decode_line": LINE}
    decode = load("d", "decode", **figures, answering_context=200_000, coming_context=150_000)
    found = SloGate(64, 256).predict(placed(decode), 40_000, answer_tokens=1e6)
    true_s = 0.015 + 31 * 5e-5 + (200_000 + 150_000 + 40_000) * 7e-8
    assert found.step_s == pytest.approx(true_s, rel=0.01)
    alone = load("d", "decode", decode_step_s=0.03, decode_line=LINE)
    found = SloGate(64, 256).predict(placed(alone), 1000, answer_tokens=100)
    assert found.step_s == pytest.approx(0.015 + 5e-5 + 1000 * 7e-8), "whatever its last steps took"


def test_contexts_end_and_begin_with_their_responses():
    figures = {"streams": 30, "answering": 20, "decode_step_s": 0.03, "decode_line": LINE}
    decode = load("d", "decode", **figures, answering_context=600_000, coming_context=0)
    chosen = placed(decode, queued_tokens=30_000)
    found = SloGate(64, 256).predict(chosen, 1000, answer_tokens=100)
    left = math.exp(-chosen.terms.first_token_s / (100 * 0.03))
    true_s = LINE.seconds(found.streams + 1, 600_000 * left + 1000)
    assert found.step_s == pytest.approx(true_s)


def test_a_worker_that_reports_no_line_is_predicted_by_its_median_step():
    decode = load("d", "decode", streams=10, answering=10, decode_step_s=0.03)
    found = SloGate(64, 256).predict(placed(decode), 40_000, answer_tokens=1e6)
    assert found.step_s == pytest.approx(0.03 * 1.023, rel=0.001)


def test_a_prompt_that_takes_longer_than_others_finds_as_many_responses():
    gate = SloGate(64, 256)
    figures = {"streams": 30, "answering": 20, "decode_step_s": 0.03, "decode_line": LINE}
    decode = load("d", "decode", **figures, answering_context=200_000, coming_context=100_000)
    usual = placed(decode, 20_000)
    long = placed(decode, 200_000)
    assert gate.predict(long, 1000, 350).streams < gate.predict(usual, 1000, 350).streams
    for _ in range(64):
        gate.learn_wait(usual.terms.first_token_s, usual.terms.first_token_s, 1000)
    assert gate.predict(long, 1000, 350).streams == gate.predict(usual, 1000, 350).streams
    assert gate.predict(long, 1000, 350).step_s == gate.predict(usual, 1000, 350).step_s


def test_a_long_prompt_is_not_refused_for_its_own_context():
    gate = SloGate(64, 256)
    figures = {"streams": 20, "answering": 20, "decode_step_s": 0.03, "decode_line": LINE}
    decode = load("d", "decode", **figures, answering_context=200_000)
    found = gate.predict(placed(decode), 100_000, 1e6).step_s
    assert found == pytest.approx(LINE.seconds(21, 300_000), rel=0.01), "nothing is usual yet"
    for _ in range(64):
        gate.learn_wait(1.0, 1.0, 5000)
    for prompt_tokens, counted in ((2000, 2000), (5000, 5000), (100_000, 5000)):
        found = gate.predict(placed(decode), prompt_tokens, 1e6).step_s
        assert found == pytest.approx(LINE.seconds(21, 200_000 + counted), rel=0.01)


def refused(gate: SloGate, name: str, now_s: float = 0.0, compute_s: float = 4.0) -> float:
    """Have a client refused; return the time at which it is told to come again."""
    asked = prediction(20.0, compute_s=compute_s)
    assert judge(gate, name, asked, now_s) is SloDecision.REFUSE
    return now_s + gate.retry_after_s(asked, 2, round(now_s * SECOND), name)


def busy_gate() -> SloGate:
    """Return a gate with a full lane."""
    gate = SloGate(64, 256)
    for number in range(10):
        assert judge(gate, f"lane{number}", prediction(20.0, compute_s=2.0)) is SloDecision.WAIT
    return gate


def test_clients_that_come_again_in_time_are_let_in_before_new_ones():
    gate = busy_gate()
    told_s = [refused(gate, f"r{number}") for number in range(8)]
    assert told_s == sorted(told_s)
    nearly_full = prediction(LIMIT_S - 0.1)
    assert judge(gate, "before", nearly_full, 1.0) is SloDecision.PLACE, "no client is expected yet"
    for number, at_s in enumerate(told_s[:4]):
        new = judge(gate, f"new{number}", nearly_full, at_s, workers=0)
        assert new is SloDecision.REFUSE
        assert judge(gate, f"again{number}", nearly_full, at_s, caller=f"r{number}") is (
            SloDecision.PLACE
        )


def test_a_client_that_comes_in_its_time_waits_at_the_front_of_a_full_lane():
    gate = busy_gate()
    at_s = refused(gate, "a")
    assert judge(gate, "again", prediction(20.0), at_s, caller="a") is SloDecision.WAIT
    assert judge(gate, "twice", prediction(20.0), at_s, caller="a") is SloDecision.REFUSE
    for number in range(4):
        gate.leave(f"lane{number}")
    for number in range(5):
        newer = prediction(20.0, compute_s=1.0)
        assert judge(gate, f"newer{number}", newer, at_s) is SloDecision.WAIT
    assert gate.next() == ["again", "newer4", "newer3", "newer2", "newer1"]
    gate.leave("again")
    assert "again" not in gate.next()


def test_no_new_request_passes_a_client_that_came_again_and_can_be_on_time():
    gate = busy_gate()
    at_s = refused(gate, "a")
    assert judge(gate, "again", prediction(20.0), at_s, caller="a") is SloDecision.WAIT
    assert judge(gate, "new", prediction(1.0), at_s + 1) is SloDecision.REFUSE
    late = judge(gate, "again", prediction(1.0), at_s + 9, caller="a", waited_s=9.0)
    assert late is SloDecision.WAIT
    assert judge(gate, "newer", prediction(1.0), at_s + 9) is SloDecision.PLACE, "it is late anyway"


def test_calls_before_the_time_gain_nothing():
    gate = busy_gate()
    at_s = refused(gate, "a")
    later_s = refused(gate, "b")
    for second in range(1, round(at_s)):
        assert refused(gate, "a", second) == at_s
    assert refused(gate, "b", 1.0) == later_s, "the calls of a moved it"
    half_full = prediction(LIMIT_S * 0.5)
    assert judge(gate, "new", half_full, 1.0) is SloDecision.PLACE
    assert judge(gate, "early", half_full, 1.0, caller="a") is SloDecision.REFUSE
    gate.leave("lane0")  # there is room in the lane now
    assert refused(gate, "a", 1.0) == at_s
    room = prediction(LIMIT_S * 0.3)
    assert judge(gate, "other", room, 1.0, caller="a") is SloDecision.PLACE, "the load has gone"
    assert refused(gate, "b", 1.0) == later_s


def test_the_n_th_client_is_told_a_time_at_which_the_work_before_it_is_placed():
    """By the rate at which this router places work: two routers have half of it each."""
    told_s = []
    for rate in (1.0, 2.0):
        gate = SloGate(64, 256)
        for number in range(300):
            asked = prediction(0.0, compute_s=rate)
            assert judge(gate, f"r{number}", asked, number, workers=4) is SloDecision.PLACE
        asked = prediction(0.0, compute_s=1.0)
        times = [
            gate.retry_after_s(asked, 4, 300 * SECOND, f"late{number}") for number in range(101)
        ]
        told_s.append(times[-1] - times[0])
    assert told_s[0] == pytest.approx(100 / 0.8, rel=0.05)
    assert told_s[1] == pytest.approx(50 / 0.8, rel=0.05)


def test_room_for_clients_that_do_not_come_is_given_to_new_ones():
    gate = busy_gate()
    at_s = refused(gate, "a")
    nearly_full = prediction(LIMIT_S - 0.1)
    assert judge(gate, "new", nearly_full, at_s) is SloDecision.REFUSE
    assert judge(gate, "half", prediction(LIMIT_S * 0.4), at_s) is SloDecision.PLACE
    assert judge(gate, "later", nearly_full, at_s + HOLD_S) is SloDecision.PLACE
    assert not len(gate.promises)


def test_when_all_have_come_the_times_begin_anew():
    gate = busy_gate()
    first_s = refused(gate, "r0")
    for number in range(1, 20):
        last_s = refused(gate, f"r{number}")
    assert last_s > first_s + 20
    for number in range(20):
        early = judge(gate, f"again{number}", prediction(0.0), 1.0, caller=f"r{number}")
        assert early is SloDecision.PLACE, "the load has gone"
    assert gate.promises.pressure(round(1.0 * SECOND)) == 0
    assert refused(gate, "r20", 1.0) <= first_s + 2


def test_a_tenant_over_its_share_has_no_place_kept():
    gate = busy_gate()
    at_s = refused(gate, "a")
    half = prediction(LIMIT_S * 0.4)
    assert judge(gate, "again", half, at_s, caller="a", over_share=True) is SloDecision.REFUSE
    assert judge(gate, "again", half, at_s, caller="a") is SloDecision.PLACE


def test_the_book_is_bounded():
    gate = busy_gate()
    asked = prediction(0.0, compute_s=1e-6)
    for number in range(10_000):
        assert 1 <= gate.retry_after_s(asked, 2, 0, number) <= 600
    assert len(gate.promises) < 5000
    assert gate.retry_after_s(prediction(0.0, compute_s=1e6), 2, 0, "long") == 600
    assert judge(gate, "new", prediction(), 700.0) is SloDecision.PLACE
    assert not len(gate.promises)


class Lane(RuleBasedStateMachine):
    """Requests come, are judged again, leave and expire in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = SloGate(8, 256)
        self.now_ns = 0
        self.number = 0
        self.waiting: dict[str, tuple[Prediction, int]] = {}

    @rule(wait_s=st.floats(0, 40), compute_s=st.floats(0.001, 50), streams=st.floats(0, 10))
    def come(self, wait_s: float, compute_s: float, streams: float) -> None:
        self.number += 1
        name = f"r{self.number}"
        asked = prediction(wait_s, compute_s, streams)
        request = GateRequest(name, SLO, 0.0, name)
        verdict = self.gate.judge(request, asked, workers=3, now_ns=self.now_ns)
        if verdict is SloDecision.WAIT:
            self.waiting[name] = (asked, self.now_ns)
        if verdict is SloDecision.REFUSE:
            assert self.waiting, "an empty lane takes anybody"
            assert 1 <= self.gate.retry_after_s(asked, 3, self.now_ns, name) <= 600

    @rule(wait_s=st.floats(0, 40))
    def ask_again(self, wait_s: float) -> None:
        for name in self.gate.next():
            asked, since_ns = self.waiting[name]
            request = GateRequest(name, SLO, (self.now_ns - since_ns) / SECOND, name)
            asked = asked._replace(wait_s=wait_s)
            verdict = self.gate.judge(request, asked, workers=3, now_ns=self.now_ns)
            assert verdict is not SloDecision.REFUSE, "who waits is refused by time alone"
            if verdict is SloDecision.PLACE:
                del self.waiting[name]

    @rule(seconds=st.integers(1, 30))
    def pass_time(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND
        for name in self.gate.expired(self.now_ns):
            assert 1 <= self.gate.expire(name, 3, self.now_ns) <= 600
            del self.waiting[name]

    @rule()
    def disconnect(self) -> None:
        if self.waiting:
            name = next(iter(self.waiting))
            self.gate.leave(name)
            del self.waiting[name]
        self.gate.leave("nobody")

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.gate.late == len(self.waiting)
        work_s = sum(asked.compute_s for asked, _ in self.waiting.values())
        assert len(self.waiting) <= 1 or work_s <= LANE_WORK * SLO.ttft_s * 3 + 1e-6


TestLane = Lane.TestCase
