"""``ModelConfig`` from the JSON files of a Hugging Face directory.

Missing keys have the defaults of transformers for the family.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.model.model_config import (
    HF_FAMILIES,
    ModelConfig,
    ModelError,
    refuse_family,
    refuse_rope,
    windows,
)

_HEAD_DIM = {"gemma3": 256, "qwen3": 128}
_WINDOW = {"gemma3": 4096, "mistral": 4096}
_OPTIONAL_WINDOW = ("qwen2", "qwen3", "qwen3_moe")  # only with use_sliding_window
_GEMMA_PATTERN = 6  # each sixth layer has no window
_SLIDING = "sliding_attention"
_FULL = "full_attention"
_ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh"}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file does not exist."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must contain a JSON object")
    return value


def read_config(
    folder: Path, raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str
) -> ModelConfig:
    """Return the configuration of a model; unknown architectures are read like Llama.

    The end tokens in ``generation`` (``generation_config.json``) take precedence.
    """
    family = HF_FAMILIES.get(architecture, "llama")
    try:
        return _config(raw, generation, family)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'}: missing or wrong value: {error}") from error


def _config(raw: Mapping[str, Any], generation: Mapping[str, Any], family: str) -> ModelConfig:
    heads = int(raw["num_attention_heads"])
    layers = int(raw["num_hidden_layers"])
    head_dim = raw.get("head_dim") or _HEAD_DIM.get(family) or raw["hidden_size"] // heads
    theta, scaling, local_theta = _rope(raw, family)
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    mixture = family == "qwen3_moe"
    scalar = raw.get("query_pre_attn_scalar", 256) if family == "gemma3" else head_dim
    return ModelConfig(
        family=family,
        hidden_size=int(raw["hidden_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        intermediate_size=int(raw["moe_intermediate_size" if mixture else "intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local_theta,
        layer_windows=_layer_windows(raw, family, layers),
        query_scale=None if scalar == head_dim else float(scalar) ** -0.5,
        rms_norm_eps=float(raw["rms_norm_eps"]),
        num_experts=int(_first(raw, "num_experts", "num_local_experts")) if mixture else 0,
        experts_per_token=int(raw["num_experts_per_tok"]) if mixture else 0,
        normalise_experts=mixture and bool(raw.get("norm_topk_prob", False)),
        max_context_tokens=_context(int(raw["max_position_embeddings"]), scaling),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family == "gemma3")),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _first(raw: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if key in raw:
            return raw[key]
    raise KeyError(keys[0])


def _context(trained: int, scaling: Mapping[str, Any] | None) -> int:
    """Return the context limit, scaled if YaRN was enabled after training."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return trained
    original = int(scaling["original_max_position_embeddings"])
    return max(trained, int(original * float(scaling["factor"])))


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` (transformers 5) or ``rope_scaling`` (older versions)."""
    return dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})


def _rope(raw: Mapping[str, Any], family: str) -> tuple[float, dict[str, Any] | None, float | None]:
    """Return the RoPE base, scaling, and the base of layers with a window."""
    rope = _rope_parameters(raw)
    local = None
    default = 10_000.0
    if family == "gemma3":
        default = 1_000_000.0
        local_rope = dict(rope.get(_SLIDING) or {})
        rope = dict(rope.get(_FULL) or {}) if _FULL in rope or _SLIDING in rope else rope
        local = float(local_rope.get("rope_theta") or raw.get("rope_local_base_freq") or 10_000.0)
    theta = float(rope.pop("rope_theta", None) or raw.get("rope_theta") or default)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    if kind == "default":
        return theta, None, local
    if kind in ("yarn", "llama3"):
        trained = raw["max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", trained)
    return theta, {**rope, "rope_type": kind}, local


def _layer_windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", _WINDOW.get(family))
    switched_off = family in _OPTIONAL_WINDOW and not raw.get("use_sliding_window")
    if window is None or switched_off or family == "llama":
        return ()
    types = raw.get("layer_types")
    if family in ("mistral", "qwen3_moe"):
        local = [True] * layers
    elif types is not None:
        local = [kind == _SLIDING for kind in types]
    elif family == "gemma3":
        pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern")
        local = [bool((i + 1) % int(pattern or _GEMMA_PATTERN)) for i in range(layers)]
    else:
        local = [i >= int(raw.get("max_window_layers", 28)) for i in range(layers)]
    if len(local) != layers:
        raise ValueError(f"layer_types has {len(local)} layers, not {layers}")
    return windows(int(window), local)


def refuse_unsupported(folder: Path, architecture: str, raw: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` if ``config.json`` requires what the engine does not compute."""
    where = f"{folder}: architecture {architecture}"
    refuse_family(where, architecture, HF_FAMILIES)
    family = HF_FAMILIES[architecture]
    if quantisation := raw.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown")
        raise ModelError(f"{where}: quantisation {method!r} of safetensors is not supported")
    needed = _ACTIVATIONS.get(family, "silu")
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or needed
    if activation != needed:
        raise ModelError(f"{where}: activation {activation!r} is not supported (only {needed!r})")
    for key, harmless in _HARMLESS.items():
        if raw.get(key, harmless) not in (harmless, None):
            raise ModelError(f"{where}: {key} = {raw[key]!r} is not supported")
    for kind in raw.get("layer_types") or ():
        if kind not in (_SLIDING, _FULL):
            raise ModelError(f"{where}: layer type {kind!r} is not supported")
    rope = _rope_parameters(raw)
    for part in (rope, rope.get(_FULL) or {}, rope.get(_SLIDING) or {}):
        refuse_rope(where, part.get("rope_type") or part.get("type") or "default")
        if part.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{where}: partial_rotary_factor is not supported")
    local = rope.get(_SLIDING) or {}
    if (kind := local.get("rope_type", "default")) != "default":
        raise ModelError(f"{where}: RoPE scaling {kind!r} of layers with a window is not supported")


# keys that change the computation, and their neutral values
_HARMLESS: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
