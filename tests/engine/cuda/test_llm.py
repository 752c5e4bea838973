"""The library's ``LLM`` over the CUDA runner, and what it refuses there."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.cuda import build as cuda_build
from baton.engine.cuda.runner import CudaRunner
from baton.engine.llm import LLM
from baton.model.artifact import ModelError
from baton.model.lora_artifact import AdapterError
from baton.text.grammar import translate
from baton.types import events as ev
from baton.types.params import SamplingParams
from tests.engine.cuda import tiny
from tests.engine.lora_files import write_adapter
from tests.engine.tiny_llama import write_llama
from tests.matrix.tiny import write_tiny

pytestmark = pytest.mark.slow  # 20 s in the interpreter; the runner's tests are quick

PROMPTS = [[9, 41, 7, 300, 12], [70, 71, 72] * 6]
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=3, temperature=1.1, seed=4, n=2, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder)
    tokenizer = (folder / "tokenizer.json").read_text()
    # smaller than that one, because the interpreter is slow
    reference = write_llama(folder, heads=2, kv_heads=1, context_tokens=36)
    (folder / "tokenizer.json").write_text(tokenizer)
    return reference


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    interpreted = partial(cuda_build.build_cuda_runner, device=tiny.CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_build, "build_cuda_runner", interpreted)
        return LLM(model, device="cuda", dtype="fp32", kv_blocks=24, max_step_tokens=16)


@pytest.fixture(scope="module")
def on_cpu(model: str) -> LLM:
    return LLM(model, device="cpu", dtype="fp32", kv_blocks=24)


def core_answers(
    runner: CudaRunner, prompt: Sequence[int], params: SamplingParams
) -> list[list[int]]:
    """Tokens of one request that the engine's core computes, by choice."""
    core = EngineCore(runner, SchedulerConfig(1, 64))
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=b"another " * 2, ticket=0)
    core.scheduler.submit(EngineRequest(request_id="r", prompt=list(prompt), spec=spec), 0)
    found: dict[int, list[int]] = {}
    while (plan := core.plan(0)).rows:
        for event in core.apply(plan, runner.execute(plan), 0, 1):
            if isinstance(event, ev.Tokens):
                found.setdefault(event.choice, []).extend(t.token for t in event.tokens)
    return [found[choice] for choice in sorted(found)]


@pytest.mark.slow
def test_its_tokens_are_those_of_the_runner_alone(llm: LLM) -> None:
    assert isinstance(llm.runner, CudaRunner)
    kinds = (GREEDY, SEEDED)
    outputs = [output for params in kinds for output in llm.generate(PROMPTS, params)]
    assert [len(output.token_ids) for output in outputs] == [3] * 6
    assert {output.finish_reason for output in outputs} == {"length"}
    alone = [
        answer
        for params in kinds
        for prompt in PROMPTS
        for answer in core_answers(llm.runner, prompt, params)
    ]
    assert [output.token_ids for output in outputs] == alone
    llm.core = EngineCore(llm.runner, SchedulerConfig(4, 16))  # the pool has other contents now


@pytest.mark.slow
def test_adapters_vectors_scores_and_grammars_work(llm: LLM, on_cpu: LLM, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", llm.artifact.config, size=0.5)
    tokens = {}
    for engine in (llm, on_cpu):
        adapter = engine.load_adapter(folder)
        outputs = engine.generate([PROMPTS[0]] * 2, GREEDY, adapter=[adapter, ""])
        tokens[engine] = [output.token_ids for output in outputs]
    assert tokens[llm] == tokens[on_cpu]  # so small and in fp32, rounding changes no token
    assert tokens[llm][0] != tokens[llm][1]
    for ours, theirs in zip(llm.embed(PROMPTS), on_cpu.embed(PROMPTS), strict=True):
        assert np.allclose(ours, theirs, atol=1e-4)
    [scored] = llm.generate([PROMPTS[0]], max_tokens=1, prompt_logprobs=1)
    assert scored.scores is not None
    [shaped] = llm.generate([PROMPTS[1]], max_tokens=4, grammar=translate("regex", "[a-d]{3}"))
    assert len(shaped.text) == 3
    assert set(shaped.text) <= set("abcd")


def test_an_adapter_of_another_model_is_refused(llm: LLM, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny.config())
    with pytest.raises(AdapterError):
        llm.load_adapter(folder)


def test_without_a_gpu_the_error_gives_the_fix(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ModelError, match=r"sees no GPU with CUDA_VISIBLE_DEVICES=7; use device cp"):
        LLM(model, device="cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("BATON_DEVICE", "cuda")
    with pytest.raises(ModelError, match=r"torch \S+ sees no GPU; use device cpu"):
        LLM(model)
    with pytest.raises(ModelError, match="'gpu'; use cpu, cuda or auto"):
        LLM(model, device="gpu")


def test_a_missing_package_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("baton.engine.cuda."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModelError, match="device cuda needs triton; install it or use cpu"):
        LLM(model, device="cuda")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"kv": "int8"}, "kv_dtype is not supported on CUDA; use device cpu"),
        ({"weights": "int4"}, r"quantisation\.weights int4 is not supported on CUDA; use fp8"),
    ],
)
def test_settings_of_the_cpu_are_refused_by_name(
    model: str, setting: dict[str, str], text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        LLM(model, device="cuda", **setting)
