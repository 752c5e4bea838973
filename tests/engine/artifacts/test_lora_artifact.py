"""An adapter that does not fit, or means something else than W x + scale B A x, is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model.artifact import ModelConfig
from baton.model.lora_artifact import TARGETS, AdapterError, read_adapter
from tests.engine.lora_files import PREFIX, write_adapter

CONFIG = ModelConfig(
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    vocab_size=100,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    max_context_tokens=64,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def refusal(path: Path, max_rank: int = 64) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, CONFIG, max_rank)
    return str(caught.value).replace(str(path), "PATH")


def test_an_adapter_is_read_with_its_ranks_and_scales(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", CONFIG, rank=4, alpha=10, targets=("q_proj", "down_proj"))
    found = read_adapter(path, CONFIG, 64)
    assert (found.rank, found.targets, len(found.weights)) == (4, ("q_proj", "down_proj"), 4)
    assert {part.scale for part in found.weights} == {2.5}
    rslora = write_adapter(tmp_path / "b", CONFIG, rank=4, alpha=10, use_rslora=True)
    assert {part.scale for part in read_adapter(rslora, CONFIG, 64).weights} == {5.0}


def test_patterns_change_the_scale_of_the_modules_that_they_name(tmp_path: Path) -> None:
    path = write_adapter(
        tmp_path, CONFIG, rank=4, alpha=4, alpha_pattern={"layers.1.mlp.up_proj": 8, "v_proj": 2}
    )
    scales = {(p.layer, p.target): p.scale for p in read_adapter(path, CONFIG, 64).weights}
    assert (scales[0, "up_proj"], scales[1, "up_proj"]) == (1, 2)
    assert (scales[0, "v_proj"], scales[1, "v_proj"], scales[1, "o_proj"]) == (0.5, 0.5, 1)
    lists = {"exclude_modules": ["lm_head"], "layers_to_transform": [0, 1]}
    path = write_adapter(tmp_path, CONFIG, alpha=4, alpha_pattern={"q.proj": 8}, **lists)
    scales = {(p.layer, p.target): p.scale for p in read_adapter(path, CONFIG, 64).weights}
    assert scales[0, "q_proj"] == 2 * scales[0, "k_proj"], "a point is any character, as in PEFT"


def test_the_digest_covers_config_and_weights(tmp_path: Path) -> None:
    digests = {
        read_adapter(write_adapter(tmp_path / str(i), CONFIG, **changes), CONFIG, 64).digest
        for i, changes in enumerate([{}, {"seed": 1}, {"alpha": 17}, {}])
    }
    assert len(digests) == 3
    assert all(len(digest) == 16 for digest in digests)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is supported"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported"),
        ({"bias": "all"}, "bias is 'all'; only 'none' is supported"),
        ({"use_dora": True}, "'use_dora' = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' = ['lm_head'] is not supported"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out' = True is not supported"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication' = [[0, 2]] is not supported"),
        ({"alora_invocation_tokens": [5]}, "'alora_invocation_tokens' = [5] is not supported"),
        ({"invented_next_year": 1}, "'invented_next_year' = 1 is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"r": 0}, "r is 0; it must be a positive whole number"),
        ({"lora_alpha": None}, "lora_alpha is None; it must be a number"),
        ({"lora_alpha": 10**400}, "cannot be read (int too large"),
        ({"rank_pattern": {"(a+)+$": 3}}, "'(a+)+$' is not a plain module name"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "['embed_tokens'] cannot be changed"),
        ({"target_modules": 7}, "target_modules is 7; it must be a list or a string"),
        ({"target_modules": ["q_proj"]}, "target_modules leaves out model.layers.0.self_attn.k_pr"),
        ({"exclude_modules": ["up_proj"]}, "exclude_modules leaves out model.layers.0.mlp.up_proj"),
        ({"layers_to_transform": 1}, "layers_to_transform leaves out model.layers.0."),
    ],
)
def test_what_the_config_asks_for_and_is_not_there_is_named(
    tmp_path: Path, settings: dict, said: str
) -> None:
    path = write_adapter(tmp_path, CONFIG, **settings)
    assert said in refusal(path)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("0.self_attn.k_proj.lora_B", (33, 8), "k_proj.lora_B.weight is [33, 8], not [32, 8]"),
        ("0.self_attn.o_proj.lora_A", (7, 64), "o_proj.lora_A.weight is [7, 64], not [8, 64]"),
        ("0.mlp.down_proj.lora_A", (8, 79), "down_proj.lora_A.weight is [8, 79], not [8, 80]"),
        ("2.mlp.up_proj.lora_A", (8, 48), "is in layer 2; the model has 2 layers"),
        ("0.mlp.router.lora_A", (8, 48), "is not a LoRA matrix of a supported projection"),
        ("0.mlp.fc_proj.lora_A", (8, 48), "is not a LoRA matrix of a supported projection"),
        ("0.self_attn.q_proj.lora_magnitude_vector", (64,), "is not a LoRA matrix"),
    ],
)
def test_a_matrix_that_does_not_fit_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    path = write_adapter(tmp_path, CONFIG)
    weights = load_file(path / "adapter_model.safetensors")
    weights[f"{PREFIX}.{name}.weight"] = torch.zeros(shape)
    save_file(weights, path / "adapter_model.safetensors")
    assert said in refusal(path)


def test_half_a_pair_a_missing_target_and_a_wrong_dtype_are_named(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, CONFIG)
    whole = load_file(path / "adapter_model.safetensors")
    file = path / "adapter_model.safetensors"
    half = {name: w for name, w in whole.items() if "0.mlp.up_proj.lora_B" not in name}
    save_file(half, file)
    assert "layer 0 up_proj has only one of lora_A and lora_B" in refusal(path)
    save_file({name: w for name, w in whole.items() if "o_proj" not in name}, file)
    assert "target_modules names 'o_proj', which has no weights" in refusal(path)
    save_file({name: w.to(torch.float64) for name, w in whole.items()}, file)
    assert "has unsupported dtype F64" in refusal(path)
    save_file({}, file)
    write_adapter(tmp_path / "empty", CONFIG, targets=(), target_modules="all-linear")
    assert "contains no weights" in refusal(tmp_path / "empty")


def test_ranks_above_the_limit_are_refused(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, CONFIG, rank=9)
    assert "rank 9 is above adapters.max_rank = 8" in refusal(path, max_rank=8)


def test_files_that_are_not_there_or_not_what_they_should_be(tmp_path: Path) -> None:
    assert "PATH: not a directory" in refusal(tmp_path / "nowhere")
    assert "adapter_config.json: cannot be read (No such file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "adapter_config.json")
    assert "adapter_config.json: not a regular file" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{")
    assert "not valid JSON" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[1]")
    assert "must contain a JSON object" in refusal(tmp_path)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": list(TARGETS)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert "adapter_model.bin is a pickle, which is never read" in refusal(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    assert "cannot be read as safetensors" in refusal(tmp_path)
