"""Scores of prompt tokens and pooled vectors: once, whole, and the same on every path."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.sequence import Kind
from baton.types import events as ev
from baton.types.prompt_outputs import (
    PromptLogprobs,
    PromptLogprobsIntake,
    PromptOutputs,
    bytes_per_row,
)
from tests.engine.core.test_scheduler import answers, ends, make_core, request, run
from tests.soak import examples

PROMPT = [(7 * i + 3) % 256 for i in range(90)]


def scored(name="s", prompt=PROMPT, kind=Kind.FULL, ticket=0, k=2, **params):
    return request(name, prompt, kind, ticket, prompt_logprobs=k, **params)


def embedded(name="e", prompt=PROMPT, kind=Kind.FULL, ticket=0, pooling="mean"):
    return request(name, prompt, kind, ticket, pooling=pooling)


def prompt_outputs_of(events) -> dict[str, ev.PromptOutputsReady]:
    found = [event for event in events if isinstance(event, ev.PromptOutputsReady)]
    assert len({event.request_id for event in found}) == len(found), "told twice"
    return {event.request_id: event for event in found}


def golden(*requests) -> dict[str, ev.PromptOutputsReady]:
    """Each alone, in one chunk, in a large pool."""
    found = {}
    for one in requests:
        core = make_core()
        core.scheduler.submit(one, 0)
        found |= prompt_outputs_of(run(core))
    return found


def test_every_token_but_the_first_has_a_score():
    scores = golden(scored(k=3))["s"].scores
    assert scores.rows == len(PROMPT) - 1
    assert len(scores.top_ids) == len(scores.top_logprobs) == 4 * 3 * scores.rows
    ids = np.frombuffer(scores.top_ids, "<u4").reshape(-1, 3)
    assert ids[:, 0].tolist() == PROMPT[1:], "row i belongs to token i + 1"


def test_they_come_before_the_first_token_and_the_answer_is_the_same():
    core, plain = make_core(), make_core()
    core.scheduler.submit(scored("a"), 0)
    plain.scheduler.submit(request("a", PROMPT), 0)
    events = run(core)
    kinds = [type(e) for e in events if isinstance(e, ev.PromptOutputsReady | ev.Tokens)]
    assert kinds[0] is ev.PromptOutputsReady
    assert kinds.count(ev.PromptOutputsReady) == 1
    assert answers(events) == answers(run(plain))


@pytest.mark.parametrize("step_tokens", [16, 64, 512])
@pytest.mark.parametrize("kind", [Kind.FULL, Kind.PREFILL])
def test_chunks_and_neighbours_do_not_show(step_tokens, kind):
    wanted = golden(scored(), embedded(), embedded("last", pooling="last"))
    core = make_core(step_tokens=step_tokens)
    core.scheduler.submit(request("neighbour", list(range(40)), ticket=0), 0)
    core.scheduler.submit(scored(kind=kind, ticket=1), 0)
    core.scheduler.submit(embedded(kind=kind, ticket=2), 0)
    core.scheduler.submit(embedded("last", kind=kind, ticket=3, pooling="last"), 0)
    assert prompt_outputs_of(run(core)) == wanted


def test_a_cached_prefix_is_not_used_and_what_was_computed_is_kept():
    core = make_core()
    core.scheduler.submit(request("warm", PROMPT), 0)
    run(core)
    core.scheduler.submit(scored(ticket=1), 0)
    events = run(core)
    assert prompt_outputs_of(events)["s"].scores.rows == len(PROMPT) - 1
    (end,) = [event for event in events if isinstance(event, ev.Ended)]
    assert (end.cached_tokens, end.computed_tokens) == (0, len(PROMPT))
    cold = make_core()
    cold.scheduler.submit(scored(), 0)
    run(cold)
    cold.scheduler.submit(request("after", PROMPT, ticket=1), 0)
    (end,) = [event for event in run(cold) if isinstance(event, ev.Ended)]
    assert end.cached_tokens >= 80, "others may use what a scored prompt has computed"


def test_choices_share_one_scoring():
    core = make_core()
    core.scheduler.submit(scored(n=3, temperature=1.0), 0)
    events = run(core)
    assert prompt_outputs_of(events) == golden(scored())
    assert len(answers(events)) == 3


def test_an_embedding_draws_nothing_and_ends():
    core = make_core()
    core.scheduler.submit(embedded(), 0)
    events = run(core)
    assert len(prompt_outputs_of(events)["e"].vector) == 4 * 3
    assert answers(events) == {}
    assert ends(events) == ["e"]
    assert core.pool.counts().in_use == 0


def test_an_embedding_at_prefill_is_done_without_tokens_and_announces_no_kv():
    core = make_core()
    core.scheduler.submit(embedded(kind=Kind.PREFILL), 0)
    events = run(core)
    assert not any(isinstance(event, ev.Published) for event in events)
    (done,) = [event for event in events if isinstance(event, ev.PromptDone)]
    assert done.first == ()
    core.scheduler.release("e")
    assert ends(core.take_events()) == ["e"]


def test_a_scored_chunk_takes_a_smaller_part_of_the_step():
    core = make_core(step_tokens=256)
    core.scheduler.submit(scored(prompt=list(range(200))), 0)
    assert [len(row.tokens) for row in core.plan(0).rows] == [128]


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 90), st.integers(1, 20), st.sampled_from(["score", "embed", "plain"])
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(8, 20),
    st.sampled_from([16, 48, 512]),
)
def test_any_mix_under_preemption_gives_the_same(mix, blocks, step_tokens):
    core = make_core(blocks=blocks, step_tokens=step_tokens)
    wanted = {}
    for ticket, (length, max_tokens, what) in enumerate(mix):
        name, prompt = f"r{ticket}", [ticket, *range(length)]
        make = {"score": scored, "plain": request}.get(what)
        one = (
            make(name, prompt, ticket=ticket, max_tokens=max_tokens)
            if make
            else embedded(name, prompt, ticket=ticket)
        )
        core.scheduler.submit(one, 0)
        if what != "plain":
            wanted |= golden(scored(name, prompt) if make else embedded(name, prompt))
    assert prompt_outputs_of(run(core)) == wanted
    assert core.pool.counts().in_use == 0


@given(st.integers(0, 50), st.integers(0, 3), st.integers(8, 200), st.data())
def test_slices_that_come_twice_or_again_make_one_whole(rows, wide, size, data):
    rng = np.random.default_rng(rows)
    scores = PromptLogprobs(wide, *(rng.bytes(4 * rows * width) for width in (1, 1, wide, wide)))
    parts = list(scores.slices(size))
    assert all(
        len(part.logprobs) // 4 * bytes_per_row(wide) <= max(size, bytes_per_row(wide))
        for _, part in parts
    )
    cut = data.draw(st.integers(0, len(parts)))
    intake = PromptLogprobsIntake(rows)
    for begin, part in [*parts[:cut], *parts]:
        assert intake.put(begin, part)
    assert intake.complete == scores


def test_a_missing_slice_is_noticed():
    scores = PromptLogprobs(0, b"\0" * 40, b"\0" * 40, b"", b"")
    (_, _), second = list(scores.slices(40))[:2]
    intake = PromptLogprobsIntake(10)
    assert not intake.put(*second)
    assert intake.complete is None


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_the_mean_is_the_same_to_the_bit_however_it_is_cut(sizes):
    rows = np.random.default_rng(5).normal(size=(sum(sizes), 7)).astype(np.float32) * 1e3
    whole, cut = PromptOutputs([0], None, "mean"), PromptOutputs([0], None, "mean")
    whole.take([], rows)
    begin = 0
    for size in sizes:
        cut.take([], rows[begin : begin + size])
        begin += size
    assert whole.vector() == cut.vector()
    mean = rows.astype(np.float64).mean(axis=0)
    assert np.allclose(np.frombuffer(whole.vector(), "<f4"), mean)
