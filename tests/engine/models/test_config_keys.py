"""Keys of ``config.json`` and names of weights, as published and edited: transformers' logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.engine.models.rope import rope_magnitude
from baton.model.artifact import ModelError, resolve_model
from baton.model.hf_config import _family_of
from baton.model.hf_keys import CONFIG_KEYS, DEFAULTS, FAMILY_KEYS
from baton.model.model_config import HF_FAMILIES, MODEL_TYPES, TEXT_TYPES
from tests.engine import tiny_models as tiny
from tests.engine.models.test_families import LENGTH, MAX_LOGIT_ERROR, error, logits_of

Config = dict[str, Any]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def edited(folder: Path, name: str, edit: Callable[[Config], object], **changes: Any) -> Path:
    """A tiny model whose ``config.json`` was edited by hand."""
    tiny.save(tiny.build(name, **changes), folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path) -> Any:
    """Return the configuration that transformers reads from the same folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def assert_equal_logits(folder: Path) -> None:
    tokens = tiny.tokens(LENGTH)
    assert error(logits_of(folder, tokens), loaded(folder), tokens) < MAX_LOGIT_ERROR


ALTERNATING = ["full_attention", "sliding_attention", "full_attention"]
EDITS: dict[str, tuple[str, Callable[[Config], object]]] = {
    "rope_scaling beside rope_parameters": (
        "qwen3",
        lambda c: c.update(rope_theta=10_000.0, rope_scaling={"type": "linear", "factor": 4.0}),
    ),
    "gemma3 with both": (
        "gemma3",
        lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    ),
    "original context at the top": (
        "qwen3",
        lambda c: c.update(
            rope_theta=10_000.0, rope_scaling=YARN, original_max_position_embeddings=64
        ),
    ),
    "mistral with layer types": ("mistral", lambda c: c.update(layer_types=ALTERNATING)),
    "ministral": (
        "mistral",
        lambda c: c.update(
            layer_types=ALTERNATING, model_type="ministral", architectures=["MinistralForCausalLM"]
        ),
    ),
    "no architecture": ("qwen3", lambda c: c.pop("architectures")),
    "architecture null": ("gemma3", lambda c: c.update(architectures=None)),
    "no eps, no context": (
        "llama",
        lambda c: (c.pop("rms_norm_eps"), c.pop("max_position_embeddings")),
    ),
    "no window": ("mistral", lambda c: c.pop("sliding_window")),
    "patterns of windows that the family does not read": (
        "gpt_oss",
        lambda c: c.update(layer_types=None, sliding_window_pattern=3),
    ),
    "a pattern of Gemma": (
        "gemma3",
        lambda c: c.update(layer_types=None, sliding_window_pattern=2, _sliding_window_pattern=3),
    ),
    "old theta": ("qwen2", lambda c: (c.pop("rope_parameters"), c.update(rope_theta=5e5))),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_config_gives_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    name, edit = EDITS[case]
    assert_equal_logits(edited(tmp_path / "model", name, edit))


def test_names_without_model_are_those_of_embedding_models(tmp_path: Path) -> None:
    model = tiny.build("qwen3", tie_word_embeddings=True)
    folder = tiny.save(model, tmp_path / "model")
    model.model.save_pretrained(tmp_path / "bare")
    bare = load_file(tmp_path / "bare" / "model.safetensors")
    assert "embed_tokens.weight" in bare
    save_file(bare, folder / "model.safetensors")
    assert_equal_logits(folder)

    untied = edited(tmp_path / "8B", "qwen3", lambda c: None)  # Qwen3-Embedding-8B has no head
    save_file(bare, untied / "model.safetensors")
    tokens = tiny.tokens(20)
    assert error(logits_of(untied, tokens), model, tokens) < MAX_LOGIT_ERROR


def test_a_head_that_differs_from_a_tied_embedding_is_used(tmp_path: Path) -> None:
    folder = edited(tmp_path / "model", "llama", lambda c: c.update(tie_word_embeddings=True))
    assert_equal_logits(folder)


def test_attn_factor_multiplies_yarns_magnitude(tmp_path: Path) -> None:
    rope = {**YARN, "rope_theta": 10_000.0, "attn_factor": 0.8782488562869419}
    folder = edited(tmp_path / "model", "qwen3", lambda c: c.update(rope_parameters=rope))
    assert rope_magnitude(resolve_model(str(folder)).config) == pytest.approx(1.0)


def test_the_table_has_every_key_and_default_of_transformers() -> None:
    classes = {kind: type(transformers.CONFIG_MAPPING[kind]()) for kind in DEFAULTS}
    assert set(MODEL_TYPES.values()) == set(HF_FAMILIES)
    assert {*MODEL_TYPES, *TEXT_TYPES.values()} >= set(DEFAULTS)
    for kind, config in classes.items():
        family = _family_of(kind)
        known = {*CONFIG_KEYS, *FAMILY_KEYS.get(family, {})}
        assert set(config().to_dict()) <= known
        fields = config.__dataclass_fields__
        for key, value in DEFAULTS[kind].items():
            theirs = fields[key].default if key in fields else getattr(config(), key)
            theirs = theirs["global"] if isinstance(theirs, dict) else theirs  # Gemma 3's base
            assert (kind, key, value) == (kind, key, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {**YARN, "beta_medium": 3.0}}, "RoPE: beta_medium = 3.0"),
        ({"rope_scaling": {**YARN, "extrapolation_factor": 2.0}}, "extrapolation_factor = 2.0"),
        (
            {"rope_scaling": {**YARN, "attn_factor": 0.9, "attention_factor": 1.1}},
            "both attn_factor and attention_factor",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}},
            "rope_scaling hides the base; add rope_theta: 1000000.0",
        ),
        ({"rope_parameters": {"rope_type": "mrope"}}, "RoPE scaling 'mrope'"),
        ({"is_causal": False}, "is_causal = False is not supported"),
    ],
)
def test_rope_that_is_unknown_or_ambiguous_is_refused_by_name(
    tmp_path: Path, change: Config, message: str
) -> None:
    folder = edited(tmp_path / "model", "qwen3", lambda c: c.update(change))
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


def test_rope_of_gemma_that_transformers_ignores_is_refused(tmp_path: Path) -> None:
    flat = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}}
    folder = edited(tmp_path / "model", "gemma3", lambda c: c.update(flat))
    with pytest.raises(ModelError, match="must have the keys full_attention and sliding_attention"):
        resolve_model(str(folder))


def test_a_key_of_other_tools_passes_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = edited(tmp_path / "model", "llama", lambda c: c.update(trained_by="a tool"))
    resolve_model(str(folder))
    assert "trained_by" in caplog.text
    assert "hidden_size" not in caplog.text
