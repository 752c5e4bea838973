"""Every family against transformers: tiny random models, fp32, logits of all positions.

The largest error of any logit is below 1e-4 (logits reach 3 to 10); sequences are longer than the
windows, and are computed at once, in uneven chunks, and token by token.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.cpu.load import load_model
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling, verify_exact
from baton.engine.loading.memory import kv_geometry
from baton.engine.numerics import same_bits
from baton.model.artifact import ModelError, resolve_model

pytest.importorskip("transformers")

from tests.engine import tiny_models as tiny
from tests.engine.loading.test_loading import write_gguf

LENGTH = 150  # six windows
MAX_LOGIT_ERROR = 1e-4
CUTS = {"whole": (), "chunks": (37, 101, 102), "decode": range(100, LENGTH)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep converted weights in the test's folder."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))


def logits_of(path: Path, tokens: list[int], cuts: Sequence[int] = ()) -> torch.Tensor:
    """``[T, V]`` logits of one sequence, computed in pieces."""
    with torch.inference_mode():
        artifact = resolve_model(str(path))
        model = load_model(artifact, "fp32", "fast")
        geometry = kv_geometry(artifact.config, "fp32", 32)
        tiling = attention_tiling(artifact.config, "fp32", "fast")
        runner = CpuRunner(model, bytearray(geometry.pool_bytes), geometry, tiling)
        blocks = [(7 * i) % 32 for i in range(-(-len(tokens) // 16))]
        ends = [*cuts, len(tokens)]
        parts = []
        for start, end in zip([0, *cuts], ends, strict=True):
            row = PlanRow(
                sequence_id=0,
                tokens=tokens[start:end],
                start=start,
                block_ids=blocks[: -(-end // 16)],
            )
            parts += runner.hidden(StepPlan((row,)))
        return model.logits(torch.cat(parts)).raw_SV


def error(ours: torch.Tensor, model: Any, tokens: list[int]) -> float:
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert theirs.abs().max() > 1.0  # else a small error would say nothing
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("name", tiny.MODELS)
def test_a_family_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    model = tiny.build(name)
    folder = tiny.save(model, tmp_path / "model")
    tokens = tiny.tokens(LENGTH)
    for cuts in CUTS.values():
        assert error(logits_of(folder, tokens, cuts), model, tokens) < MAX_LOGIT_ERROR


NOT_IN_GGUF: dict[str, dict[str, Any]] = {
    "gemma3": {"query_pre_attn_scalar": 32},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "gpt_oss": {
        "rope_parameters": {**tiny.MODELS["gpt_oss"][1]["rope_parameters"], "truncate": True}
    },
}
TWINS = ["llama", "mistral-no-window", "qwen2", "qwen3", "gemma3", "qwen3_moe", "smollm3"]


@pytest.mark.parametrize("name", [*TWINS, "gpt_oss"])
def test_a_gguf_file_gives_the_logits_of_its_safetensors_twin(tmp_path: Path, name: str) -> None:
    model = tiny.build(name, **NOT_IN_GGUF.get(name, {}))
    path = tiny.save_gguf(model, tmp_path / "tiny.gguf")
    tokens = tiny.tokens(LENGTH)
    assert error(logits_of(path, tokens, (70,)), model, tokens) < MAX_LOGIT_ERROR


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 6.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 6.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.4,
        "mscale_all_dim": 0.7,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    model = tiny.build("qwen3", rope_parameters={"rope_theta": 50_000.0, **SCALINGS[kind]})
    folder = tiny.save(model, tmp_path / "model")
    tokens = tiny.tokens(LENGTH)
    assert error(logits_of(folder, tokens), model, tokens) < MAX_LOGIT_ERROR


def test_gemma_scales_only_the_layers_that_see_everything(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    model = tiny.build("gemma3", rope_parameters=rope, query_pre_attn_scalar=32)
    tokens = tiny.tokens(LENGTH)
    for path in (
        tiny.save(model, tmp_path / "model"),
        tiny.save_gguf(model, tmp_path / "tiny.gguf"),
    ):
        assert error(logits_of(path, tokens), model, tokens) < MAX_LOGIT_ERROR


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_gguf_metadata_scales_rope_alike(tmp_path: Path, kind: str) -> None:
    model = tiny.build("qwen2", rope_parameters={"rope_theta": 50_000.0, **SCALINGS[kind]})
    path = tiny.save_gguf(model, tmp_path / "tiny.gguf")
    tokens = tiny.tokens(LENGTH)
    assert error(logits_of(path, tokens), model, tokens) < MAX_LOGIT_ERROR


def test_gguf_carries_llama3_scaling_as_divisors(tmp_path: Path) -> None:
    rope = {"rope_theta": 50_000.0, **SCALINGS["llama3"]}
    model = tiny.build("llama", rope_parameters=rope)
    plain = 1.0 / 50_000.0 ** (np.arange(0, 32, 2) / 32)
    waves = 2 * math.pi / plain
    smooth = np.clip((64 / waves - 1.0) / (4.0 - 1.0), 0, 1)
    divisors = 1.0 / ((1 - smooth) / 8.0 + smooth)
    path = tiny.save_gguf(model, tmp_path / "tiny.gguf", divisors=divisors)
    tokens = tiny.tokens(LENGTH)
    assert error(logits_of(path, tokens), model, tokens) < MAX_LOGIT_ERROR


# --- exact -------------------------------------------------------------------------------------


def prove(path: Path, dtype: str) -> None:
    artifact = resolve_model(str(path))
    with torch.inference_mode():
        model = load_model(artifact, dtype, "exact")
        verify_exact(model, attention_tiling(artifact.config, dtype, "exact"), dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "name", ["mistral", "qwen2", "qwen3", "gemma3", "qwen3_moe", "smollm3", "gpt_oss"]
)
def test_exact_holds(tmp_path: Path, name: str, dtype: str) -> None:
    prove(tiny.save(tiny.build(name), tmp_path / "model"), dtype)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_token_of_a_mixture_does_not_depend_on_its_batch(tmp_path: Path, name: str) -> None:
    artifact = resolve_model(str(tiny.save(tiny.build(name), tmp_path / "model")))
    with torch.inference_mode():
        model = load_model(artifact, "bf16", "exact")
        tiling = attention_tiling(artifact.config, "bf16", "exact")
    geometry = kv_geometry(artifact.config, "bf16", 64)
    runner = CpuRunner(model, bytearray(geometry.pool_bytes), geometry, tiling)
    rows = [
        PlanRow(sequence_id=i, tokens=tiny.tokens(20 + i), start=0, block_ids=[2 * i, 2 * i + 1])
        for i in range(11)
    ]
    alone = [runner.hidden(StepPlan((row,)))[0] for row in rows]
    for batch in (rows, rows[3:8], rows[::-2]):
        together = runner.hidden(StepPlan(tuple(batch)))
        for row, got in zip(batch, together, strict=True):
            assert same_bits(got, alone[row.sequence_id])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("rope.dimension_count_swa", 16),
        ("rope.freq_base_swa", 5e3),
        ("nextn_predict_layers", 1),
        ("rope.scaling.yarn_attn_factor", 0.9),
        ("attention.scale", 0.5),
        ("logit_scale", 0.5),
        ("attention.clamp_kqv", 8.0),
        ("not_yet_known", 1),
    ],
)
def test_metadata_of_gguf_that_changes_logits_is_refused_by_name(
    tmp_path: Path, key: str, value: Any
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_bool if value is False else add)(f"llama.{key}", value)

    write_gguf(tmp_path / "m.gguf", change=change)
    with pytest.raises(ModelError, match=rf"{key} = .* is not supported"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_the_old_key_of_linear_scaling_in_gguf_is_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", change=lambda w: w.add_float32("llama.rope.scale_linear", 4.0))
    scaling = resolve_model(str(tmp_path / "m.gguf")).config.rope_scaling
    assert scaling == {"rope_type": "linear", "factor": 4.0}


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("gemma3", {"hidden_activation": "gelu"}, "activation 'gelu' is not supported"),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    folder = tiny.save(tiny.build(name, **changes), tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))
