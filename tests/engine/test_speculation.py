"""Promise 1 on the real model: draft tokens, right or wrong, never show in the tokens."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.core.speculative.draft_proposer import DraftProposer
from baton.engine.core.speculative.proposers import (
    NgramProposer,
    Proposer,
    Speculation,
    SpeculationSettings,
)
from baton.engine.cpu.build import build_draft
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling
from baton.engine.loading.memory import kv_geometry
from baton.engine.sampling.grammars import open_grammars
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelArtifact, resolve_model
from baton.text.grammar import translate
from baton.text.tokenizer import TextTokenizer, load_tokenizer
from baton.types import events as ev
from baton.types.params import AdapterRef, SampledToken, SamplingParams
from tests.engine.conftest import MODEL
from tests.engine.core.draft_tokens import FreeDraftTokens, oracle
from tests.engine.core.test_scheduler import answers, run
from tests.engine.cpu.test_build_draft import tokenizer_json
from tests.engine.cpu.test_lora import load_into, runner_of
from tests.engine.loading.test_loading import write_directory
from tests.engine.lora_files import write_adapter

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


RECORDS = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Alan"]}, "year": {"type": "integer"}},
        "required": ["name", "year"],
        "additionalProperties": False,
    },
}
SHAPED: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 9,
    "grammar": translate("json", json.dumps(RECORDS)),
}


class Bench:
    """Engines over one loaded model, with or without speculation."""

    def __init__(self, model: Decoder, artifact: ModelArtifact, tiling: Any) -> None:
        self.model, self.artifact, self.tiling = model, artifact, tiling
        self.grammars = open_grammars(artifact)
        self.tokenizer: TextTokenizer = load_tokenizer(artifact.tokenizer)

    def runner(self, blocks: int = 96) -> CpuRunner:
        geometry = kv_geometry(self.artifact.config, "bf16", blocks)
        pool = bytearray(geometry.pool_bytes)
        eos = self.artifact.config.eos_token_ids
        return CpuRunner(self.model, pool, geometry, self.tiling, eos, grammars=self.grammars)

    def core(self, proposer: Proposer | Speculation | None, blocks: int = 96) -> EngineCore:
        speculation = proposer if isinstance(proposer, Speculation) else None
        if proposer is not None and speculation is None:
            speculation = Speculation(proposer, 4, FreeDraftTokens())
        return EngineCore(self.runner(blocks), SchedulerConfig(8, 128), speculation=speculation)

    def answers(
        self, core: EngineCore, prompts: list[str], params: list[dict[str, Any]], length: int = 32
    ) -> Answers:
        """By (prompt, choice); computed together."""
        for index, (prompt, fields) in enumerate(zip(prompts, params, strict=True)):
            ids = self.tokenizer.encode(prompt)
            sampling = SamplingParams(max_tokens=length, **{"ignore_eos": True, **fields})
            spec = RequestSpec(kind=Kind.FULL, params=sampling, hash_seed=b"s" * 16, ticket=index)
            request = EngineRequest(request_id=f"{index}", prompt=ids, spec=spec)
            core.scheduler.submit(request, 0)
        found: Answers = {}
        for now_ns in itertools.count():
            plan = core.plan(now_ns)
            if not plan.rows:
                break
            duration_ns = 1000 + 100 * sum(row.num_draft_tokens for row in plan.rows)  # as if
            for event in core.apply(plan, core.runner.execute(plan), now_ns, duration_ns):
                core.batch.check_integrity()
                if isinstance(event, ev.Tokens):
                    answer = found.setdefault((int(event.request_id), event.choice), [])
                    answer += event.tokens
        assert core.pool.counts().in_use == 0
        return found


@pytest.fixture(scope="module")
def bench(artifact: ModelArtifact, load: Callable[[str, str], Decoder]) -> Bench:
    with torch.inference_mode():
        tiling = attention_tiling(artifact.config, "bf16", "exact")
    return Bench(load("bf16", "exact"), artifact, tiling)


@pytest.fixture(scope="module")
def plain(bench: Bench) -> Answers:
    """One token per step, and room for all (that batches do not show is tested elsewhere)."""
    return bench.answers(bench.core(None), PROMPTS, PARAMS)


PROMPTS = [LIST, LIST, REFRAIN, LIST, LIST]
PARAMS = [GREEDY, {**HOT, "n": 2}, NUCLEUS, BOUND, {**SHAPED, "ignore_eos": False}]


def test_ngram_guesses_change_no_token_and_no_logprob(bench: Bench, plain: Answers) -> None:
    core = bench.core(NgramProposer())
    assert bench.answers(core, PROMPTS, PARAMS) == plain
    speculation = core.speculation
    assert speculation is not None
    assert 0 < speculation.accepted_tokens < speculation.draft_tokens


def test_a_repetitive_answer_takes_fewer_steps(bench: Bench, plain: Answers) -> None:
    core = bench.core(NgramProposer())
    assert bench.answers(core, [LIST], [GREEDY])[0, 0] == plain[0, 0]
    assert core.steps < 20


@pytest.mark.slow
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


def test_a_bad_draft_turns_itself_off(bench: Bench, plain: Answers, tmp_path: Path) -> None:
    """A tiny model of random weights over the same vocabulary."""
    write_directory(tmp_path, shards=1, vocab_size=49_152)
    weights = load_file(tmp_path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn(49_152, 64, generator=torch.Generator().manual_seed(3))
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(bench.artifact))
    settings = EngineSettings(
        model=MODEL,
        kv_blocks=32,
        numerics="fast",  # of the draft: nothing to prove
        speculation=SpeculationSettings(mode="draft", draft=str(tmp_path)),
    )
    speculation = build_draft(settings, bench.runner(), lambda _: None)
    answer = bench.answers(bench.core(speculation), [LIST], [GREEDY], length=48)[0, 0]
    assert answer[:32] == plain[0, 0]
    assert speculation.accepted_tokens == 0
    assert 5 < speculation.drafts < 16, "tried, and soon given up"


def test_with_adapters_in_the_batch_guesses_do_not_show(tmp_path: Path) -> None:
    """On a tiny model: draft tokens that are half right, two adapters and none in one step."""
    write_directory(tmp_path / "base", shards=1)
    artifact = resolve_model(str(tmp_path / "base"))
    runner = runner_of(artifact, "bf16", blocks=64)
    paths = [write_adapter(tmp_path / str(i), artifact.config, seed=i, size=0.3) for i in (1, 2)]
    digests = ["", *(load_into(runner, path, artifact) for path in paths)]
    seeded = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)

    def together(speculation: Speculation | None) -> dict[tuple[str, int], list[int]]:
        core = EngineCore(runner, SchedulerConfig(8, 64), speculation=speculation)
        for ticket, adapter in enumerate(digests):
            prompt = [(31 * i + ticket) % artifact.config.vocab_size for i in range(40)]
            seed = b"%16d" % ticket
            ref = AdapterRef("", adapter, "") if adapter else None
            spec = RequestSpec(
                kind=Kind.FULL, params=seeded, hash_seed=seed, ticket=ticket, adapter=ref
            )
            request = EngineRequest(request_id=adapter, prompt=prompt, spec=spec)
            core.scheduler.submit(request, 0)
        return answers(run(core))

    plain = together(None)
    prompts = [
        tuple((31 * i + ticket) % artifact.config.vocab_size for i in range(40))
        for ticket in range(3)
    ]
    known = {(p, 0): plain[digest, 0] for p, digest in zip(prompts, digests, strict=True)}
    speculation = oracle(known, 0.6)
    assert together(speculation) == plain
    assert 0 < speculation.accepted_tokens < speculation.draft_tokens
