"""Plans: reproducible by seed, honest when scaled, with the sharing that was asked for."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.workloads.arrivals import arrival_times_s, spread_ticks_s
from loadtest.workloads.lengths import LengthsError, parse_lengths
from loadtest.workloads.plan import Segment
from loadtest.workloads.prompts import UNIQUE_KEYS, PromptWriter
from loadtest.workloads.replay import replay_plan
from loadtest.workloads.synthetic import OpenLoop, Sessions, open_loop_plan, session_plan
from loadtest.workloads.traces import TraceRequest, read_trace
from tests.soak import examples

SAMPLES = Path(__file__).parents[3] / "loadtest" / "traces"


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@given(cv=st.sampled_from([0.0, 0.5, 1.0, 2.0]), rate=st.floats(0.1, 100))
@settings(max_examples=examples(20), deadline=None)
def test_gaps_have_the_mean_and_the_burstiness_asked_for(cv, rate):
    gaps = np.diff(arrival_times_s(rng(), 20_001, rate, cv), prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.1 * cv + 1e-6)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=50).map(sorted))
def test_spread_arrivals_keep_their_order_and_their_tick(ticks):
    moments = np.array(ticks, dtype=float) * 3
    spread = spread_ticks_s(rng(), moments)
    assert (np.diff(spread) >= 0).all()
    assert (spread >= moments).all()
    for moment, count in Counter(ticks).items():
        if count == 1:
            assert 3.0 * moment in spread
    later = [(s, m) for s, m in itertools.product(spread, moments) if m > s]
    assert all(m > s for s, m in later)


@pytest.mark.parametrize(
    ("text", "low", "high", "median"),
    [
        ("17", 17, 17, 17),
        ("uniform:10-20", 10, 20, 15),
        ("lognormal:180,0.9", 1, 2**31, 180),
        ("lognormal:180,0.9,200", 1, 200, 180),
        ("choice:5,5,5,900", 5, 900, 5),
    ],
)
def test_lengths_are_drawn_as_they_are_named(text, low, high, median):
    drawn = parse_lengths(text)(rng(), 4_001)
    assert drawn.min() >= low
    assert drawn.max() <= high
    assert np.median(drawn) == pytest.approx(median, rel=0.1)


@pytest.mark.parametrize("text", ["", "0", "x", "uniform:9", "uniform:9-3", "choice:0", "normal:3"])
def test_a_wrong_distribution_is_refused(text):
    with pytest.raises(LengthsError):
        parse_lengths(text)


@given(st.integers(1, 2**40), st.integers(1, 200), st.integers(1, 200))
def test_a_shorter_segment_is_a_prefix_of_a_longer_one(key, first, second):
    writer = PromptWriter(3)
    short, long = sorted((first, second))
    assert len(writer.text([Segment(key, long)]).split()) == long
    assert f"{writer.text([Segment(key, long)])} ".startswith(
        f"{writer.text([Segment(key, short)])} "
    )
    assert writer.token_ids([Segment(key, long)])[:short] == writer.token_ids([Segment(key, short)])


def test_words_change_with_seed_and_key_alone():
    prompt = [Segment(1, 50), Segment(2, 50)]
    assert PromptWriter(3).text(prompt) == PromptWriter(3).text(prompt)
    texts = {PromptWriter(seed).text([Segment(key, 50)]) for seed in (1, 2) for key in (1, 2)}
    assert len(texts) == 4


hashes = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@st.composite
def traces(draw) -> list[TraceRequest]:
    made = []
    for ids in draw(st.lists(hashes, min_size=1, max_size=6)):
        tokens = 512 * (len(ids) - 1) + draw(st.integers(1, 512))
        made.append(TraceRequest(0.0, tokens, draw(st.integers(0, 900)), tuple(ids)))
    return made


@given(traces(), st.sampled_from([1.0, 3.0, 16.0, 32.0, 100.0]))
@settings(deadline=None, max_examples=examples(50))
def test_equal_hashes_give_equal_prompts_after_shrinking_and_other_hashes_do_not(trace, shrink):
    plan = replay_plan(trace, name="t", shrink=shrink, seed=1)
    block = max(1, round(512 / shrink))
    writer = PromptWriter(1)
    for (one, a), (other, b) in itertools.combinations(zip(trace, plan.turns(), strict=True), 2):
        assert a.prompt_tokens == max(1, round(one.input_tokens / shrink))
        common = len(
            list(
                itertools.takewhile(
                    lambda p: p[0] == p[1], zip(one.block_hashes, other.block_hashes, strict=False)
                )
            )
        )
        shared = min(common * block, a.prompt_tokens, b.prompt_tokens)
        assert writer.token_ids(a.prompt)[:shared] == writer.token_ids(b.prompt)[:shared]
        keys = [{s.key for s in t.prompt if s.key < UNIQUE_KEYS} for t in (a, b)]
        assert keys[0] <= set(one.block_hashes)
        assert keys[1] <= set(other.block_hashes)


def test_a_trace_is_sped_up_and_keeps_its_proportions():
    trace = read_trace(SAMPLES / "mooncake_conversation.jsonl")
    plan, fast = (replay_plan(trace, name="t", shrink=32, speed=x, seed=4) for x in (1, 10))
    starts, fast_starts = ([c.start_s for c in p.conversations] for p in (plan, fast))
    assert fast_starts == pytest.approx([s / 10 for s in starts])
    turns = list(plan.turns())
    planned = sum(t.prompt_tokens for t in turns), sum(t.max_tokens for t in turns)
    recorded = sum(r.input_tokens for r in trace), sum(r.output_tokens for r in trace)
    assert planned[0] / planned[1] == pytest.approx(recorded[0] / recorded[1], rel=0.02)
    assert (
        replay_plan(trace, name="t", seed=4, shrink=32).digest() == plan.digest() != fast.digest()
    )


@pytest.mark.parametrize("wrong", [{"speed": 0.0}, {"shrink": -1.0}])
def test_a_scale_must_be_above_zero(wrong):
    with pytest.raises(ValueError, match="above 0"):
        replay_plan([TraceRequest(0.0, 1, 1)], name="t", **wrong)


def open_loop(**changes: object) -> OpenLoop:
    fields = {"prompt_tokens": "20", "answer_tokens": "5"}
    return OpenLoop(requests=400, rate=10.0, **{**fields, **changes})


def test_disturbances_come_in_the_shares_asked_for():
    load = open_loop(
        prefix_groups=3,
        prefix_tokens=32,
        hot_tenant=0.5,
        long_every=10,
        long_tokens=500,
        abort_share=0.25,
        abort_after_s=2.0,
    )
    plan = open_loop_plan(load, name="mixed", seed=2)
    assert plan.digest() == open_loop_plan(load, name="mixed", seed=2).digest()
    turns = list(plan.turns())
    prefixes = Counter(turn.prompt[0] for turn in turns)
    assert len(prefixes) == 3
    assert {segment.tokens for segment in prefixes} == {32}
    assert len({turn.prompt[1].key for turn in turns}) == 400
    long = [turn for turn in turns if turn.group == "long"]
    assert len(long) == 40
    assert {turn.prompt_tokens for turn in long} == {532}
    tenants = Counter(turn.tenant for turn in turns)
    assert tenants["hot"] == pytest.approx(200, abs=30)
    assert set(tenants) == {"hot", "cold-0", "cold-1", "cold-2"}
    aborts = [turn.abort_after_s for turn in turns if turn.abort_after_s is not None]
    assert len(aborts) == pytest.approx(100, abs=25)
    assert min(aborts) >= 1.0
    assert max(aborts) <= 3.0


@given(
    users=st.integers(1, 4),
    sessions=st.integers(1, 3),
    turns=st.integers(1, 4),
    tools=st.integers(0, 2),
)
@settings(deadline=None)
def test_sessions_begin_anew_and_tools_answer_at_once(users, sessions, turns, tools):
    load = Sessions(
        users=users,
        sessions=sessions,
        turns=turns,
        tool_calls=tools,
        prompt_tokens="9",
        answer_tokens="3",
    )
    plan = session_plan(load, name="s", seed=1)
    assert [t.index for t in plan.turns()] == list(range(users * sessions * turns * (1 + tools)))
    for conversation in plan.conversations:
        fresh = [turn for turn in conversation.turns if not turn.continues]
        assert len(fresh) == sessions
        assert len({turn.prompt[0] for turn in fresh}) == 1  # the system text
        tool = [turn for turn in conversation.turns if turn.group == "tool"]
        assert len(tool) == sessions * turns * tools
        assert {turn.think_s for turn in tool} <= {load.tool_s}


@given(st.integers(1, 5), st.sets(st.integers(0, 399)))
@settings(max_examples=examples(20), deadline=None)
def test_shares_are_a_partition_and_what_is_done_is_left_out(shares, done):
    plan = open_loop_plan(open_loop(), name="p", seed=1)
    dealt = [t.index for n in range(shares) for t in plan.share(n, shares).turns()]
    assert sorted(dealt) == list(range(400))
    assert {t.index for t in plan.without(done).turns()} == set(range(400)) - done
