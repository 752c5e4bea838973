"""The scheduler over the emulated engine: whatever the path, the tokens are the same."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.emulated import EmulatedRunner
from baton.types import events as ev
from baton.types.errors import InvalidRequestError, NumericsError, UnavailableError
from baton.types.geometry import KvGeometry
from baton.types.params import SamplingParams
from tests.soak import examples

SEED = b"s" * 16


def make_core(blocks: int = 64, batch: int = 32, step_tokens: int = 512, eos=()) -> EngineCore:
    geometry = KvGeometry(num_layers=2, num_kv_heads=2, head_dim=4, num_blocks=blocks, dtype="bf16")
    runner = EmulatedRunner(geometry, bytearray(geometry.pool_bytes), eos_token_ids=eos)
    return EngineCore(runner, SchedulerConfig(batch, step_tokens), check_every_step=True)


def request(
    name: str,
    prompt: list[int],
    kind: Kind = Kind.FULL,
    ticket=0,
    priority=0,
    cacheable=True,
    pooling="",
    emitted=(),
    **params,
):
    spec = RequestSpec(
        kind=kind,
        params=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}),
        hash_seed=SEED,
        ticket=ticket,
        priority=priority,
        cacheable=cacheable,
        pooling=pooling,
        emitted=emitted,
    )
    return EngineRequest(request_id=name, prompt=prompt, spec=spec)


def run(core: EngineCore, limit: int = 2000) -> list[ev.Event]:
    """Step until idle; the block equation is checked after every step."""
    events: list[ev.Event] = []
    for now_ns in range(limit):
        plan = core.plan(now_ns)
        core.batch.check_integrity()
        if not plan.rows:
            events += core.take_events()
            return events
        events += core.apply(plan, core.runner.execute(plan), now_ns, 1_000_000)
        core.batch.check_integrity()
        counts = core.pool.counts()
        assert counts.free + counts.cached + counts.in_use + counts.quarantined == counts.total
    raise AssertionError("the engine did not become idle")


def answers(events: list[ev.Event]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if isinstance(event, ev.Tokens):
            answer = found.setdefault((event.request_id, event.choice), [])
            assert len(answer) == event.index, "indexes have no holes and no repeats"
            answer += [token.token for token in event.tokens]
    return found


def golden(prompt: list[int], **params) -> list[int]:
    core = make_core(blocks=256)
    core.scheduler.submit(request("golden", prompt, **params), 0)
    return answers(run(core))[("golden", 0)]


def ends(events: list[ev.Event]) -> list[str]:
    return [event.request_id for event in events if isinstance(event, ev.Ended)]


def test_alone_and_in_a_batch():
    core = make_core(blocks=256)
    prompts = {f"r{i}": list(range(i, i + 7 * i + 3)) for i in range(16)}
    for ticket, (name, prompt) in enumerate(prompts.items()):
        core.scheduler.submit(request(name, prompt, ticket=ticket), 0)
    got = answers(run(core))
    for name, prompt in prompts.items():
        assert got[(name, 0)] == golden(prompt)


@pytest.mark.parametrize("step_tokens", [16, 33, 64, 1000])
def test_chunked_at_any_size(step_tokens):
    prompt = list(range(200))
    core = make_core(step_tokens=step_tokens)
    core.scheduler.submit(request("a", prompt), 0)
    assert answers(run(core))[("a", 0)] == golden(prompt)


def queued_tokens(core: EngineCore) -> int:
    return core.batch.load().queued_prompt_tokens


@pytest.mark.parametrize("steps", [0, 1])
def test_a_prefix_that_several_prompts_wait_for_counts_once_in_the_load(steps):
    """Otherwise a worker with a fork in its queue looks as if it computed it for each sibling."""
    prefix = list(range(320))
    core = make_core(blocks=256, step_tokens=64)
    core.scheduler.submit(request("first", [*prefix, 1], ticket=0), 0)
    for now_ns in range(steps):
        plan = core.plan(now_ns)
        core.apply(plan, core.runner.execute(plan), now_ns, 1_000_000)
    for ticket in range(1, 5):
        core.scheduler.submit(request(f"s{ticket}", [*prefix, ticket + 1] * 2, ticket=ticket), 0)
    own = 2 * 321 - 320
    assert queued_tokens(core) == 321 - steps * 64 + 4 * own
    core.scheduler.submit(request("other", list(range(500, 600)), ticket=9), 0)
    core.scheduler.submit(request("urgent", [*prefix, 7], ticket=9, priority=-1), 0)
    urgent = 1 if steps else 321  # it goes before the first unless that runs
    assert queued_tokens(core) == 321 - steps * 64 + 4 * own + 100 + urgent
    run(core)
    assert queued_tokens(core) == 0


def test_prefix_hit_computes_only_the_rest():
    prompt = list(range(100))
    core = make_core()
    core.scheduler.submit(request("cold", prompt), 0)
    run(core)
    core.scheduler.submit(request("warm", prompt), 0)
    events = run(core)
    assert answers(events)[("warm", 0)] == golden(prompt)
    (end,) = [event for event in events if isinstance(event, ev.Ended)]
    assert (end.cached_tokens, end.computed_tokens) == (96, 4)


def test_a_fully_cached_prompt_still_computes_its_last_token():
    prompt = list(range(32))
    core = make_core()
    for name in ("one", "two"):
        core.scheduler.submit(request(name, prompt), 0)
        events = run(core)
    (end,) = [event for event in events if isinstance(event, ev.Ended)]
    assert end.cached_tokens == 16


def test_preemption_changes_no_token_and_hits_the_lowest_ticket():
    core = make_core(blocks=14)
    prompts = {f"r{i}": list(range(i * 100, i * 100 + 60)) for i in range(3)}
    for ticket, (name, prompt) in enumerate(prompts.items()):
        core.scheduler.submit(request(name, prompt, ticket=ticket, max_tokens=40), 0)
    events = run(core)
    for name, prompt in prompts.items():
        assert answers(events)[(name, 0)] == golden(prompt, max_tokens=40)
    preempted = {e.request_id: e.preemptions for e in events if isinstance(e, ev.Ended)}
    assert preempted["r0"] == 0
    assert preempted["r2"] > 0
    assert core.pool.counts().in_use == 0


def test_choices_share_the_prompt_and_diverge():
    prompt = list(range(40))
    core = make_core(blocks=16)
    core.scheduler.submit(request("n", prompt, n=3, temperature=1.0, seed=5), 0)
    got = answers(run(core))
    assert len({tuple(answer) for answer in got.values()}) == 3
    alone = make_core()
    alone.scheduler.submit(request("n", prompt, n=1, temperature=1.0, seed=5), 0)
    assert answers(run(alone))[("n", 0)] == got[("n", 0)]


def test_choices_under_memory_pressure_end_once_each():
    core = make_core(blocks=7)
    core.scheduler.submit(request("n", list(range(40)), n=4, temperature=1.0, max_tokens=30), 0)
    events = run(core)
    finishes = [e for e in events if isinstance(e, ev.Tokens) and e.finish_reason]
    assert sorted(e.choice for e in finishes) == [0, 1, 2, 3]
    assert ends(events) == ["n"]


class TestAnAnswerThatGoesOn:
    """Tokens came from an engine that is gone; the rest must be what that one would have said."""

    PROMPT = tuple(range(40))

    def whole(self, **params) -> dict[int, list[int]]:
        core = make_core(blocks=256)
        core.scheduler.submit(request("whole", list(self.PROMPT), **params), 0)
        return {choice: tokens for (_, choice), tokens in answers(run(core)).items()}

    @staticmethod
    def rest(events: list[ev.Event], name: str) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for event in events:
            if isinstance(event, ev.Tokens) and event.request_id == name:
                found.setdefault(event.choice, []).extend(token.token for token in event.tokens)
        return found

    @pytest.mark.parametrize("cut", [1, 8, 9, 24, 29])
    @pytest.mark.parametrize("cached", [False, True])
    def test_here(self, cut, cached):
        params = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 30}
        want = self.whole(**params)
        emitted = tuple(tuple(want[choice][:cut]) for choice in (0, 1))
        core = make_core()
        if cached:
            core.scheduler.submit(request("before", self.PROMPT), 0)
            run(core)
        core.scheduler.submit(request("r", list(self.PROMPT), emitted=emitted, **params), 0)
        events = run(core)
        assert self.rest(events, "r") == {choice: want[choice][cut:] for choice in (0, 1)}
        indexes = [e.index for e in events if isinstance(e, ev.Tokens) and e.request_id == "r"]
        assert min(indexes) == cut
        (end,) = [e for e in events if isinstance(e, ev.Ended) and e.request_id == "r"]
        assert end.cached_tokens <= len(self.PROMPT)
        assert core.pool.counts().in_use == 0

    def test_a_choice_that_has_ended_stays_ended(self):
        params = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 30}
        want = self.whole(**params)
        core = make_core()
        emitted = (None, tuple(want[1][:4]))
        core.scheduler.submit(request("r", list(self.PROMPT), emitted=emitted, **params), 0)
        assert self.rest(run(core), "r") == {1: want[1][4:]}

    def test_after_a_hand_off_of_its_prompt(self):
        """The KV of the prompt arrives; the tokens behind it are computed here."""
        want = self.whole(max_tokens=30)[0]
        core, source = make_core(), make_core()
        source.scheduler.submit(request("p", list(self.PROMPT), Kind.PREFILL), 0)
        published = run(source)
        (admitted,) = [e for e in published if isinstance(e, ev.Admitted)]
        remote = request(
            "r", list(self.PROMPT), Kind.REMOTE, max_tokens=30, emitted=(tuple(want[:7]),)
        )
        core.scheduler.submit(remote, 0)
        (reserved,) = [e for e in run(core) if isinstance(e, ev.Reserved)]
        core.scheduler.bind("r", reserved.generation)
        (bound,) = [e for e in run(core) if isinstance(e, ev.Bound)]
        ours, theirs = core.runner._pool, source.runner._pool
        ours[:, :, list(bound.blocks)] = theirs[:, :, list(admitted.blocks)]
        assert core.scheduler.commit("r", reserved.generation, (want[0],), 1)
        events = run(core)
        assert self.rest(events, "r") == {0: want[7:]}

    def test_a_hand_off_that_is_given_up(self):
        want = self.whole(max_tokens=30)[0]
        core = make_core()
        remote = request(
            "r", list(self.PROMPT), Kind.REMOTE, max_tokens=30, emitted=(tuple(want[:7]),)
        )
        core.scheduler.submit(remote, 0)
        run(core)
        core.scheduler.compute_locally("r", (want[0],))
        assert self.rest(run(core), "r") == {0: want[7:]}

    @pytest.mark.parametrize(
        ("emitted", "params"),
        [
            (((),), {}),
            (((1,) * 8,), {}),
            (((1,), (2,)), {}),
            (((1,),), {"prompt_logprobs": 0}),
            (((1,),), {"pooling": "mean"}),
        ],
    )
    def test_what_cannot_go_on_is_refused(self, emitted, params):
        core = make_core()
        with pytest.raises(InvalidRequestError):
            core.scheduler.submit(request("r", list(self.PROMPT), emitted=emitted, **params), 0)
        assert not core.batch.has_work()


def test_stop_tokens_end_the_answer_and_are_not_part_of_it():
    prompt = list(range(20))
    want = golden(prompt)
    core = make_core()
    core.scheduler.submit(request("s", prompt, stop_token_ids=(want[3],)), 0)
    events = run(core)
    assert answers(events)[("s", 0)] == want[: want.index(want[3])]
    (last,) = [e for e in events if isinstance(e, ev.Tokens) and e.finish_reason]
    assert (last.finish_reason, last.stop_token) == ("stop", want[3])


def test_ignore_eos_and_min_tokens():
    prompt = list(range(20))
    want = golden(prompt)
    core = make_core(eos=(want[0],))
    core.scheduler.submit(request("a", prompt, ignore_eos=True), 0)
    core.scheduler.submit(request("b", prompt, ticket=1), 0)
    got = answers(run(core))
    assert got[("a", 0)] == want
    assert got[("b", 0)] == []


def test_what_can_never_fit_is_refused_with_the_numbers():
    core = make_core(blocks=4)
    with pytest.raises(InvalidRequestError, match="5 KV blocks; this worker has 4"):
        core.scheduler.submit(request("big", list(range(60)), max_tokens=10), 0)


def test_a_duplicate_id_is_refused():
    core = make_core()
    core.scheduler.submit(request("a", [1]), 0)
    with pytest.raises(InvalidRequestError, match="already in use"):
        core.scheduler.submit(request("a", [1]), 0)


class TestPromptsThatBeginAlike:
    """Several at once: the first is computed, and the others wait for it."""

    COMMON = tuple(range(192))

    def submitted(self, *owns: int, step_tokens: int = 2000) -> EngineCore:
        core = make_core(blocks=256, step_tokens=step_tokens)
        for ticket, own in enumerate(owns):
            prompt = [*self.COMMON, *range(own, own + 40)]
            core.scheduler.submit(request(f"r{ticket}", prompt, ticket=ticket), 0)
        return core

    @pytest.mark.parametrize(("step_tokens", "second"), [(2000, 192), (100, 96)])
    def test_the_common_part_is_computed_once(self, step_tokens, second):
        """But for the last few blocks, for which no step is waited."""
        core = self.submitted(1000, 2000, 3000, step_tokens=step_tokens)
        events = run(core)
        cached = {e.request_id: e.cached_tokens for e in events if isinstance(e, ev.Admitted)}
        assert cached == {"r0": 0, "r1": second, "r2": 192}
        for ticket, own in enumerate((1000, 2000, 3000)):
            prompt = [*self.COMMON, *range(own, own + 40)]
            assert answers(events)[f"r{ticket}", 0] == golden(prompt)

    def test_others_pass_them(self):
        core = self.submitted(1000, 2000)
        core.scheduler.submit(request("other", list(range(5000, 5050)), ticket=9), 0)
        assert [len(row.tokens) for row in core.plan(0).rows] == [232, 50]

    def test_a_short_common_part_is_not_waited_for(self):
        core = make_core(blocks=256)
        for ticket in range(2):
            prompt = [*range(100), *range(1000 + ticket * 100, 1100 + ticket * 100)]
            core.scheduler.submit(request(f"r{ticket}", prompt, ticket=ticket), 0)
        assert len(core.plan(0).rows) == 2

    def test_one_that_waits_is_computed_when_the_first_is_cancelled(self):
        core = self.submitted(1000, 2000, step_tokens=64)
        plan = core.plan(0)
        core.scheduler.cancel("r0")
        events = core.apply(plan, core.runner.execute(plan), 1, 1)
        assert answers(events + run(core))["r1", 0] == golden([*self.COMMON, *range(2000, 2040)])


def test_a_reservation_does_not_wait_for_a_prompt_that_fills_each_step():
    core = make_core(blocks=256, step_tokens=32)
    core.scheduler.submit(request("long", list(range(500)), ticket=0), 0)
    core.plan(0)
    core.scheduler.submit(request("late", list(range(900, 950)), Kind.REMOTE, ticket=1), 1)
    core.plan(2)
    assert any(isinstance(event, ev.Reserved) for event in core.take_events())


def test_strict_order_a_small_request_does_not_overtake():
    core = make_core(blocks=10)
    core.scheduler.submit(request("first", list(range(100)), ticket=0, max_tokens=30), 0)
    core.scheduler.submit(request("big", list(range(500, 600)), ticket=1), 0)
    core.scheduler.submit(request("small", [1, 2, 3], ticket=2), 0)
    assert ends(run(core)) == ["first", "big", "small"]


def test_priority_goes_before_ticket():
    core = make_core(batch=1)
    core.scheduler.submit(request("late", [1], ticket=0, priority=5), 0)
    core.scheduler.submit(request("soon", [2], ticket=9), 0)
    assert ends(run(core)) == ["soon", "late"]


def test_cancel_gives_everything_back():
    core = make_core()
    core.scheduler.submit(request("a", list(range(50)), n=2, temperature=1.0), 0)
    plan = core.plan(0)
    core.apply(plan, core.runner.execute(plan), 0, 1)
    core.scheduler.cancel("a")
    core.batch.check_integrity()
    assert core.pool.counts().in_use == 0
    assert ends(core.take_events()) == ["a"]
    core.scheduler.cancel("a")
    assert ends(core.take_events()) == [], "a request ends once"


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
@pytest.mark.parametrize("kind", list(Kind))
def test_whatever_a_request_is_doing_it_is_gone_with_the_next_step(steps, kind):
    core = make_core(step_tokens=32)
    if kind is Kind.HELD:  # its blocks are in the cache
        core.scheduler.submit(request("before", list(range(80)), max_tokens=1), 0)
        run(core)
    prompt = list(range(80 if kind is Kind.HELD else 70))
    core.scheduler.submit(request("other", [9] * 20, ticket=0, max_tokens=50), 0)
    core.scheduler.submit(request("a", prompt, kind, ticket=1, max_tokens=50), 0)
    for now_ns in range(steps):
        plan = core.plan(now_ns)
        core.apply(plan, core.runner.execute(plan), now_ns, 1)
    plan = core.plan(steps)  # a step is under way when the word comes
    results = core.runner.execute(plan)
    core.scheduler.cancel("a")
    core.batch.check_integrity()
    assert "a" in ends(core.apply(plan, results, steps, 1))
    running = {sequence.request.request_id for sequence in core.batch.running}
    assert running <= {"other"}
    later = core.plan(steps + 1)
    assert len(later.rows) == 1
    assert core.pool.counts().in_use == len(later.rows[0].block_ids)


def test_a_block_that_leaks_is_noticed_when_the_engine_is_idle():
    core = make_core()
    core.scheduler.submit(request("a", list(range(20))), 0)
    run(core)
    core.check_when_idle()
    core.scheduler.submit(request("b", list(range(20)), ticket=1), 0)
    run(core)
    core.pool.allocate(1)
    with pytest.raises(RuntimeError, match="reference counts"):
        core.check_when_idle()


def test_cancelling_one_choice_leaves_the_others():
    core = make_core()
    core.scheduler.submit(request("a", list(range(50)), n=2, temperature=1.0), 0)
    plan = core.plan(0)
    events = core.apply(plan, core.runner.execute(plan), 0, 1)
    core.scheduler.cancel("a", [0])
    events += run(core)
    assert len(answers(events)[("a", 1)]) == 8
    assert len(answers(events)[("a", 0)]) == 1


def test_a_bad_row_fails_alone():
    core = make_core()
    core.scheduler.submit(request("good", list(range(30)), ticket=0), 0)
    core.scheduler.submit(request("bad", list(range(30, 60)), ticket=1), 0)
    plan = core.plan(0)
    events = core.fail(plan, NumericsError("NaN in row 1", rows=(1,)))
    (end,) = [event for event in events if isinstance(event, ev.Ended)]
    assert (end.request_id, end.error_code) == ("bad", "numerics_error")
    assert answers(run(core))[("good", 0)] == golden(list(range(30)))


def test_a_prompt_that_has_not_begun_can_be_withdrawn() -> None:
    """Prompts that have begun, and requests that decode here, continue."""
    core = make_core(batch=1)
    core.scheduler.submit(request("begun", list(range(40)), Kind.PREFILL, ticket=0), 0)
    core.scheduler.submit(request("waits", list(range(40, 80)), Kind.PREFILL, ticket=1), 0)
    core.scheduler.submit(request("own", list(range(80, 120)), ticket=2), 0)
    core.plan(1)
    core.take_events()
    for name in ("begun", "waits", "own", "unknown"):
        core.scheduler.withdraw(name)
    ends = [event for event in core.take_events() if isinstance(event, ev.Ended)]
    assert [(end.request_id, end.error_code) for end in ends] == [("waits", "unavailable")]


def test_announced_kv_that_was_written_twice_ends_its_hand_off(monkeypatch):
    core = make_core()
    core.scheduler.submit(request("handed over", list(range(40)), Kind.PREFILL), 0)
    plan = core.plan(0)
    results = core.runner.execute(plan)
    monkeypatch.setattr(core.runner, "rewritten_rows", (0,))
    events = core.apply(plan, results, 0, 1)
    (end,) = [event for event in events if isinstance(event, ev.Ended)]
    assert end.error_code == "transfer_failed"
    assert not any(isinstance(event, ev.PromptDone) for event in events)


def test_a_probe_leaves_no_hash_behind():
    core = make_core()
    core.scheduler.submit(request("probe", list(range(40)), cacheable=False), 0)
    run(core)
    assert core.pool.counts().cached == 0


@pytest.mark.parametrize(
    ("decode_ms", "prompt_tokens"),
    [(0, 512), (20, 160), (80, 160), (150, 192), (240, 64)],
    ids=["alone", "of 100 ms", "as much as the decodes", "250 ms together", "some all the same"],
)
def test_chunks_are_bounded_in_time(decode_ms, prompt_tokens):
    """At 0.5 ms a prompt token."""
    core = make_core(blocks=512, step_tokens=512)
    if decode_ms:
        core.scheduler.submit(request("answer", [1], ticket=0, max_tokens=99), 0)
    for now_ns in range(9):
        if now_ns == 4:  # by then it is known what the answer's steps take
            core.scheduler.submit(request("prompt", list(range(6000)), ticket=1), now_ns)
        plan = core.plan(now_ns)
        tokens = sum(len(row.tokens) for row in plan.rows if not row.decodes)
        took_ns = 500_000 * tokens + decode_ms * 1_000_000 * any(r.decodes for r in plan.rows)
        core.apply(plan, core.runner.execute(plan), now_ns, took_ns)
    rows = [row for row in core.plan(9).rows if not row.decodes]
    assert sum(len(row.tokens) for row in rows) == pytest.approx(prompt_tokens, rel=0.15)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 20), st.integers(1, 3), st.integers(0, 4)),
        min_size=1,
        max_size=8,
    ),
    st.integers(8, 24),
    st.sampled_from([16, 48, 512]),
)
def test_any_mix_gives_the_golden_tokens(mix, blocks, step_tokens):
    core = make_core(blocks=blocks, step_tokens=step_tokens)
    expected = {}
    for ticket, (length, max_tokens, n, family) in enumerate(mix):
        prompt = [family, *range(length)]
        name = f"r{ticket}"
        params = {"max_tokens": max_tokens, "n": n, "temperature": 1.0, "seed": 7}
        try:
            core.scheduler.submit(request(name, prompt, ticket=ticket, **params), 0)
        except InvalidRequestError:
            continue
        expected[name] = golden(prompt, **{**params, "n": 1})
    events = run(core)
    got = answers(events)
    for name, tokens in expected.items():
        assert got[(name, 0)] == tokens
    assert sorted(ends(events)) == sorted(expected)
    assert core.pool.counts().in_use == 0


class TestCachedBlocksAreHeldForOthers:
    PROMPT = tuple(range(64))

    def submit(self, core: EngineCore, tokens: int, skip_blocks: int = 0) -> None:
        held = request("held", list(self.PROMPT[:tokens]), Kind.HELD)
        held.spec = msgspec.structs.replace(held.spec, skip_blocks=skip_blocks)
        core.scheduler.submit(held, 0)

    def filled(self, **options) -> EngineCore:
        core = make_core(**options)
        core.scheduler.submit(request("filler", list(self.PROMPT)), 0)
        run(core)
        return core

    @pytest.mark.parametrize("skip_blocks", [0, 1, 4])
    def test_at_once_and_without_a_step(self, skip_blocks):
        core = self.filled()
        before = core.pool.counts()
        self.submit(core, 64, skip_blocks)
        events = core.take_events()
        (admitted,) = [event for event in events if isinstance(event, ev.Admitted)]
        assert len(admitted.blocks) == 4 and admitted.cached_tokens == 64
        published = [event for event in events if isinstance(event, ev.Published)]
        assert [(p.block_begin, p.block_count, p.layer_count) for p in published] == (
            [(skip_blocks, 4 - skip_blocks, ev.ALL_LAYERS)] if skip_blocks < 4 else []
        )
        (done,) = [event for event in events if isinstance(event, ev.PromptDone)]
        assert done.first == () and not core.plan(1).rows
        assert core.pool.counts().in_use == before.in_use + 4
        core.scheduler.release("held")
        core.batch.check_integrity()
        assert core.pool.counts() == before

    def test_a_later_request_cannot_evict_them(self):
        core = self.filled(blocks=8)
        self.submit(core, 64)
        core.scheduler.submit(request("other", list(range(100, 150)), max_tokens=1), 0)
        run(core)
        core.scheduler.release("held")
        self.submit(core, 64)  # still all there

    @pytest.mark.parametrize("tokens", [15, 40, 65])
    def test_all_or_nothing(self, tokens):
        core = make_core()
        core.scheduler.submit(request("filler", list(self.PROMPT[:32])), 0)
        run(core)
        before = core.pool.counts()
        with pytest.raises(UnavailableError, match=r"blocks are cached here"):
            self.submit(core, tokens)
        assert core.pool.counts() == before
        core.scheduler.cancel("held")  # unknown
        core.batch.check_integrity()

    def test_no_more_than_half_of_the_pool(self):
        core = self.filled(blocks=8)
        core.scheduler.submit(request("other", list(range(700, 720)), max_tokens=1), 0)
        run(core)
        self.submit(core, 64)
        again = request("again", list(self.PROMPT), Kind.HELD)
        core.scheduler.submit(again, 0)  # the same blocks
        other = request("more", list(range(700, 716)), Kind.HELD)
        with pytest.raises(UnavailableError, match="held for other workers"):
            core.scheduler.submit(other, 0)


class TestKvThatNoAnswerFollows:
    """A prefix that is pulled ahead of its request."""

    def pull(self, core: EngineCore, tokens: int = 32, ticket: int = 9) -> list[ev.Event]:
        prompt = list(range(1000, 1000 + tokens))
        asked = request("pull", prompt, Kind.REMOTE, ticket=ticket, emitted=(None,))
        core.scheduler.submit(asked, 0)
        return [event for event in core.take_events() if isinstance(event, ev.Reserved)]

    def test_has_its_blocks_while_others_wait_for_steps_and_is_in_the_cache_then(self):
        core = make_core(batch=1, step_tokens=32)
        for name in ("running", "waiting"):
            core.scheduler.submit(request(name, list(range(200)), max_tokens=2), 0)
        plan = core.plan(0)
        (reserved,) = self.pull(core)
        core.scheduler.bind("pull", reserved.generation)
        assert core.scheduler.commit("pull", reserved.generation, (), 1)
        core.apply(plan, core.runner.execute(plan), 1, 1)
        assert core.plan(2).rows, "the batch of one goes on"
        core.scheduler.submit(request("user", list(range(1000, 1032)), Kind.HELD), 3)
        assert any(isinstance(event, ev.PromptDone) for event in core.take_events())
        core.scheduler.release("user")
        core.batch.check_integrity()

    def test_is_named_in_the_next_plan_that_has_rows(self):
        core = make_core()
        (reserved,) = [e for e in [*self.pull(core), *run(core)] if isinstance(e, ev.Reserved)]
        core.scheduler.bind("pull", reserved.generation)
        (bound,) = [e for e in core.take_events() if isinstance(e, ev.Bound)]
        assert core.scheduler.commit("pull", reserved.generation, (), 1)
        idle = core.plan(2)
        assert (idle.rows, idle.written) == ((), ())
        core.scheduler.submit(request("user", list(range(40)), max_tokens=2), 3)
        assert core.plan(4).written == tuple(sorted(bound.blocks))
        assert core.plan(5).written == ()

    def test_takes_its_turn_where_few_blocks_are_left(self):
        core = make_core(blocks=16)
        core.scheduler.submit(request("running", list(range(200)), max_tokens=20), 0)
        plan = core.plan(0)
        assert self.pull(core) == []
        core.apply(plan, core.runner.execute(plan), 1, 1)
        reserved = [event for event in run(core) if isinstance(event, ev.Reserved)]
        assert reserved, "granted once there is room, and again each time that growth takes it"
        core.scheduler.cancel("pull")
        core.batch.check_integrity()
        assert core.pool.counts().in_use == 0
