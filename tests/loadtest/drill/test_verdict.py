"""A drill passes only when nothing was wrong, and says what was."""

import msgspec
import pytest

from loadtest.drill.verdict import (
    DrillOutcome,
    DrillRun,
    ShownWorker,
    judge,
    recovery_s,
)
from tests.loadtest.metrics.test_metrics import record

GOLDEN = {0: "one two three", 1: "four five"}


def worker(**changes: object) -> ShownWorker:
    blocks = {"total": 10, "free": 7, "cached": 3, "leased": 0, "quarantined": 0}
    fields = {"id": "decode-0", "role": "decode", "state": "ready", "epoch": 1, "pid": 1}
    fields |= {"host": "here", "kv_blocks": blocks, "running": 0, "waiting": 0}
    return ShownWorker(**{**fields, **changes})


def ended(index: int, **changes: object):
    return record(**{"index": index, "answer": GOLDEN[index], **changes})


def verdict(records, workers=(), *, may_fail: bool = False, fault_s: float = 9.0) -> DrillOutcome:
    run = DrillRun(planned=[0, 1], records=records, fault_s=fault_s)
    workers = workers or [worker()]
    return judge("d", run, GOLDEN, workers, may_fail=may_fail, recovery_limit_s=5.0)


def test_all_well():
    found = verdict([ended(0), ended(1)])
    assert found.passed
    assert found.recovered_s == pytest.approx(3.5)
    assert (found.compared, found.ends) == (2, {"ok": 2})


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (ended(1, answer="four six"), "WRONG TOKENS"),
        (ended(1, answer="four"), "WRONG TOKENS"),  # whole, and yet too short
        (ended(1, end="aborted", answer="fife"), "WRONG TOKENS"),
        (ended(1, end="timeout", answer=""), "timeout"),
        (ended(1, end="broken_stream", answer="four"), "broken_stream"),
        (ended(1, end="connection", answer=""), "connection"),
        (ended(1, end="http_error", status=500, detail="", answer=""), "http_error 500"),
        (ended(1, end="stream_error", detail="worker_lost: x", answer="four"), "worker_lost"),
    ],
)
def test_what_no_drill_may_cost(bad, said):
    found = verdict([ended(0), bad], may_fail=True)
    assert not found.passed
    assert said in " ".join(found.faults)


def test_a_typed_error_is_allowed_where_the_drill_says_so():
    records = [
        ended(0, end="http_error", status=503, detail="unavailable", answer="", intended_s=8.0),
        ended(1),
    ]
    assert verdict(records, may_fail=True).passed
    assert "http_error 503" in verdict(records).faults[0]


def test_a_request_without_an_end_or_with_two():
    assert verdict([ended(0)]).faults == ["request #1 has 0 ends"]
    assert verdict([ended(0), ended(1), ended(1)]).faults == ["request #1 has 2 ends"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state": "dead"}, "decode-0 is dead"),
        ({"running": 2}, "2 requests running"),
        (
            {"kv_blocks": {"total": 10, "free": 6, "cached": 3, "leased": 1, "quarantined": 0}},
            "1 blocks leased",
        ),
        (
            {"kv_blocks": {"total": 10, "free": 6, "cached": 3, "leased": 0, "quarantined": 0}},
            "9 of 10 blocks",
        ),
    ],
)
def test_what_is_left_behind_is_named(changes, said):
    found = verdict([ended(0), ended(1)], [worker(**changes)])
    assert said in " ".join(found.faults)


def test_recovery_counts_from_the_fault_past_the_last_failure():
    records = [
        record(index=0, intended_s=9.0, ended_s=9.5),
        record(index=1, intended_s=10.0, ended_s=10.5),  # served from elsewhere, then it broke
        record(index=2, intended_s=12.0, ended_s=13.0, end="http_error"),
        record(index=3, intended_s=14.0, ended_s=15.0),
        record(index=4, intended_s=14.5, ended_s=16.0),
    ]
    assert recovery_s(records, 9.8) == pytest.approx(5.2)
    assert recovery_s(records[:3], 9.8) is None
    late = verdict([ended(0), msgspec.structs.replace(ended(1), ended_s=20.0)], fault_s=9.9)
    assert late.passed  # the other one was answered at once
    assert not verdict([ended(0, ended_s=30.0), ended(1, ended_s=30.0)]).passed
