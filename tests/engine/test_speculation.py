"""Promise 1 on the real model: guesses, right or wrong, never show in the tokens."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.core import events as ev
from engine.core.core import EngineCore
from engine.core.drafting import DraftProposer
from engine.core.params import SampledToken, SamplingParams
from engine.core.scheduler import SchedulerConfig
from engine.core.sequence import EngineRequest, Kind
from engine.core.speculation import NgramProposer, Proposer, Speculation
from engine.models.llama import Llama
from engine.runner import TorchRunner, attention_layout, geometry_of
from engine.text.artifact import ModelArtifact
from engine.text.tokenizer import TextTokenizer, load_tokenizer
from tests.engine.core.guesses import FreeGuesses

Answers = dict[tuple[int, int], list[SampledToken]]

LIST = (
    "Repeat this list exactly.\nname: Ada, city: London, year: 1815\n"
    "name: Alan, city: London, year: 1912\nname: Ada, city: London, year: 1815\n"
    "name: Alan, city: London, year: 1912\nname: Ada, city:"
)
REFRAIN = "The sea is blue. The sea is deep. The sea is blue. The sea is"

GREEDY: dict[str, Any] = {"temperature": 0.0}
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 5}
NUCLEUS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 6}
BOUND: dict[str, Any] = {
    "temperature": 0.7,
    "seed": 7,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logit_bias": ((198, 2.0),),
    "min_tokens": 30,
    "logprobs": 3,
}


class Bench:
    """Engines over one loaded model, with or without speculation."""

    def __init__(self, model: Llama, artifact: ModelArtifact, layout: Any) -> None:
        self.model, self.artifact, self.layout = model, artifact, layout
        self.tokenizer: TextTokenizer = load_tokenizer(artifact.tokenizer_source())

    def runner(self, blocks: int = 96) -> TorchRunner:
        geometry = geometry_of(self.artifact, "bf16", blocks)
        pool = bytearray(geometry.pool_bytes)
        eos = self.artifact.config.eos_token_ids
        return TorchRunner(self.model, pool, geometry, self.layout, eos)

    def core(self, proposer: Proposer | None, blocks: int = 96) -> EngineCore:
        speculation = Speculation(proposer, 4, FreeGuesses()) if proposer else None
        return EngineCore(self.runner(blocks), SchedulerConfig(8, 128), speculation=speculation)

    def answers(
        self, core: EngineCore, prompts: list[str], params: list[dict[str, Any]], length: int = 32
    ) -> Answers:
        """By (prompt, choice); computed together."""
        for index, (prompt, fields) in enumerate(zip(prompts, params, strict=True)):
            ids = self.tokenizer.encode(prompt)
            sampling = SamplingParams(max_tokens=length, ignore_eos=True, **fields)
            request = EngineRequest(f"{index}", Kind.FULL, ids, sampling, b"s" * 16, ticket=index)
            core.scheduler.submit(request, 0)
        found: Answers = {}
        for now_ns in itertools.count():
            plan = core.plan(now_ns)
            if not plan.rows:
                break
            for event in core.apply(plan, core.runner.execute(plan), now_ns, 1):
                core.scheduler.check_integrity()
                if isinstance(event, ev.Tokens):
                    answer = found.setdefault((int(event.request_id), event.choice), [])
                    answer += event.tokens
        assert core.pool.counts().leased == 0
        return found


@pytest.fixture(scope="module")
def bench(artifact: ModelArtifact, load: Callable[[str, str], Llama]) -> Bench:
    with torch.inference_mode():
        layout = attention_layout(artifact, "bf16", "exact")
    return Bench(load("bf16", "exact"), artifact, layout)


@pytest.fixture(scope="module")
def plain(bench: Bench) -> Answers:
    """One token per step, and room for all (that batches do not show is tested elsewhere)."""
    return bench.answers(bench.core(None), PROMPTS, PARAMS)


PROMPTS = [LIST, LIST, REFRAIN, LIST, REFRAIN]
PARAMS = [GREEDY, {**HOT, "n": 2}, NUCLEUS, BOUND, GREEDY]


def test_ngram_guesses_change_no_token_and_no_logprob(bench: Bench, plain: Answers) -> None:
    core = bench.core(NgramProposer())
    assert bench.answers(core, PROMPTS, PARAMS) == plain
    speculation = core.speculation
    assert speculation is not None
    assert 0 < speculation.accepted_tokens < speculation.draft_tokens


def test_preempted_with_guesses_the_tokens_are_the_same(bench: Bench, plain: Answers) -> None:
    core = bench.core(NgramProposer(), blocks=15)
    assert bench.answers(core, PROMPTS, PARAMS) == plain
    assert core.scheduler.preemptions > 0


def test_a_repetitive_answer_takes_fewer_steps(bench: Bench, plain: Answers) -> None:
    core = bench.core(NgramProposer())
    assert bench.answers(core, [LIST], [GREEDY])[0, 0] == plain[0, 0]
    assert core.steps < 20


def test_the_model_as_its_own_draft_is_always_right(bench: Bench, plain: Answers) -> None:
    """At any temperature, with penalties and bias: the draft draws with the same noise."""
    draft = DraftProposer(bench.runner())
    core = bench.core(draft)
    assert bench.answers(core, PROMPTS, PARAMS) == plain
    speculation = core.speculation
    assert speculation is not None
    assert speculation.accepted_tokens == speculation.draft_tokens > 100
    draft.retain({})
    draft.check_integrity()


def test_a_draft_without_room_guesses_for_some_only(bench: Bench, plain: Answers) -> None:
    core = bench.core(DraftProposer(bench.runner(blocks=14)))
    assert bench.answers(core, PROMPTS, PARAMS) == plain
    assert core.speculation is not None
    assert core.speculation.accepted_tokens > 0
