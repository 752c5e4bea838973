"""Configuration of a decoder-only transformer, and the supported families.

The readers ``hf_config.py`` and ``gguf_config.py`` create a ``ModelConfig`` and reject unsupported
settings by name. No torch.
"""

import math
from dataclasses import dataclass
from typing import Any

# family, `model_type`, architecture; of models with images `model_type` of the decoder
_NAMES = """
    llama     llama       LlamaForCausalLM
    mistral   mistral     MistralForCausalLM
    mistral   ministral   MinistralForCausalLM
    qwen2     qwen2       Qwen2ForCausalLM
    qwen3     qwen3       Qwen3ForCausalLM
    gemma3    gemma3_text Gemma3ForCausalLM
    qwen3_moe qwen3_moe   Qwen3MoeForCausalLM
    smollm3   smollm3     SmolLM3ForCausalLM
    gpt_oss   gpt_oss     GptOssForCausalLM
    gemma3    gemma3      Gemma3ForConditionalGeneration     gemma3_text
    mistral   mistral3    Mistral3ForConditionalGeneration   mistral
    qwen2     qwen2_5_vl  Qwen2_5_VLForConditionalGeneration qwen2_5_vl_text
    qwen3     qwen3_vl    Qwen3VLForConditionalGeneration    qwen3_vl_text
"""
_ROWS = [line.split() for line in _NAMES.strip().splitlines()]
HF_FAMILIES = {row[2]: row[0] for row in _ROWS}
"""Architecture in ``config.json`` -> file in ``baton/engine/models``."""
MODEL_TYPES = {row[1]: row[2] for row in _ROWS}
"""``model_type`` -> architecture, for files that do not name it."""
TEXT_TYPES = {row[2]: row[3] for row in _ROWS if len(row) > 3}
"""Architectures with images -> ``model_type`` of the decoder in them."""
_SAME_IN_GGUF = ("llama", "qwen2", "qwen3", "gemma3", "smollm3")
GGUF_FAMILIES = dict(zip(_SAME_IN_GGUF, _SAME_IN_GGUF, strict=True))
GGUF_FAMILIES |= {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
"""``general.architecture`` of GGUF -> file in ``baton/engine/models``."""

_VLLM = "pools: {engine: vllm, vllm: {servers: [http://HOST:8000]}}"
_LLAMA_SERVER = "pools: {engine: llama-server, llama_server: {servers: [http://HOST:8080]}}"

ROPE_TYPES = ("linear", "llama3", "yarn")
"""Supported RoPE scalings (``default`` is no scaling)."""


class ModelError(ValueError):
    """The model cannot be served: missing, incomplete, or not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and options that define a decoder-only transformer.

    Attributes:
        family: File in ``baton/engine/models`` that describes its layers.
        intermediate_size: Width of the feed-forward part, or of one expert in a mixture.
        rope_scaling: Options with Hugging Face's names: ``rope_type`` (one of ``ROPE_TYPES``),
            ``factor`` ...
        local_rope_theta: RoPE base of layers with a window if it differs; never scaled.
        rope_layers: Whether each layer rotates Q and K; empty if all do.
        layer_windows: Number of keys that a query sees in each layer, its own included; ``None``
            for all. Empty if no layer has a window.
        query_scale: Factor of attention scores, if not ``1 / sqrt(head_dim)``.
        experts_per_token: Experts that compute each token.
        normalise_experts: Whether the weights of these experts add up to one.
    """

    family: str = "llama"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    local_rope_theta: float | None = None
    rope_layers: tuple[bool, ...] = ()
    layer_windows: tuple[int | None, ...] = ()
    query_scale: float | None = None
    rms_norm_eps: float
    num_experts: int = 0
    experts_per_token: int = 0
    normalise_experts: bool = False
    max_context_tokens: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def window(self) -> int | None:
        """Smallest window of any layer."""
        return min((w for w in self.layer_windows if w is not None), default=None)


def refuse_family(where: str, architecture: str, known: dict[str, str]) -> None:
    """Raise ``ModelError`` unless the architecture is in ``known``."""
    if architecture not in known:
        raise ModelError(
            f"{where} is not supported (supported: {', '.join(sorted(known))}). Other engines may "
            f"serve it, in the fleet file: `numerics: fast` and `{_VLLM}` or `{_LLAMA_SERVER}`"
        )


def refuse_rope(where: str, kind: str) -> None:
    """Raise ``ModelError`` unless the RoPE scaling is supported."""
    if kind not in ("default", *ROPE_TYPES):
        supported = ", ".join(ROPE_TYPES)
        raise ModelError(f"{where}: RoPE scaling {kind!r} is not supported (only {supported})")


_MOST = 1 << 24  # limit of other counts
_ROPE_NUMBERS: dict[Any, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_ROPE_FACTORS = ("attention_factor", "attn_factor")
_ROPE_OPTIONS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", *_ROPE_FACTORS)
_MOST_LAYERS = _MOST_EXPERTS = 4096
_MOST_EXPERTS_IN_ALL = 1 << 17


def refuse_numbers(where: str, config: ModelConfig) -> None:
    """Raise ``ModelError`` unless the numbers are those of a possible model."""
    c = config
    counts = {
        "num_layers": (1, c.num_layers, _MOST_LAYERS),
        "num_kv_heads": (1, c.num_kv_heads, c.num_heads),
        "num_experts": (0, c.num_experts, _MOST_EXPERTS),
        "experts_per_token": (min(c.num_experts, 1), c.experts_per_token, c.num_experts),
        "sliding window": (1, 1 if c.window is None else c.window, _MOST),
    }
    names = ("hidden_size", "num_heads", "head_dim", "intermediate_size", "vocab_size")
    counts |= {name: (1, getattr(c, name), _MOST) for name in (*names, "max_context_tokens")}
    for name, (least, value, most) in counts.items():
        if not least <= value <= most:
            raise ModelError(f"{where}: {name} = {value} must be from {least} to {most}")
    if c.num_heads % c.num_kv_heads:
        raise ModelError(f"{where}: {c.num_heads} heads cannot share {c.num_kv_heads} KV heads")
    if c.head_dim % 2:
        raise ModelError(f"{where}: head_dim = {c.head_dim} must be even")
    if c.num_layers * c.num_experts > _MOST_EXPERTS_IN_ALL:
        raise ModelError(f"{where}: {c.num_layers} layers of {c.num_experts} experts are too many")
    for name, by_layer in (("windows", c.layer_windows), ("RoPE", c.rope_layers)):
        if len(by_layer) not in (0, c.num_layers):
            raise ModelError(f"{where}: {name} for {len(by_layer)} layers, not {c.num_layers}")
    _refuse_reals(where, c)
    _refuse_tokens(where, c)


def _refuse_reals(where: str, c: ModelConfig) -> None:
    scaling = c.rope_scaling or {}
    needed = _ROPE_NUMBERS.get(scaling.get("rope_type"), ())
    options = [name for name in _ROPE_OPTIONS if scaling.get(name)]
    reals = {name: float(scaling[name]) for name in (*needed, *options)}
    reals |= {"rope_theta": c.rope_theta, "rms_norm_eps": c.rms_norm_eps}
    optional = {"local RoPE base": c.local_rope_theta, "query scale": c.query_scale}
    reals |= {name: real for name, real in optional.items() if real is not None}
    for name, real in reals.items():
        if not 0.0 < real < math.inf:
            raise ModelError(f"{where}: {name} = {real} must be positive")
    if (
        scaling.get("rope_type") == "llama3"
        and reals["high_freq_factor"] <= reals["low_freq_factor"]
    ):
        raise ModelError(f"{where}: high_freq_factor must be greater than low_freq_factor")
    if scaling.get("rope_type") == "yarn" and c.rope_theta <= 1.0:
        raise ModelError(f"{where}: rope_theta = {c.rope_theta} must be greater than 1")


def _refuse_tokens(where: str, c: ModelConfig) -> None:
    begin = () if c.bos_token_id is None else (c.bos_token_id,)
    for name, tokens in (("begin", begin), ("end", c.eos_token_ids)):
        for token in tokens:
            if type(token) is not int or not 0 <= token < c.vocab_size:
                raise ModelError(
                    f"{where}: {name} token {token!r} must be a number from 0 to {c.vocab_size - 1}"
                )


def windows(window: int | None, local: list[bool]) -> tuple[int | None, ...]:
    """Return ``ModelConfig.layer_windows`` for the layers that are ``local``."""
    if window is None or not any(local):
        return ()
    return tuple(window if is_local else None for is_local in local)
