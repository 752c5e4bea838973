"""Decoders of models with images: the logits of transformers for text, from its own files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.engine.loading.open import load_weights
from baton.model.artifact import ModelError, resolve_model
from tests.engine import tiny_models as tiny
from tests.engine.models.test_families import LENGTH, MAX_LOGIT_ERROR, error, logits_of

COMMON = {key: value for key, value in tiny.COMMON.items() if key != "tie_word_embeddings"}
VISION: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"sliding_window": tiny.WINDOW, "query_pre_attn_scalar": 20},
        {**VISION, "intermediate_size": 32, "image_size": 28, "patch_size": 14},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {**VISION, "model_type": "pixtral", "intermediate_size": 32, "image_size": 28},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"hidden_size": 128, "rope_parameters": MROPE},
        {**QWEN_VISION, "out_hidden_size": 128},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**QWEN_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
}


def build(name: str) -> Any:
    kind, text, vision = MODELS[name]
    numbers = dict(COMMON)
    if name == "qwen2_5_vl":
        del numbers["head_dim"]
    config = getattr(transformers, f"{kind}Config")(
        text_config={**numbers, **text}, vision_config=vision, tie_word_embeddings=name == "gemma3"
    )
    config._attn_implementation = "eager"
    config.text_config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    return tiny.filled(model, unit_norms=name == "gemma3")


@pytest.mark.parametrize("name", MODELS)
def test_text_has_the_logits_of_transformers_in_old_and_new_files(
    tmp_path: Path, name: str
) -> None:
    model = build(name)
    folder = tiny.save(model, tmp_path / "model")
    tokens = tiny.tokens(LENGTH)
    saved = load_file(folder / "model.safetensors")
    new = {key: weight.clone() for key, weight in model.state_dict().items()}
    if name == "gemma3":  # tied
        del new["lm_head.weight"]
    assert (saved.keys() != new.keys()) == (name != "qwen3_vl"), "old names, and new ones"
    assert any("vis" in key for key in saved)
    for weights in (saved, new):
        save_file(weights, folder / "model.safetensors")
        assert error(logits_of(folder, tokens, (70,)), model, tokens) < MAX_LOGIT_ERROR


def test_the_flat_config_of_the_first_qwen_vl_is_read(tmp_path: Path) -> None:
    model = build("qwen2_5_vl")
    folder = tiny.save(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    del text["rope_parameters"], text["model_type"]
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    (folder / "config.json").write_text(json.dumps({**text, **config, **old}))
    tokens = tiny.tokens(40)
    assert error(logits_of(folder, tokens), model, tokens) < MAX_LOGIT_ERROR


def test_another_decoder_in_a_wrapper_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.save(build("mistral3"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "ministral3"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="decoder 'ministral3' is not supported"):
        resolve_model(str(folder))


def test_weights_of_images_are_unknown_in_a_model_without_them(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "visual.x.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"not part of the family \(visual\.x\.weight\)"):
        load_weights(resolve_model(str(folder)), "fp32")
