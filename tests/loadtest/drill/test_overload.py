"""Judgement of an overload: what each phase must have, and when service is normal again."""

import pytest

from loadtest.client.records import CallRecord
from loadtest.drill.overload import judge_overload, overload_phases, recovery_s
from loadtest.drill.phases import GoodLimits, phased_plan
from loadtest.drill.verdict import DrillOutcome, DrillRun
from tests.loadtest.drill.test_verdict import GOLDEN, ended, worker
from tests.loadtest.metrics.test_metrics import record

RATE = 2.0
PHASES = overload_phases(RATE)
PLAN = phased_plan(PHASES, 0)
LIMITS = GoodLimits(ttft_s=2.0, itl_s=0.05, own_s=0.5)


def answered(index: int, start_s: float, *, ttft_s: float = 1.0, itl_s: float = 0.02):
    first_s = start_s + ttft_s
    last_s = first_s + 63 * itl_s
    return record(
        index=index,
        intended_s=start_s,
        sent_s=start_s,
        chunk_s=[first_s, last_s],
        ended_s=last_s,
        answer_tokens=64,
    )


def refused(index: int, start_s: float, **changes: object) -> CallRecord:
    fields = {"end": "http_error", "status": 429, "detail": "slo_unreachable: busy"}
    fields |= {"retry_after": "3", "chunk_s": []}
    return record(index=index, intended_s=start_s, ended_s=start_s, **{**fields, **changes})


def load(**capacity: float) -> list[CallRecord]:
    """The load as a fleet serves it that refuses what exceeds its capacity in each phase."""
    records = []
    for phase in PHASES:
        share = min(capacity.get(phase.name, RATE) / phase.rate, 1.0)
        owed = 0.0
        for conversation in PLAN.conversations:
            if phase.begin_s <= conversation.start_s < phase.end_s:
                owed += share
                served = owed >= 1.0 - 1e-9
                owed -= served
                of = answered if served else refused
                records.append(of(conversation.turns[0].index, conversation.start_s))
    return records


def judged(records, probes=(), workers=()) -> DrillOutcome:
    return judge_overload(
        DrillRun(planned=list(range(PLAN.request_count)), records=records),
        PHASES,
        LIMITS,
        probes=probes or [ended(0), ended(1)],
        golden=GOLDEN,
        workers=workers or [worker()],
    )


def test_the_load_has_each_rate_for_its_time():
    assert [(p.name, p.rate, p.begin_s, p.end_s) for p in PHASES] == [
        ("1.0 x", 2.0, 0.0, 40.0),
        ("1.5 x", 3.0, 40.0, 80.0),
        ("3 x", 6.0, 80.0, 110.0),
        ("after", 2.0, 110.0, 140.0),
    ]
    starts_s = [conversation.start_s for conversation in PLAN.conversations]
    assert starts_s == sorted(starts_s)
    counts = [sum(p.begin_s <= start_s < p.end_s for start_s in starts_s) for p in PHASES]
    assert counts == [80, 120, 180, 60]
    assert phased_plan(PHASES, 1).digest() != PLAN.digest()


def test_a_fleet_that_refuses_the_rest_passes():
    found = judged(load())
    assert found.faults == []
    assert found.recovered_s == 0.0
    assert [(f.sent, f.good, f.refused, f.late, f.failed) for f in found.phases] == [
        (80, 80, 0, 0, 0),
        (120, 80, 40, 0, 0),
        (180, 60, 120, 0, 0),
        (60, 60, 0, 0, 0),
    ]
    assert found.what_was_done == "1.5 x and 3 x 2.00 requests/s"
    assert found.errors == {"429 slo_unreachable": 160}


def test_goodput_may_fall_by_a_tenth_only():
    kept = {"1.5 x": 1.81}
    assert judged(load(**kept)).faults == []
    (fault,) = judged(load(**{"1.5 x": 1.7})).faults
    assert fault.startswith("1.5 x: 1.70 good responses/s are 0.85 of those at 1.0 x")


@pytest.mark.parametrize("late", [{"ttft_s": 3.1}, {"itl_s": 0.06}])
def test_what_is_admitted_must_be_good(late):
    records = load(**{"3 x": 2.2})
    chosen = [i for i, r in enumerate(records) if 80.0 <= r.intended_s < 110.0 and r.end == "ok"]
    for place in chosen[:3]:
        records[place] = answered(records[place].index, records[place].intended_s, **late)
    assert judged(records).faults == [], "63 of 66"
    place = chosen[3]
    records[place] = answered(records[place].index, records[place].intended_s, **late)
    (fault,) = judged(records).faults
    assert fault == "3 x: 93.9 % of the admitted requests were good, limit 95 %"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"retry_after": ""}, "429 without Retry-After in seconds: #"),
        ({"retry_after": "0"}, "429 without Retry-After in seconds: #"),
        ({"status": 503, "detail": "unavailable: x"}, "not refused but failed: #"),
        ({"end": "timeout", "status": 0}, "bad end: #"),
        ({"end": "stream_error", "detail": ""}, "bad end: #"),
    ],
)
def test_one_request_that_ends_otherwise(changes, said):
    records = load()
    place = next(i for i, r in enumerate(records) if r.end == "http_error")
    records[place] = refused(records[place].index, records[place].intended_s, **changes)
    faults = judged(records).faults
    assert faults
    assert all(fault.startswith(said) for fault in faults)


def test_what_else_a_drill_checks():
    (wrong,) = judged(load(), probes=[ended(0), ended(1, answer="four six")]).faults
    assert wrong.startswith("WRONG TOKENS")
    assert judged(load(), workers=[worker(running=2)]).faults == ["decode-0: 2 requests running"]
    (lost,) = judged(load()[:-1]).faults
    assert lost.endswith("has 0 ends")


@pytest.mark.parametrize(("bad_s", "recovered_s"), [(0.0, 0.0), (6.0, 5.5), (25.0, None)])
def test_recovery_is_when_the_requests_from_then_on_are_good(bad_s, recovered_s):
    after = PHASES[-1]
    records = [
        refused(i, r.intended_s) if after.begin_s <= r.intended_s < after.begin_s + bad_s else r
        for i, r in enumerate(load())
    ]
    found = recovery_s(after, records, LIMITS, 1.0)
    if recovered_s is None:
        assert found is None
        (fault,) = judged(records).faults
        assert fault == "service was normal again never, limit 10 s"
    else:
        assert found == pytest.approx(recovered_s, abs=1.0)
        assert judged(records).faults == []


def test_a_recovery_that_takes_too_long_is_a_fault():
    after = PHASES[-1]
    records = [
        refused(i, r.intended_s) if after.begin_s <= r.intended_s < after.begin_s + 14 else r
        for i, r in enumerate(load())
    ]
    (fault,) = judged(records).faults
    assert fault.startswith("service was normal again after 1")
