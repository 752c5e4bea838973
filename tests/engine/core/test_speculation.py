"""Speculation over the emulated engine: fewer steps, the same tokens, nothing left behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.core import EngineCore
from baton.engine.core.plan import PlanRow, SampleSpec
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec, TokenSequence
from baton.engine.core.speculative.acceptance import accepted_draft_tokens
from baton.engine.core.speculative.proposers import (
    DraftCandidate,
    NgramProposer,
    Proposal,
    Speculation,
    StepCost,
)
from baton.engine.emulated import EmulatedRunner
from baton.types import events as ev
from baton.types.errors import InvalidRequestError, NumericsError
from baton.types.geometry import KvGeometry
from baton.types.params import SampledToken, SamplingParams
from tests.engine.core.draft_tokens import FreeDraftTokens, Oracle, oracle
from tests.engine.core.test_scheduler import SEED, answers, ends, golden, request, run
from tests.soak import examples

PROMPT = list(range(40))


def make_core(
    speculation: Speculation | None, blocks=64, batch=32, step_tokens=512, eos=(), vocab=256
) -> EngineCore:
    geometry = KvGeometry(num_layers=2, num_kv_heads=2, head_dim=4, num_blocks=blocks, dtype="bf16")
    runner = EmulatedRunner(geometry, bytearray(geometry.pool_bytes), vocab, eos)
    return EngineCore(runner, SchedulerConfig(batch, step_tokens), speculation=speculation)


def knowing(prompt=PROMPT, honesty=1.0, most=4, **params) -> tuple[Speculation, list[int]]:
    """A speculation that knows the answer to a prompt, and that answer."""
    answer = golden(prompt, **params)
    return oracle({(tuple(prompt), 0): answer}, honesty, most), answer


def token_events(events, name="a") -> list[ev.Tokens]:
    return [e for e in events if isinstance(e, ev.Tokens) and e.request_id == name]


def test_accepted_draft_tokens_come_out_together():
    speculation, answer = knowing(max_tokens=21)
    core = make_core(speculation)
    core.scheduler.submit(request("a", PROMPT, max_tokens=21), 0)
    events = run(core)
    assert answers(events)[("a", 0)] == answer
    assert [len(e.tokens) for e in token_events(events)] == [1, 5, 5, 5, 5]
    (done,) = [e for e in events if isinstance(e, ev.StepDone) and e.step == 5][:1]
    assert (done.drafts, done.draft_tokens, done.accepted_tokens) == (4, 16, 16)


@pytest.mark.parametrize("honesty", [0.0, 0.5, 0.9])
def test_wrong_guesses_cost_steps_and_change_nothing(honesty):
    speculation, answer = knowing(max_tokens=60, honesty=honesty)
    core = make_core(speculation)
    core.scheduler.submit(request("a", PROMPT, max_tokens=60), 0)
    events = run(core)
    assert answers(events)[("a", 0)] == answer
    assert speculation.draft_tokens > speculation.accepted_tokens
    assert core.pool.counts().in_use == 0


def test_hashes_are_those_of_an_engine_that_does_not_speculate():
    speculation, _ = knowing(max_tokens=50, honesty=0.6)
    cores = [make_core(None), make_core(speculation)]
    for core in cores:
        core.scheduler.submit(request("a", PROMPT, max_tokens=50), 0)
        run(core)
    assert set(cores[0].pool.hashes()) == set(cores[1].pool.hashes())


def test_an_end_within_the_run_ends_it():
    speculation, answer = knowing(max_tokens=30)
    stop = next(t for i, t in enumerate(answer) if i > 6 and t not in answer[:i])
    core = make_core(speculation)
    core.scheduler.submit(request("a", PROMPT, max_tokens=30, stop_token_ids=(stop,)), 0)
    events = run(core)
    assert answers(events)[("a", 0)] == answer[: answer.index(stop)]
    assert token_events(events)[-1].stop_token == stop
    assert ends(events) == ["a"]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_no_answer_is_longer_than_it_may_be(max_tokens):
    speculation, answer = knowing(max_tokens=30)
    core = make_core(speculation)
    core.scheduler.submit(request("a", PROMPT, max_tokens=max_tokens), 0)
    events = run(core)
    assert answers(events)[("a", 0)] == answer[:max_tokens]
    assert token_events(events)[-1].finish_reason == "length"


def test_guesses_preempt_nobody_and_take_only_what_is_free():
    """5 blocks: 3 + 2 hold both requests to their ends, not the draft tokens beyond."""
    prompts = {"a": list(range(40)), "b": list(range(100, 120))}
    known = {(tuple(p), 0): golden(p, max_tokens=8) for p in prompts.values()}
    core = make_core(oracle(known, 1.0, most=16), blocks=5)
    for ticket, (name, prompt) in enumerate(prompts.items()):
        core.scheduler.submit(request(name, prompt, ticket=ticket, max_tokens=8), 0)
    events = run(core)
    assert core.batch.preemptions == 0
    assert all(answers(events)[(n, 0)] == known[tuple(p), 0] for n, p in prompts.items())


def test_between_steps_guesses_hold_no_block():
    speculation, _ = knowing(max_tokens=60, honesty=0.0, most=16)
    core = make_core(speculation)
    core.scheduler.submit(request("a", PROMPT, max_tokens=60), 0)
    for now_ns in range(10):
        plan = core.plan(now_ns)
        core.apply(plan, core.runner.execute(plan), now_ns, 1)
        (sequence,) = core.batch.running
        assert len(sequence.blocks) <= -(-len(sequence.tokens) // 16)


def test_guesses_stay_within_the_tokens_of_a_step():
    speculation, _ = knowing(max_tokens=40, most=16)
    core = make_core(speculation, step_tokens=16, batch=4)
    core.scheduler.submit(request("a", PROMPT, max_tokens=40), 0)
    core.scheduler.submit(request("b", list(range(300)), ticket=1), 0)
    for now_ns in range(100):
        plan = core.plan(now_ns)
        if not plan.rows:
            break
        assert sum(row.num_draft_tokens for row in plan.rows) <= 15
        core.apply(plan, core.runner.execute(plan), now_ns, 1)


def test_histories_take_the_guesses_before_for_granted():
    speculation, answer = knowing(max_tokens=20)
    core = make_core(speculation)
    core.scheduler.submit(request("a", PROMPT, max_tokens=20), 0)
    for now_ns in range(2):
        plan = core.plan(now_ns)
        if now_ns == 0:
            core.apply(plan, core.runner.execute(plan), now_ns, 1)
    (row,) = plan.rows
    assert row.tokens == answer[:5]
    assert row.num_draft_tokens == 4
    whole = PROMPT + answer
    assert [list(sample.history) for sample in row.samples] == [
        whole[:length] for length in range(41, 46)
    ]


def test_nan_behind_guesses_is_tried_again_without_them():
    speculation, answer = knowing(max_tokens=20)
    core = make_core(speculation)
    core.scheduler.submit(request("a", PROMPT, max_tokens=20), 0)
    plan = core.plan(0)
    events = core.apply(plan, core.runner.execute(plan), 0, 1)
    plan = core.plan(1)
    assert plan.rows[0].num_draft_tokens
    events += core.fail(plan, NumericsError("NaN in row 0", rows=(0,)))
    core.batch.check_integrity()
    assert core.plan(2).rows[0].num_draft_tokens == 0
    events += run(core)
    assert answers(events)[("a", 0)] == answer


# ---------------------------------------------------------------- any interleaving


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.integers(1, 24), st.integers(1, 3), st.integers(0, 3)),
        min_size=1,
        max_size=6,
    ),
    st.integers(8, 24),
    st.sampled_from([16, 48, 512]),
    st.sampled_from([0.3, 0.8, 1.0]),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), max_size=3),
)
def test_any_mix_gives_the_tokens_of_an_engine_without_speculation(
    mix, blocks, step_tokens, honesty, cancels
):
    """Choices that share blocks, preemptions, and cancels, with draft tokens of any quality."""
    known, submitted = {}, {}
    reference = make_core(None, blocks=256)
    for ticket, (length, max_tokens, n, family) in enumerate(mix):
        prompt = [family, *range(length)]
        params = {"max_tokens": max_tokens, "n": n, "temperature": 1.0, "seed": 7}
        submitted[f"r{ticket}"] = (prompt, params, ticket)
        reference.scheduler.submit(request(f"r{ticket}", prompt, ticket=ticket, **params), 0)
    want = answers(run(reference))
    for (name, choice), answer in want.items():
        prompt = tuple(submitted[name][0])
        known[prompt, choice] = max(known.get((prompt, choice), []), answer, key=len)
    core = make_core(oracle(known, honesty), blocks=blocks, step_tokens=step_tokens)
    refused = set()
    for name, (prompt, params, ticket) in submitted.items():
        try:
            core.scheduler.submit(request(name, prompt, ticket=ticket, **params), 0)
        except InvalidRequestError:
            refused.add(name)
    events = []
    cancelled = set()
    for step, index in sorted(cancels):
        events += run_steps(core, step)
        cancelled.add(f"r{index}")
        core.scheduler.cancel(f"r{index}")
        core.batch.check_integrity()
    events += run(core)
    got = answers(events)
    for (name, choice), answer in want.items():
        if name in refused:
            continue
        found = got.get((name, choice), [])
        assert found == (answer[: len(found)] if name in cancelled else answer)
    assert sorted(ends(events)) == sorted(submitted.keys() - refused)
    assert core.pool.counts().in_use == 0


def run_steps(core: EngineCore, count: int) -> list[ev.Event]:
    events = []
    for now_ns in range(count):
        plan = core.plan(now_ns)
        core.batch.check_integrity()
        if plan.rows:
            events += core.apply(plan, core.runner.execute(plan), now_ns, 1)
            core.batch.check_integrity()
    return events


# ---------------------------------------------------------------- n-grams


def asked(tokens: list[int], allowed=lambda kind: 4, sequence_id: int = 1) -> DraftCandidate:
    params = SamplingParams(max_tokens=99)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=SEED)
    inside = EngineRequest(request_id="a", prompt=tokens[:1], spec=spec)
    return DraftCandidate(
        TokenSequence(sequence_id=sequence_id, request=inside, choice=0, tokens=tokens), allowed
    )


@pytest.mark.parametrize(
    ("tokens", "draft_tokens", "kind"),
    [
        ([1, 2, 3], [], 0),
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1], 2),
        ([7, 7], [7, 7, 7, 7], 1),
        ([1, 2, 1, 2, 1, 2, 1, 2], [1, 2, 1, 2], 4),
        ([5, 1, 8, 0, 6, 1, 9, 0, 5, 1], [8, 0, 6, 1], 2),  # the longer match, not the newer
        ([5, 1, 8, 4, 5, 1, 9, 0, 5, 1], [9, 0, 5, 1], 2),  # of equal ones the newer
    ],
)
def test_ngrams_say_what_followed_last_time(tokens, draft_tokens, kind):
    (found,) = NgramProposer().propose([asked(tokens)], 0)
    assert (list(found.tokens), found.kind) == (draft_tokens, kind)


def test_the_ngram_index_grows_with_the_answer():
    proposer, candidate = NgramProposer(), asked([1, 2, 3, 4])
    assert not proposer.propose([candidate], 0)[0].tokens
    candidate.sequence.tokens += [1, 2]
    assert list(proposer.propose([candidate], 0)[0].tokens) == [3, 4, 1, 2]
    proposer.retain({})
    assert not proposer.propose([asked([9])], 0)[0].tokens, "nothing of the former is left"


def test_an_engine_that_repeats_itself_is_found_out():
    """Two tokens only: half of the draft tokens are right by chance; the answer is the same."""
    cores = [
        make_core(None, vocab=2),
        make_core(Speculation(NgramProposer(), 4, FreeDraftTokens()), vocab=2),
    ]
    results = []
    for core in cores:
        core.scheduler.submit(request("a", PROMPT, max_tokens=80), 0)
        results.append(answers(run(core)))
    assert results[0] == results[1]
    assert cores[1].speculation.accepted_tokens > 10
    assert cores[1].steps < cores[0].steps


# ---------------------------------------------------------------- does it pay?

PLAIN_NS = 20_000_000


def steps_with_draft_tokens(
    honesty: float, guess_ns: int, requests: int = 1, max_tokens: int = 400
) -> tuple[int, int]:
    """(steps with draft tokens, steps) when each draft token takes so long."""
    prompts = [[i, *range(30)] for i in range(requests)]
    known = {(tuple(p), 0): golden(p, max_tokens=max_tokens) for p in prompts}
    speculation = Speculation(Oracle(known, honesty), 4, StepCost())
    core = make_core(speculation, blocks=1000)
    for ticket, prompt in enumerate(prompts):
        core.scheduler.submit(
            request(f"r{ticket}", prompt, ticket=ticket, max_tokens=max_tokens), 0
        )
    with_guesses = steps = 0
    while (plan := core.plan(steps)).rows:
        draft_tokens = sum(row.num_draft_tokens for row in plan.rows)
        with_guesses += bool(draft_tokens)
        steps += 1
        core.apply(plan, core.runner.execute(plan), steps, PLAIN_NS + guess_ns * draft_tokens)
    return with_guesses, steps


def test_good_guesses_are_made_in_nearly_every_step():
    with_guesses, steps = steps_with_draft_tokens(1.0, PLAIN_NS // 20)
    assert steps < 95
    assert with_guesses > 0.9 * steps


def test_bad_guesses_turn_themselves_off_and_are_rarely_tried_again():
    with_guesses, steps = steps_with_draft_tokens(0.0, PLAIN_NS // 20)
    assert steps == 400
    assert 3 <= with_guesses < 40


def test_dear_guesses_turn_themselves_off():
    with_guesses, steps = steps_with_draft_tokens(0.7, PLAIN_NS)
    assert with_guesses < 0.2 * steps


def test_in_a_big_batch_guesses_must_be_better():
    """A draft token of 1/10 step is worth its time for one request, for 16 it costs 1.6 tokens."""
    alone, steps = steps_with_draft_tokens(0.7, PLAIN_NS // 10, max_tokens=200)
    assert alone > 0.8 * steps
    crowd, steps = steps_with_draft_tokens(0.7, PLAIN_NS // 10, requests=16, max_tokens=200)
    assert crowd < 0.3 * steps


def test_the_plain_step_is_timed_again_from_time_to_time():
    cost = StepCost()
    assert cost.needs_plain_step(1), "nothing is known yet"
    cost.note(1, 0, 100)
    assert not cost.needs_plain_step(1)
    for _ in range(64):
        cost.note(1, 2, 120)
    assert cost.share(1) == pytest.approx(0.1)
    assert cost.needs_plain_step(1)
    cost.note(1, 0, 100)
    assert not cost.needs_plain_step(1)
    assert cost.needs_plain_step(2), "another batch, another time"


def test_a_step_without_guesses_is_timed_even_if_the_one_before_said_nothing():
    class CatchesUpTwice(Oracle):
        calls = 0

        def propose(self, candidates, budget_tokens):
            self.calls += 1
            self.untimed = self.calls <= 2
            return (
                [Proposal() for _ in candidates] if self.untimed else super().propose(candidates, 0)
            )

    prompts = {"a": [1, *PROMPT], "b": [2, *PROMPT]}
    known = {(tuple(p), 0): golden(p, max_tokens=60) for p in prompts.values()}
    speculation = Speculation(CatchesUpTwice(known, 1.0), 4, StepCost())
    core = make_core(speculation)
    core.scheduler.submit(request("a", prompts["a"], max_tokens=60), 0)
    run_steps(core, 3)  # the prompt, a plain step, one that says nothing; another one follows
    core.scheduler.submit(request("b", prompts["b"], ticket=1, max_tokens=60), 0)
    run(core)
    assert speculation.accepted_tokens > 60


def test_accepted_draft_tokens_count_up_to_the_first_wrong_one():
    params = SamplingParams(max_tokens=9)
    samples = tuple(SampleSpec(0, params, [], 0) for _ in range(4))
    row = PlanRow(
        sequence_id=1,
        tokens=[9, 1, 2, 3],
        start=0,
        block_ids=[0],
        samples=samples,
        num_draft_tokens=3,
    )
    for drawn, right in (([1, 2, 3, 4], 3), ([1, 2, 4, 4], 2), ([5, 2, 3, 4], 0)):
        assert accepted_draft_tokens(row, [SampledToken(t) for t in drawn]) == right
