"""``ModelConfig`` from the JSON files of a Hugging Face directory.

Missing keys have the defaults of transformers for the family.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.model.hf_keys import DEFAULTS, refuse_keys, refuse_rope_keys
from baton.model.model_config import (
    HF_FAMILIES,
    MODEL_TYPES,
    TEXT_TYPES,
    ModelConfig,
    ModelError,
    refuse_family,
    refuse_rope,
    windows,
)

_MOST_BYTES = 1 << 27
_OPTIONAL_WINDOW = ("qwen2", "qwen3", "qwen3_moe", "smollm3")  # only with use_sliding_window
_PATTERNS = {"gemma3": 6, "gpt_oss": 2}  # each sixth, or second, layer has no window
_SLIDING = "sliding_attention"
_FULL = "full_attention"
_KINDS = (_FULL, _SLIDING)
_ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh"}
_DEFAULTS_OF = {"gemma3": "gemma3_text"}
_TIED_WRAPPERS = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
_SHARED = ("bos_token_id", "eos_token_id", "quantization_config")  # with images, at the top


def read_text(path: Path) -> str:
    """Return the text of a file; raise ``ModelError`` if it is no regular one, or too large."""
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:  # a pipe may never end
        raise ModelError(f"{path}: must be a regular file of at most {_MOST_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as text ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file does not exist."""
    if not path.exists():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must contain a JSON object")
    return value


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Return the architecture in ``config.json``, or that of its ``model_type``."""
    if names := raw.get("architectures"):
        return str(names[0])
    kind = str(raw.get("model_type", "unknown"))
    return MODEL_TYPES.get(kind, kind)


def text_part(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the keys of the decoder: of models with images those of ``text_config``."""
    nested = raw.get("text_config")
    is_nested = architecture in TEXT_TYPES or "num_attention_heads" not in raw
    if not is_nested or not isinstance(nested, Mapping):
        return dict(raw)
    shared = {key: raw[key] for key in _SHARED if raw.get(key) is not None}
    is_tied = raw.get("tie_word_embeddings", architecture in _TIED_WRAPPERS)
    return {**shared, **nested, "tie_word_embeddings": is_tied or nested.get("tie_word_embeddings")}


def _family_of(kind: str) -> str:
    """Return the family of a ``model_type``, also of a decoder in a model with images."""
    wrappers = [name for name, decoder in TEXT_TYPES.items() if decoder == kind]
    return HF_FAMILIES.get(MODEL_TYPES.get(kind, (wrappers or [kind])[0]), "")


def read_config(
    folder: Path, raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str
) -> ModelConfig:
    """Return the configuration of a model; unknown architectures are read like Llama.

    ``raw`` are the keys of its ``text_part``. The end tokens in ``generation``
    (``generation_config.json``) take precedence.
    """
    family = HF_FAMILIES.get(architecture, "llama")
    missing = DEFAULTS[TEXT_TYPES.get(architecture, _DEFAULTS_OF.get(family, family))]
    try:
        return _config({**missing, **raw}, generation, family)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'}: missing or wrong value: {error}") from error


def _config(raw: Mapping[str, Any], generation: Mapping[str, Any], family: str) -> ModelConfig:
    heads = int(raw["num_attention_heads"])
    layers = int(raw["num_hidden_layers"])
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    theta, scaling, local_theta = _rope(raw, family)
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    mixture = family in ("qwen3_moe", "gpt_oss")
    scalar = raw["query_pre_attn_scalar"] if family == "gemma3" else head_dim
    return ModelConfig(
        family=family,
        hidden_size=int(raw["hidden_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        intermediate_size=int(
            raw["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"]
        ),
        vocab_size=int(raw["vocab_size"]),
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local_theta,
        rope_layers=_rope_layers(raw, layers) if family == "smollm3" else (),
        layer_windows=_layer_windows(raw, family, layers),
        query_scale=None if scalar == head_dim else float(scalar) ** -0.5,
        rms_norm_eps=float(raw["rms_norm_eps"]),
        num_experts=int(raw.get("num_experts") or raw["num_local_experts"]) if mixture else 0,
        experts_per_token=int(raw["num_experts_per_tok"]) if mixture else 0,
        normalise_experts=family == "gpt_oss" or (mixture and bool(raw.get("norm_topk_prob"))),
        max_context_tokens=_context(int(raw["max_position_embeddings"]), scaling),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _context(trained: int, scaling: Mapping[str, Any] | None) -> int:
    """Return the context limit, scaled if YaRN was enabled after training."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return trained
    original = int(scaling["original_max_position_embeddings"])
    return max(trained, int(original * float(scaling["factor"])))


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_scaling``, which takes precedence, or ``rope_parameters`` (transformers 5)."""
    new = dict(raw.get("rope_parameters") or {})
    old = dict(raw.get("rope_scaling") or {})
    if not new.keys().isdisjoint(_KINDS):  # Gemma 3: `rope_scaling` is of layers without a window
        return {**new, _FULL: {**(new.get(_FULL) or {}), **old}}
    return old or new


def _rope(raw: Mapping[str, Any], family: str) -> tuple[float, dict[str, Any] | None, float | None]:
    """Return the RoPE base, scaling, and the base of layers with a window."""
    rope = _rope_parameters(raw)
    local = None
    if family == "gemma3":
        local_rope = dict(rope.get(_SLIDING) or {})
        rope = dict(rope.get(_FULL) or {}) if _FULL in rope or _SLIDING in rope else rope
        local = float(local_rope.get("rope_theta") or raw.get("rope_local_base_freq") or 10_000.0)
    theta = float(rope.pop("rope_theta", None) or raw.get("rope_theta") or raw["default_theta"])
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    if kind in ("default", "mrope"):
        return theta, None, local
    if kind in ("yarn", "llama3"):
        trained = raw["max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", trained)
        if original := raw.get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = original
    return theta, {**rope, "rope_type": kind}, local


def _rope_layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    interval = int(raw["no_rope_layer_interval"])
    stated = raw.get("no_rope_layers")  # 1: this layer has RoPE
    return tuple(map(bool, stated or [(i + 1) % interval for i in range(layers)]))


def _layer_windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    switched_off = family in _OPTIONAL_WINDOW and not raw.get("use_sliding_window")
    if window is None or switched_off or family == "llama":
        return ()
    types = raw.get("layer_types")
    if types is not None and family != "qwen3_moe":
        local = [kind == _SLIDING for kind in types]
    elif family in ("mistral", "qwen3_moe"):
        local = [True] * layers
    elif family == "smollm3":
        local = [not has_rope for has_rope in _rope_layers(raw, layers)]
    elif family in _PATTERNS:
        stated = raw.get("sliding_window_pattern") if family == "gemma3" else None
        pattern = int(stated or _PATTERNS[family])
        local = [bool((i + 1) % pattern) for i in range(layers)]
    else:
        local = [i >= int(raw["max_window_layers"]) for i in range(layers)]
    if len(local) != layers:
        raise ValueError(f"layer_types has {len(local)} layers, not {layers}")
    return windows(int(window), local)


def refuse_unsupported(folder: Path, architecture: str, raw: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` if ``config.json`` requires what the engine does not compute."""
    where = f"{folder}: architecture {architecture}"
    refuse_family(where, architecture, HF_FAMILIES)
    family = HF_FAMILIES[architecture]
    kind = str(raw.get("model_type", family))
    if architecture in TEXT_TYPES and family not in (kind, _family_of(kind)):
        raise ModelError(f"{where}: decoder {kind!r} is not supported")
    needed = _ACTIVATIONS.get(family, "silu")
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or needed
    if activation != needed:
        raise ModelError(f"{where}: activation {activation!r} is not supported (only {needed!r})")
    refuse_keys(where, raw, family)
    for kind in raw.get("layer_types") or ():
        if kind not in _KINDS:
            raise ModelError(f"{where}: layer type {kind!r} is not supported")
    rope = _rope_parameters(raw)
    nested = [rope.get(kind) or {} for kind in _KINDS if kind in rope]
    for part in nested or [rope]:
        kind = part.get("rope_type") or part.get("type") or "default"
        if kind != "mrope" or architecture not in TEXT_TYPES:
            refuse_rope(where, kind)
        refuse_rope_keys(where, part)
    hidden = (raw.get("rope_parameters") or {}).get("rope_theta")
    if hidden and not rope.get("rope_theta") and not raw.get("rope_theta"):
        # transformers takes its default base then, with which the model writes nonsense
        raise ModelError(f"{where}: rope_scaling hides the base; add rope_theta: {hidden} to it")
    if family == "gpt_oss" and not rope:
        raise ModelError(f"{where}: rope_scaling is missing")
    if family == "gemma3" and raw.get("rope_parameters") and rope.keys().isdisjoint(_KINDS):
        raise ModelError(f"{where}: rope_parameters must have the keys {_FULL} and {_SLIDING}")
    local = rope.get(_SLIDING) or {}
    if (kind := local.get("rope_type", "default")) != "default":
        raise ModelError(f"{where}: RoPE scaling {kind!r} of layers with a window is not supported")
