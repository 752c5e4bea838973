"""Regret: 0 for the best choice, the difference for a worse one, and measured noise is none."""

from dataclasses import replace

import pytest
from batonpb.common_pb2 import WorkerStatus
from msgspec.structs import replace as with_load

from baton.types.step_lines import DecodeLine
from router.routing.placement.cost import WorkerLoad, candidates
from router.routing.placement.regret import Allowance, MeasuredRequest, regret

FORMAT = {"format_id": "f", "block_bytes": 1000}
QUICK = WorkerLoad(worker_id="prefill-0", incarnation=b"0", role="prefill", **FORMAT)
OTHER = WorkerLoad(worker_id="prefill-1", incarnation=b"1", role="prefill", **FORMAT)
DECODE = WorkerLoad(worker_id="decode-0", incarnation=b"2", role="decode", **FORMAT)
PROMPT = 1500


def compared(*workers: WorkerLoad, mode: str = "disaggregated"):
    return candidates(workers, mode=mode, prompt_tokens=PROMPT, expected_tokens=128)


def on(placements, computes: str):
    return next(one for one in placements if one.computes.worker_id == computes)


def as_predicted(candidate, **changes) -> MeasuredRequest:
    terms = candidate.terms
    measured = MeasuredRequest(
        queue_s=terms.queue_s,
        compute_s=terms.compute_s,
        exposed_s=terms.transfer_s,
        decode_s=terms.decode_s,
        answer_tokens=128,
    )
    return replace(measured, **changes)


def rates(prefill_tokens_per_s: float, decode_step_s: float) -> WorkerStatus:
    return WorkerStatus(prefill_tokens_per_s=prefill_tokens_per_s, decode_step_s=decode_step_s)


def line_of(step_s: float) -> WorkerStatus:
    return WorkerStatus(decode_base_s=step_s, decode_row_s=1e-4, decode_context_s=1e-7)


def told(chosen, placements, measured, fitted=None):
    return regret(chosen, placements, measured, (fitted or {}).get, prompt_tokens=PROMPT, choices=1)


def test_the_best_choice_has_none() -> None:
    placements = compared(QUICK, DECODE)
    [chosen] = placements
    assert told(chosen, placements, as_predicted(chosen)).seconds == 0
    assert told(chosen, placements, as_predicted(chosen, compute_s=9.0)).seconds == 0


def test_a_worker_that_turned_out_slow_is_regretted_by_what_the_other_would_have_taken() -> None:
    placements = compared(QUICK, OTHER, DECODE)
    chosen = on(placements, "prefill-0")
    fitted = {"prefill-0": rates(300, 0.03), "prefill-1": rates(1500, 0.03)}
    found = told(chosen, placements, as_predicted(chosen, compute_s=5.01), fitted)
    assert found.best.computes.worker_id == "prefill-1"
    assert found.seconds == pytest.approx(4.0, abs=0.05)
    assert found.chosen_s - found.best_s == found.seconds


def test_a_decode_worker_that_turned_out_slow_is_regretted_by_its_line() -> None:
    line = DecodeLine(0.02, 1e-4, 1e-7)
    loads = [
        with_load(DECODE, worker_id=f"decode-{number}", decode_line=line) for number in range(2)
    ]
    placements = compared(QUICK, *loads)
    chosen = next(c for c in placements if c.decode.worker_id == "decode-0")
    slow = {"decode-0": line_of(0.05)}
    expected_s = chosen.terms.decode_s
    late = as_predicted(chosen, decode_s=expected_s + 128 * 0.03, answer_tokens=128)
    assert told(chosen, placements, late, slow).seconds == pytest.approx(128 * 0.03)
    other = {"decode-1": line_of(0.01)}
    same = as_predicted(chosen, answer_tokens=128)
    assert told(chosen, placements, same, other).seconds == pytest.approx(128 * 0.01)


def test_what_all_candidates_share_is_nobodys_fault() -> None:
    """The answer was longer and each step slower than expected: the same for both pairs."""
    placements = compared(QUICK, OTHER, DECODE)
    chosen = on(placements, "prefill-0")
    slow = as_predicted(chosen, decode_s=60.0, answer_tokens=512)
    assert told(chosen, placements, slow).seconds == pytest.approx(0, abs=1e-9)


def test_a_queue_that_was_longer_than_reported_is_regretted() -> None:
    placements = compared(QUICK, OTHER, DECODE)
    chosen = on(placements, "prefill-0")
    found = told(chosen, placements, as_predicted(chosen, queue_s=2.0))
    assert found.seconds == pytest.approx(2.0)


def test_a_worker_that_was_believed_slow_and_is_not_any_more() -> None:
    slow = with_load(OTHER, prefill_tokens_per_s=100.0, queued_tokens=0)
    busy = with_load(QUICK, queued_tokens=1500)
    placements = compared(busy, slow, DECODE)
    chosen = placements[0]
    assert chosen.computes.worker_id == "prefill-0"
    found = told(chosen, placements, as_predicted(chosen), {"prefill-1": rates(1500, 0)})
    assert found.seconds == pytest.approx(1.0, abs=0.02)


def test_a_pair_and_its_decode_worker_alone_share_what_decoding_took() -> None:
    placements = compared(QUICK, DECODE, mode="auto")
    placements = [c for c in placements if c.decode.worker_id == "decode-0"]
    pair = next(c for c in placements if c.mode == "disaggregated")
    found = told(pair, placements, as_predicted(pair, decode_s=30.0, exposed_s=3.0))
    assert found.best.mode == "colocated"
    assert found.seconds == pytest.approx(3.0, abs=0.1)


def test_who_waited_for_the_sake_of_later_requests_is_not_regretted() -> None:
    """The cached prefix is behind a queue; to compute it once more would delay others by more."""
    crowded = {"crowding": 4.0, "prefill_tokens_per_s": 1500.0}
    warm = with_load(QUICK, cached_blocks=60, queued_tokens=3000, **crowded)
    placements = compared(warm, with_load(OTHER, **crowded), DECODE)
    chosen = placements[0]
    assert chosen.computes.worker_id == "prefill-0"
    assert told(chosen, placements, as_predicted(chosen)).seconds == 0
    found = told(chosen, placements, as_predicted(chosen, compute_s=chosen.terms.compute_s + 1))
    assert found.chosen_s == pytest.approx(chosen.terms.total_s + 5), "and those who come later"


def test_of_many_requests_some_are_priced_again_and_of_few_all():
    """At a hundred requests a second it took two thirds of what their ends cost the router."""
    allowance, second_ns = Allowance(), 1_000_000_000
    assert all(allowance.take(10 * second_ns + number * second_ns) for number in range(200))
    begin_ns = 300 * second_ns
    taken = [allowance.take(begin_ns + number * second_ns // 100) for number in range(3000)]
    assert all(taken[:64]), "a burst is seen whole"
    assert 15 * 20 <= sum(taken[1000:]) <= 17 * 20, "16 of 100 a second"
