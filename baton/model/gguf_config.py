"""``ModelConfig`` from the metadata of a GGUF file. Names and defaults are llama.cpp's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.model.gguf_tokens import end_tokens, token_id
from baton.model.hf_keys import HONOURED, NO_EFFECT, Rule, refuse_values
from baton.model.model_config import (
    GGUF_FAMILIES,
    ModelConfig,
    ModelError,
    refuse_family,
    refuse_rope,
    windows,
)

_GEMMA_LOCAL_THETA = 10_000.0
_PATTERNS = {"gemma3": 6, "gpt_oss": 2}  # each sixth, or second, layer has no window
_LAYERS_27B = 62
_NO_ROPE_STEP = 4  # each fourth layer of SmolLM3 has no RoPE
_MIXTURES = ("qwen3_moe", "gpt_oss")

_READ = """
    context_length embedding_length block_count feed_forward_length expert_feed_forward_length
    expert_count expert_used_count expert_weights_norm attention.head_count attention.head_count_kv
    attention.key_length attention.value_length attention.key_length_swa attention.value_length_swa
    attention.layer_norm_rms_epsilon attention.sliding_window attention.sliding_window_pattern
    rope.dimension_count rope.dimension_count_swa rope.freq_base rope.freq_base_swa
    rope.scale_linear rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
"""
_IGNORED = "vocab_size rope.scaling.finetuned rope.dimension_sections pooling_type"
_SCALES = "logit_scale residual_scale embedding_scale expert_weights_scale rope.scaling.alpha"
_OFF: tuple[Any, ...] = (0, "", [])
KEYS: Mapping[str, Rule] = {
    **dict.fromkeys(_READ.split(), HONOURED),
    **dict.fromkeys(_IGNORED.split(), NO_EFFECT),
    **dict.fromkeys(_SCALES.split(), (0.0, 1.0)),
    "attention.causal": (True,),
    "expert_gating_func": (0, 1, 3),  # which llama.cpp reads for none of the families
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
}
"""Keys of GGUF metadata behind the architecture's name; others are refused unless they are off."""
_WIDTHS = ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa")
_ROTATED = ("rope.dimension_count", "rope.dimension_count_swa")


def refuse_unsupported(path: Path, architecture: str, meta: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` if the metadata requires what the engine does not compute."""
    where = f"{path}: architecture {architecture}"
    refuse_family(where, architecture, GGUF_FAMILIES)
    if meta.get(f"{architecture}.expert_count") and GGUF_FAMILIES[architecture] not in _MIXTURES:
        raise ModelError(f"{where}: mixture of experts is not supported")
    refuse_rope(where, _rope_type(architecture, meta))
    own = f"{architecture}."
    read = {key.removeprefix(own): value for key, value in meta.items() if key.startswith(own)}
    refuse_values(where, read, KEYS, others=_OFF)
    for key in ("attention.head_count_kv", "feed_forward_length", "attention.head_count"):
        if isinstance(read.get(key), list):
            raise ModelError(f"{where}: {key} with different values per layer is not supported")
    base = read.get("rope.freq_base")
    local = read.get("rope.freq_base_swa", base)
    if local != base and GGUF_FAMILIES[architecture] != "gemma3":
        raise ModelError(f"{where}: rope.freq_base_swa = {local} is not supported")
    heads = int(read.get("attention.head_count", 1))
    dim = int(read.get("attention.key_length", int(read.get("embedding_length", 0)) // heads))
    for key in (*_WIDTHS, *_ROTATED):
        if (other := int(read.get(key, dim))) != dim:
            raise ModelError(f"{where}: {key} = {other} is not supported (heads are {dim} wide)")


def _rope_type(architecture: str, meta: Mapping[str, Any]) -> str:
    factor = _rope_factor(architecture, meta)
    default = "linear" if factor else "none"  # llama.cpp: a factor alone is linear scaling
    kind = str(meta.get(f"{architecture}.rope.scaling.type", default))
    return "default" if kind == "none" else kind


def _rope_factor(architecture: str, meta: Mapping[str, Any]) -> float:
    old = meta.get(f"{architecture}.rope.scale_linear", 0.0)
    return float(meta.get(f"{architecture}.rope.scaling.factor", old))


def read_config(
    path: Path, architecture: str, meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> ModelConfig:
    """Return the configuration of a model; unknown architectures are read like Llama.

    ``shapes`` are those of the tensors in GGUF's order (innermost first).
    """

    def value(key: str, default: Any = None) -> Any:
        raw = meta.get(f"{architecture}.{key}", default)
        if raw is None:
            raise ModelError(f"{path}: metadata {architecture}.{key} is missing")
        return raw

    if "token_embd.weight" not in shapes:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    family = GGUF_FAMILIES.get(architecture, "llama")
    heads = int(value("attention.head_count"))
    layers = int(value("block_count"))
    hidden = int(value("embedding_length"))
    head_dim = int(value("attention.key_length", hidden // heads))
    mixture = family in _MIXTURES
    gemma = family == "gemma3"
    scaling = _rope_scaling(architecture, meta)
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(value("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(
            value("expert_feed_forward_length" if mixture else "feed_forward_length")
        ),
        vocab_size=shapes["token_embd.weight"][-1],
        rope_theta=float(value("rope.freq_base", 10_000.0)),
        rope_scaling=scaling,
        local_rope_theta=float(value("rope.freq_base_swa", _GEMMA_LOCAL_THETA)) if gemma else None,
        rope_layers=tuple((i + 1) % _NO_ROPE_STEP != 0 for i in range(layers))
        if family == "smollm3"
        else (),
        layer_windows=_layer_windows(architecture, meta, layers, _PATTERNS.get(family)),
        # which GGUF lacks; like llama.cpp, detect Gemma's 27B by its layers
        query_scale=(hidden / heads) ** -0.5 if gemma and layers == _LAYERS_27B else None,
        # kept as written: float32(1e-5), which is 9.999999747378752e-06 in a double
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        num_experts=int(value("expert_count")) if mixture else 0,
        experts_per_token=int(value("expert_used_count")) if mixture else 0,
        normalise_experts=family == "gpt_oss"
        or (mixture and bool(value("expert_weights_norm", True))),
        max_context_tokens=int(value("context_length")),
        tie_word_embeddings="output.weight" not in shapes,
        bos_token_id=token_id(meta, "bos"),
        eos_token_ids=end_tokens(meta, shapes["token_embd.weight"][-1]),
    )


def _layer_windows(
    architecture: str, meta: Mapping[str, Any], layers: int, usual: int | None
) -> tuple[int | None, ...]:
    if usual is None:
        return ()
    window = int(meta.get(f"{architecture}.attention.sliding_window", 0)) or None
    pattern = meta.get(f"{architecture}.attention.sliding_window_pattern", usual)
    if isinstance(pattern, list):
        return windows(window, [bool(local) for local in pattern])
    return windows(window, [bool((i + 1) % int(pattern)) for i in range(layers)])


def _rope_scaling(architecture: str, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return RoPE scaling with Hugging Face's names; llama3 scaling is a tensor instead."""
    kind = _rope_type(architecture, meta)
    if kind not in ("linear", "yarn"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _rope_factor(architecture, meta) or 1.0}
    if kind == "yarn":
        stem = f"{architecture}.rope.scaling"
        trained = meta.get(f"{architecture}.context_length", 0)
        original = int(meta.get(f"{stem}.original_context_length", trained))
        scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (value := meta.get(f"{stem}.yarn_{name}")) is not None:
                scaling[name] = float(value)
    return scaling
