"""Figures: what each formula counts, and what no run can break."""

import math
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.client.records import CallRecord, ClientReport, End
from loadtest.comparison import interval
from loadtest.metrics import request_figures as figures
from loadtest.metrics.summary import Distribution, LatencyGoals, parse_slo, summarise


def record(**changes: object) -> CallRecord:
    fields = {
        "index": 0,
        "client": 0,
        "intended_s": 10.0,
        "sent_s": 10.5,
        "chunk_s": [11.0, 11.1, 11.2, 12.2],
        "ended_s": 12.5,
        "end": "ok",
        "status": 200,
        "planned_prompt_tokens": 9,
        "planned_answer_tokens": 4,
        "prompt_tokens": 10,
        "answer_tokens": 4,
        "cached_tokens": 6,
    }
    return CallRecord(**{**fields, **changes})


def client(**changes: object) -> ClientReport:
    fields = {"lag_p50_s": 0.0, "lag_p99_s": 0.001, "lag_max_s": 0.01, "cpu_share": 0.1}
    return ClientReport(client=0, requests=1, wall_s=1.0, **{**fields, **changes})


def test_every_latency_counts_from_the_intended_send_but_one():
    r = record()
    assert figures.ttft_s(r) == pytest.approx(1.0)
    assert figures.ttft_from_send_s(r) == pytest.approx(0.5)
    assert figures.second_token_s(r) == pytest.approx(1.1)
    assert figures.itl_mean_s(r) == pytest.approx(0.4)
    assert figures.itl_worst_tenth_s(r) == figures.itl_longest_s(r) == pytest.approx(1.0)
    assert figures.tpot_s(r) == pytest.approx(0.4)
    assert figures.e2e_s(r) == pytest.approx(2.5)
    assert figures.late_s(r) == pytest.approx(0.5)


def test_a_chunk_of_several_tokens_shows_in_tpot_and_not_in_gaps():
    r = record(answer_tokens=13)
    assert figures.tpot_s(r) == pytest.approx(0.1)
    assert figures.itl_mean_s(r) == pytest.approx(0.4)


def test_the_worst_tenth_is_rounded_up_to_whole_gaps():
    chunks = [0.0]
    for gap in [0.1] * 9 + [1.0] + [2.0]:
        chunks.append(chunks[-1] + gap)
    assert figures.itl_worst_tenth_s(record(chunk_s=chunks)) == pytest.approx(1.5)


def test_what_never_came_has_no_latency():
    r = record(chunk_s=[], end="connection", answer_tokens=None)
    for figure in (
        figures.ttft_s,
        figures.ttft_from_send_s,
        figures.second_token_s,
        figures.itl_mean_s,
        figures.itl_longest_s,
        figures.tpot_s,
        figures.e2e_s,
    ):
        assert figure(r) is None


def test_goodput_counts_over_requests_sent():
    records = [
        record(index=0),
        record(index=1, chunk_s=[15.0, 15.1], ended_s=15.2),  # too late
        record(index=2, end="http_error", status=429, detail="queue_full: full", chunk_s=[]),
        record(index=3, end="aborted"),  # as planned: in neither
    ]
    s = summarise(records, [client()], slo=LatencyGoals(ttft_s=2.0, tpot_s=0.5, quantile=0.3))
    assert (s.sent, s.good, s.slo_met) == (4, 1, True)
    assert s.attainment == pytest.approx(1 / 3)
    assert s.ends == {"ok": 2, "http_error": 1, "aborted": 1}
    assert s.errors == {"429 queue_full": 1}
    assert s.good_per_s == pytest.approx(1 / 15.2)
    assert s.distributions["ttft_s"].count == 3


def test_warm_up_is_in_nothing():
    records = [record(index=0, intended_s=1.0), record(index=1)]
    s = summarise(records, [], slo=LatencyGoals(), warmup_s=5.0)
    assert (s.sent, s.prompt_tokens, s.cached_tokens) == (1, 10, 6)
    assert s.duration_s == pytest.approx(7.5)


@pytest.mark.parametrize(
    ("records", "report", "reason"),
    [
        ([record(sent_s=10.001)], client(), None),
        ([record()], client(), "late"),
        ([record(sent_s=10.001)], client(lag_p99_s=0.2), "event loop lagged 200 ms"),
        ([record(sent_s=10.001)], client(cpu_share=0.97), "97 % of a core"),
    ],
)
def test_a_client_that_could_not_keep_up_is_named(records, report, reason):
    verdict = summarise(records, [report], slo=LatencyGoals()).client
    assert bool(verdict.reasons) == (reason is not None)
    assert reason is None or reason in " ".join(verdict.reasons)


@st.composite
def any_record(draw) -> CallRecord:
    intended = draw(st.floats(0, 100))
    late, first, *gaps = draw(st.lists(st.floats(0, 5), min_size=2, max_size=20))
    chunks = []
    moment = intended + late + first
    for gap in gaps:
        chunks.append(moment)
        moment += gap
    return record(
        intended_s=intended,
        sent_s=intended + late,
        chunk_s=chunks,
        ended_s=moment,
        end=draw(st.sampled_from(get_args(End))),
        answer_tokens=draw(st.sampled_from([None, len(chunks), 3 * len(chunks)])),
    )


@pytest.mark.parametrize(("ttft_s", "good"), [(2.0, True), (1.0, False)])
def test_a_limit_may_count_from_the_second_token_if_it_is_in_time(ttft_s, good):
    one = record(intended_s=0.0, sent_s=0.0, chunk_s=[0.5, 1.5, 1.6, 1.7], answer_tokens=4)
    assert not LatencyGoals(ttft_s=ttft_s, tpot_s=0.2).met_by(one)
    assert LatencyGoals(ttft_s=ttft_s, tpot_s=0.2, from_second=True).met_by(one) == good


@given(st.lists(any_record(), max_size=12), st.floats(0.1, 5), st.floats(0, 50))
@settings(deadline=None)
def test_no_run_breaks_the_sums(records, limit, warmup_s):
    s = summarise(records, [], slo=LatencyGoals(ttft_s=limit), warmup_s=warmup_s)
    assert sum(s.ends.values()) == s.sent
    assert sum(s.errors.values()) == s.sent - s.ends.get("ok", 0) - s.ends.get("aborted", 0)
    assert 0 <= s.good <= s.ends.get("ok", 0)
    assert 0 <= s.attainment <= 1
    for d in s.distributions.values():
        assert d.count > 0
        assert -1e-9 <= d.p50 <= d.p90 <= d.p95 <= d.p99 <= d.max
    looser = summarise(records, [], slo=LatencyGoals(ttft_s=2 * limit), warmup_s=warmup_s)
    assert looser.good >= s.good
    assert msgspec.json.decode(msgspec.json.encode(s), type=type(s)) == s


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_lie_within_the_values(values):
    d = Distribution.of(values)
    assert min(values) <= d.p50 <= d.p90 <= d.p99 <= d.max == max(values)
    assert min(values) <= d.mean <= max(values)


def test_an_objective_as_it_is_typed():
    slo = parse_slo("ttft_s=1,tpot_s=0.1", 0.95)
    assert slo == LatencyGoals(ttft_s=1.0, tpot_s=0.1, quantile=0.95)
    assert slo.label() == "goodput@95(ttft 1 s, tpot 0.1 s)"


@pytest.mark.parametrize("text", ["ttft=1", "ttft_s=0", "ttft_s=x", "ttft_s"])
def test_a_wrong_objective_is_refused(text):
    with pytest.raises(ValueError):
        parse_slo(text)


def test_an_interval_of_three_seeds_is_students():
    found = interval([10.0, 11.0, 12.0])
    assert found.mean == 11.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isinf(interval([1.0]).half_width)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40), st.floats(-10, 10))
def test_an_interval_moves_with_its_values(values, shift):
    one, moved = interval(values), interval([value + shift for value in values])
    assert moved.mean == pytest.approx(one.mean + shift, abs=1e-6)
    assert moved.half_width == pytest.approx(one.half_width, abs=1e-6)
