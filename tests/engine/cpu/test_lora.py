"""LoRA on the engine: the sum that PEFT defines, and rows that nobody else's adapter touches."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core.core import EngineCore
from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.cpu.load import load_model
from baton.engine.cpu.lora import CpuAdapters
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling
from baton.engine.llm import LLM
from baton.engine.loading.memory import kv_geometry
from baton.engine.numerics import same_bits
from baton.model.artifact import ModelArtifact, resolve_model
from baton.model.lora_artifact import TARGETS, AdapterArtifact, AdapterError, read_adapter
from baton.types import events as ev
from baton.types.block_hashes import hash_seed
from baton.types.errors import AdapterLoadError
from baton.types.params import AdapterRef, SamplingParams
from tests.engine import tiny_models as tiny
from tests.engine.conftest import MODEL, Driver
from tests.engine.core.draft_tokens import oracle
from tests.engine.core.test_scheduler import answers, run
from tests.engine.cpu.test_tensor_parallel import replica
from tests.engine.lora_files import module_of, write_adapter

MAX_LOGIT_ERROR = 1e-4  # fp32; measured: 3e-6

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all seven": ("llama", {}),
    "query and value": ("llama", {"targets": ("q_proj", "v_proj"), "rank": 4}),
    "one layer": ("llama", {"targets": ("up_proj", "down_proj"), "layers": (1,), "rank": 16}),
    "rslora": ("llama", {"target_modules": "all-linear", "use_rslora": True, "rank": 5}),
    "pattern": ("llama", {"alpha_pattern": {"self_attn.q_proj": 3, "down_proj": 64}}),
    "mistral": ("mistral", {}),
    "qwen2, biases": ("qwen2", {}),
    "qwen3, normed heads": ("qwen3", {"rank": 3}),
    "gemma3": ("gemma3", {}),
    "experts": ("qwen3_moe", {"targets": TARGETS[:4]}),
}


def merged(base: dict[str, torch.Tensor], artifact: AdapterArtifact) -> dict[str, torch.Tensor]:
    """``W + scale * B A``, in the names of Hugging Face."""
    found, lora = dict(base), load_file(artifact.path / "adapter_model.safetensors")
    for part in artifact.weights:
        name = f"model.layers.{part.layer}.{module_of(part.target)}.{part.target}.weight"
        found[name] = found[name] + part.scale * (lora[part.b_name] @ lora[part.a_name])
    return found


def load_into(runner: CpuRunner, path: Path, artifact: ModelArtifact) -> str:
    digest = read_adapter(path, artifact.config, 64).digest.hex()
    ref = AdapterRef(path.name, digest, str(path))
    runner.adapters.add(ref, runner.adapters.prepare(ref))
    return digest


@torch.inference_mode()
def runner_of(artifact: ModelArtifact, dtype: str, blocks: int) -> CpuRunner:
    model = load_model(artifact, dtype, "exact")
    geometry = kv_geometry(artifact.config, dtype, blocks)
    tiling = attention_tiling(artifact.config, dtype, "exact")
    return CpuRunner(model, bytearray(geometry.pool_bytes), geometry, tiling)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_merged_weights_in_transformers(tmp_path: Path, case: str) -> None:
    family, settings = CASES[case]
    theirs = tiny.build(family)
    artifact = resolve_model(str(tiny.save(theirs, tmp_path / "base")))
    path = write_adapter(tmp_path / "lora", artifact.config, size=0.1, **settings)
    theirs.load_state_dict(merged(theirs.state_dict(), read_adapter(path, artifact.config, 64)))
    tokens = tiny.tokens(70)
    with torch.inference_mode():
        runner = runner_of(artifact, "fp32", blocks=16)
        model = runner._model
        digest = load_into(runner, path, artifact)
        row = PlanRow(sequence_id=0, tokens=tokens, start=0, block_ids=list(range(5)))
        plain = model.logits(runner.hidden(StepPlan((row,)))[0]).raw_SV
        ours = model.logits(runner.hidden(StepPlan((replace(row, adapter=digest),)))[0]).raw_SV
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert float((ours - expected).abs().max()) < MAX_LOGIT_ERROR
    assert float((ours - plain).abs().max()) > 100 * MAX_LOGIT_ERROR, "the adapter matters"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # PEFT asks for it
def test_peft_computes_the_same_from_the_files_that_it_saves(tmp_path: Path) -> None:
    import peft  # it takes seconds, and every process of a run reads this file

    theirs = tiny.build("llama")
    artifact = resolve_model(str(tiny.save(theirs, tmp_path / "base")))
    settings = peft.LoraConfig(
        r=6,
        lora_alpha=9,
        target_modules=["q_proj", "k_proj", "down_proj"],
        rank_pattern={"^model.layers.1.self_attn.q_proj": 4, "self_attn.k_proj$": 3},
        alpha_pattern={"^model.layers.2.mlp.down_proj$": 2, "layers.1.self_attn.q_proj": 5},
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(theirs, settings).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0.0, 0.2, generator=generator)
    model.save_pretrained(tmp_path / "lora")
    tokens = tiny.tokens(40)
    with torch.inference_mode():
        runner = runner_of(artifact, "fp32", blocks=16)
        digest = load_into(runner, tmp_path / "lora", artifact)
        row = PlanRow(sequence_id=0, tokens=tokens, start=0, block_ids=[0, 1, 2], adapter=digest)
        ours = runner._model.logits(runner.hidden(StepPlan((row,)))[0]).raw_SV
        expected = model(torch.tensor([tokens])).logits[0]
    assert float((ours - expected).abs().max()) < MAX_LOGIT_ERROR


def test_experts_take_no_adapter(tmp_path: Path) -> None:
    artifact = resolve_model(str(tiny.save(tiny.build("qwen3_moe"), tmp_path / "base")))
    dense = replace(artifact.config, num_experts=0)
    path = write_adapter(tmp_path / "lora", dense, targets=("q_proj", "up_proj"))
    with pytest.raises(
        AdapterError, match=r"mlp\.up_proj.* is not a LoRA matrix of a supported projection"
    ):
        read_adapter(path, artifact.config, 64)


# --- on SmolLM2 --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(artifact: ModelArtifact, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lora")
    return {
        "red": write_adapter(folder / "red", artifact.config, seed=1, size=0.1),
        "blue": write_adapter(
            folder / "blue", artifact.config, seed=2, rank=20, size=0.1, targets=TARGETS[:4]
        ),
    }


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(49_152) for i in range(length)]


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_mixed_in_one_step_each_row_has_the_bits_that_it_has_alone(
    artifact: ModelArtifact, make_driver: Callable[..., Driver], paths: dict[str, Path], dtype: str
) -> None:
    driver = make_driver(dtype)
    runner = driver.runner
    names = ["", *(load_into(runner, path, artifact) for path in paths.values())]
    tokens = prompt_of(44)

    def hidden(table: list[int], cuts: list[int], adapter: str) -> torch.Tensor:
        parts = []
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            row = replace(driver.row(tokens, start, end, table), adapter=adapter)
            parts.append(runner.hidden(StepPlan((row,)))[0])
        return torch.cat(parts)

    alone = {name: hidden(driver.blocks(48), [], name) for name in names}
    assert not same_bits(alone[names[0]], alone[names[1]])
    assert not same_bits(alone[names[1]], alone[names[2]])
    for name in names:
        assert same_bits(hidden(driver.blocks(48, scattered=True), [7, 40], name), alone[name])

    # two rows of each, at different places, decodes and chunks in one step
    rows, wanted = [], []
    for number in range(6):
        name = names[number % 3]
        start, end = [(43, 44), (20, 44), (42, 43), (30, 31), (13, 40)][number % 5]
        table = driver.blocks(48, scattered=number % 2 == 1)
        before = replace(driver.row(tokens, 0, start, table), adapter=name)
        runner.hidden(StepPlan((before,)))
        rows.append(replace(driver.row(tokens, start, end, table), adapter=name))
        wanted.append(alone[name][start:end])
    for got, want in zip(runner.hidden(StepPlan(tuple(rows))), wanted, strict=True):
        assert same_bits(got, want)


def test_whatever_the_path_an_adapter_gives_the_same_tokens(tmp_path: Path) -> None:
    """On a tiny model: prefix hits, a crowd of adapters, chunks, preemption, draft tokens."""
    artifact = resolve_model(str(tiny.save(tiny.build("llama"), tmp_path / "base")))
    runner = runner_of(artifact, "bf16", blocks=24)
    paths = [write_adapter(tmp_path / str(i), artifact.config, seed=i, size=0.3) for i in (1, 2)]
    digests = ["", *(load_into(runner, path, artifact) for path in paths)]
    core = EngineCore(runner, SchedulerConfig(32, 48))
    prompt = [(31 * i + 7) % artifact.config.vocab_size for i in range(70)]
    seeded = SamplingParams(max_tokens=20, temperature=0.8, seed=5, ignore_eos=True)

    def submit(name: str, adapter: str, ticket: int = 0) -> None:
        seed = hash_seed(artifact.weights_digest, "bf16", "test", adapter)
        ref = AdapterRef("", adapter, "") if adapter else None
        spec = RequestSpec(
            kind=Kind.FULL, params=seeded, hash_seed=seed, ticket=ticket, adapter=ref
        )
        request = EngineRequest(request_id=name, prompt=list(prompt), spec=spec)
        core.scheduler.submit(request, 0)

    def crowd() -> None:
        for number in range(9):
            submit(f"crowd {number}", digests[number % 3], number)
        found = answers(run(core))  # 9 x 90 tokens into 24 x 16
        assert core.batch.preemptions > 0
        for number in range(9):
            assert found[f"crowd {number}", 0] == alone[digests[number % 3]]

    alone = {}
    for adapter in digests:
        for name, cached in (("cold", 0), ("hit", 64)):
            submit(name, adapter)
            events = run(core)
            (end,) = [event for event in events if isinstance(event, ev.Ended)]
            assert end.cached_tokens == cached, "nothing is shared between adapters"
            tokens = answers(events)[name, 0]
            assert alone.setdefault(adapter, tokens) == tokens
    assert len({tuple(tokens) for tokens in alone.values()}) == 3

    crowd()
    draft_tokens = oracle({(tuple(prompt), 0): alone[digests[1]]})  # mostly wrong for the others
    core = EngineCore(runner, SchedulerConfig(32, 48), speculation=draft_tokens)
    crowd()
    assert draft_tokens.draft_tokens > draft_tokens.accepted_tokens > 0


@pytest.mark.slow
def test_the_notebook_takes_an_adapter_for_each_prompt(paths: dict[str, Path]) -> None:
    llm = LLM(kv_blocks=96, threads=1, max_step_tokens=64)
    names = ["", *(llm.load_adapter(path) for path in paths.values())]
    prompt = prompt_of(70, seed=4)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5, ignore_eos=True)
    alone = [llm.generate([prompt], params, name)[0].token_ids for name in names]
    assert len({tuple(tokens) for tokens in alone}) == 3
    together = llm.generate([prompt] * 6, params, [*names, *names])
    assert [output.token_ids for output in together] == [*alone, *alone]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dtype"), [(2, "bf16"), (3, "bf16"), (2, "fp32")])
def test_the_width_of_a_replica_does_not_show_either(
    artifact: ModelArtifact, paths: dict[str, Path], ranks: int, dtype: str
) -> None:
    def hidden(width: int) -> list[torch.Tensor]:
        with replica(MODEL, width, dtype=dtype) as opened:
            names = [load_into(opened.runner, path, artifact) for path in paths.values()]
            tokens = prompt_of(60)
            tables = [opened.driver.blocks(64) for _ in range(3)]
            found = []
            for start, end in ((0, 37), (37, 59), (59, 60)):
                rows = [
                    replace(opened.driver.row(tokens, start, end, table), adapter=name)
                    for name, table in zip(("", *names), tables, strict=True)
                ]
                found += opened.runner.hidden(StepPlan(tuple(rows)))
            return found

    for got, want in zip(hidden(ranks), hidden(1), strict=True):
        assert same_bits(got, want)


def test_what_has_changed_since_it_was_named_is_not_loaded(
    artifact: ModelArtifact, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "lora", artifact.config, layers=(0,))
    digest = read_adapter(path, artifact.config, 64).digest.hex()
    write_adapter(path, artifact.config, layers=(0,), seed=9)
    adapters = CpuAdapters(artifact.config, torch.float32)
    with pytest.raises(AdapterLoadError, match="has changed since"):
        adapters.prepare(AdapterRef("mine", digest, str(path)))


def test_nan_in_an_adapter_is_refused_by_name(artifact: ModelArtifact, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "lora", artifact.config, layers=(0,), targets=("o_proj",))
    weights = load_file(path / "adapter_model.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    weights[name][3, 1] = float("nan")
    save_file(weights, path / "adapter_model.safetensors")
    digest = read_adapter(path, artifact.config, 64).digest.hex()
    with pytest.raises(AdapterLoadError, match=r"NaN or Inf in .*o_proj\.lora_B"):
        CpuAdapters(artifact.config, torch.float32).prepare(AdapterRef("m", digest, str(path)))
