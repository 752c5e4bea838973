"""An emulated engine of a fleet: as slow as its timing model, exact, honest about its limits."""

import random
import subprocess
import sys

import pytest

from baton.config.pools import EngineConfig
from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.emulated_timing import EPYC_135M, TIMINGS
from baton.engine.paced import PacedRunner, paced_geometry
from baton.engine.process.step_rates import StepRates
from baton.engine.settings import EmulatedModel
from baton.types.errors import GrammarError, InvalidRequestError
from baton.types.events import StepDone, Tokens
from baton.types.params import AdapterRef, SamplingParams

MODEL = EmulatedModel(
    timing="epyc-135m", vocab_size=49152, eos_token_ids=(2,), max_context_tokens=8192
)


class Clock:
    """Time that only passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def engine(max_requests: int = 8, max_tokens: int = 512) -> tuple[EngineCore, Clock]:
    geometry, clock = paced_geometry(256), Clock()
    pool = bytearray(geometry.pool_bytes)
    runner = PacedRunner(geometry, pool, MODEL, clock_s=lambda: clock.now_s, sleep=clock.sleep)
    return EngineCore(runner, SchedulerConfig(max_requests, max_tokens)), clock


def submit(core: EngineCore, name: str, prompt: range, **params: object) -> None:
    fields = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **params}
    spec = RequestSpec(kind=Kind.FULL, params=SamplingParams(**fields), hash_seed=bytes(16))
    core.scheduler.submit(EngineRequest(request_id=name, prompt=list(prompt), spec=spec), 0)


def step(core: EngineCore) -> tuple[int, list[int]]:
    """(rows, tokens sampled) of one step."""
    plan = core.plan(0)
    events = core.apply(plan, core.runner.execute(plan), 0, 0)
    sampled = [t.token for e in events if isinstance(e, Tokens) for t in e.tokens]
    return len(plan.rows), sampled


def answer(core: EngineCore) -> list[int]:
    tokens: list[int] = []
    while core.batch.has_work():
        tokens += step(core)[1]
    return tokens


def test_steps_last_as_long_as_the_timing_model_says() -> None:
    core, clock = engine()
    submit(core, "a", range(300, 400))
    step(core)
    t = EPYC_135M
    prompt_s = t.step_s + t.prompt_token_s * 100 + t.prompt_context_s * 100 * 100 / 2
    assert clock.now_s == pytest.approx(prompt_s)
    before_s = clock.now_s
    step(core)
    assert clock.now_s - before_s == pytest.approx(t.step_s + t.answer_s + t.answer_context_s * 100)
    assert len(clock.slept_s) == 2  # nobody listens to layers: one sleep for each step


def load_after(core: EngineCore, clock: Clock, steps: int = 1) -> StepDone:
    plan, began_s = core.plan(0), clock.now_s
    results = [row * steps for row in core.runner.execute(plan)]
    duration_ns = round((clock.now_s - began_s) * 1e9)
    return core.apply(plan, results, 0, duration_ns, steps)[-1]


def test_a_step_reports_the_contexts_of_its_rows() -> None:
    core, clock = engine()
    submit(core, "a", range(300, 400), max_tokens=50)
    submit(core, "b", range(500, 550), max_tokens=50)
    assert core.take_events()[-1].coming_context == 100 + 50
    prompts = load_after(core, clock)
    assert (prompts.decode_rows, prompts.decode_context) == (0, 0)
    assert (prompts.answering_context, prompts.coming_context) == (101 + 51, 0)
    first = load_after(core, clock)
    assert (first.decode_rows, first.decode_context) == (2, 100 + 50)
    assert first.answering_context == 102 + 52
    submit(core, "c", range(600, 620), max_tokens=1)
    mixed = load_after(core, clock)
    assert (mixed.decode_rows, mixed.decode_context) == (2, 101 + 51)
    assert mixed.prompt_tokens == 20
    equal = load_after(core, clock, steps=5)
    assert equal.decode_context == 2 * 2 + 102 + 52, (
        "the mean of 102, 103, ... 106 and of the other"
    )


def test_tokens_that_will_come_from_another_worker_are_coming() -> None:
    core, _ = engine()
    spec = RequestSpec(
        kind=Kind.REMOTE, params=SamplingParams(max_tokens=8, n=3), hash_seed=bytes(16)
    )
    request = EngineRequest(request_id="a", prompt=list(range(40)), spec=spec)
    core.scheduler.submit(request, 0)
    load = core.take_events()[-1]
    assert (load.answering_context, load.coming_context) == (0, 3 * 40)


def test_an_engine_finds_the_line_of_its_own_steps() -> None:
    """To 5 %: contexts of a few hundred tokens are too close to determine their cost exactly.

    More steps do not help: the fit favours what it assumes of context by the spread of contexts.
    """
    core, clock = engine(max_requests=8, max_tokens=4096)
    rates, draw = StepRates(), random.Random(1)
    for number in range(60):
        begin = draw.randrange(1000, 20_000)
        length = draw.randrange(16, 400)
        submit(core, f"r{number}", range(begin, begin + length), max_tokens=draw.randrange(4, 30))
        for _ in range(draw.randrange(6)):
            rates.add(load_after(core, clock))
    fit, t = rates.decode_fit, EPYC_135M
    for rows, context in [(1, 100), (4, 2000), (8, 3000)]:
        true_s = t.step_s + t.answer_s * rows + t.answer_context_s * context
        predicted_s = fit.step_s + fit.row_s * rows + fit.context_s * context
        assert predicted_s == pytest.approx(true_s, rel=0.05)


def test_layers_are_announced_while_the_step_goes_on() -> None:
    core, clock = engine()
    submit(core, "a", range(300, 400))
    plan, heard = core.plan(0), []
    core.runner.execute(plan, lambda done: heard.append((done, clock.now_s)))
    total_s = EPYC_135M.seconds(plan.rows)
    assert heard == [(n, pytest.approx(total_s * n / 4)) for n in (1, 2, 3, 4)]


def test_the_batch_obeys_the_schedulers_limits() -> None:
    core, _ = engine(max_requests=3, max_tokens=64)
    for number in range(5):
        submit(core, f"r{number}", range(300, 332))
    while core.batch.has_work():
        plan = core.plan(0)
        assert len(plan.rows) <= 3
        assert sum(len(row.tokens) for row in plan.rows) <= 64
        core.apply(plan, core.runner.execute(plan), 0, 0)


def test_chunks_do_not_show_in_the_tokens_and_the_prompt_does() -> None:
    answers = []
    for max_tokens, first in ((512, 300), (16, 300), (512, 301)):
        core, _ = engine(max_requests=8, max_tokens=max_tokens)
        submit(core, "a", range(first, 400), max_tokens=12)
        answers.append(answer(core))
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12
    assert answers[0] != answers[2]


def test_one_damaged_byte_of_the_prompt_shows_in_the_answer() -> None:
    answers = []
    for damage in (0, 1):
        core, _ = engine()
        submit(core, "a", range(300, 400), max_tokens=6)
        tokens = step(core)[1]
        block = core.plan(0).rows[0].block_ids[2]
        core.runner._pool[1, 0, block, 5, 3] ^= damage
        answers.append(tokens + answer(core))
    assert answers[0][0] == answers[1][0]
    assert answers[0][2:] != answers[1][2:]


def test_tokens_are_ordinary_ones_and_answers_end_by_themselves() -> None:
    lengths, tokens = [], []
    for seed in range(40):
        core, _ = engine()
        limits = {"temperature": 1.0, "seed": seed, "max_tokens": 2000, "ignore_eos": False}
        submit(core, "a", range(300, 320), **limits)
        given = answer(core)
        lengths.append(len(given))
        tokens += given
    assert all(49152 // 64 <= token < 49152 // 2 or token == 2 for token in tokens)
    assert len(set(tokens)) > 0.5 * len(tokens)
    assert 128 < sum(lengths) / 40 < 512


@pytest.mark.parametrize(
    ("params", "adapter", "pooling", "said"),
    [
        ({"grammar": "x"}, None, "", "grammars are not served by an emulated engine"),
        ({"logprobs": 0}, None, "", "logprobs are not served by an emulated engine"),
        ({"logit_bias": ((5, 1.0),)}, None, "", "logit_bias is not served by an emulated engine"),
        ({"bad_words": ((5,),)}, None, "", "bad_words are not served by an emulated engine"),
        ({"prompt_logprobs": 1}, None, "", "prompt_logprobs and embeddings are not served"),
        ({}, None, "last", "prompt_logprobs and embeddings are not served"),
        ({}, AdapterRef("a", "00", "/a"), "", "LoRA adapters are not served by an emulated"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(params, adapter, pooling, said) -> None:
    spec = RequestSpec(
        kind=Kind.FULL,
        params=SamplingParams(max_tokens=1, **params),
        hash_seed=bytes(16),
        adapter=adapter,
        pooling=pooling,
    )
    refusal = engine()[0].runner.capabilities.refusal(spec)
    assert isinstance(refusal, InvalidRequestError | GrammarError)
    assert said in refusal.message


def test_a_busy_machine_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    geometry, clock = paced_geometry(64), Clock()

    def slow(seconds: float) -> None:
        clock.sleep(8 * seconds)

    pool = bytearray(geometry.pool_bytes)
    runner = PacedRunner(geometry, pool, MODEL, clock_s=lambda: clock.now_s, sleep=slow)
    core = EngineCore(runner, SchedulerConfig(8, 512))
    for number in range(40):
        submit(core, f"r{number}", range(300, 332), max_tokens=100)
    answer(core)
    assert "emulated steps take 700 % longer than timing=epyc-135m" in caplog.text


def test_the_fleet_file_knows_all_timing_models() -> None:
    for name in TIMINGS:
        assert EngineConfig.model_validate({"emulated": name}).emulated == name
    assert EngineConfig.model_validate("emulated").emulated in TIMINGS


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys, fleet.worker.worker, baton.engine.process.step_loop, baton.engine.paced; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
