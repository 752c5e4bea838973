"""The numbers of a decoder-only transformer, and the names of what can be served.

Both readers, ``hf_config.py`` and ``gguf_config.py``, make a ``ModelConfig``; what they cannot put
into one, or what the engine does not compute, they refuse by name. No torch here.
"""

from dataclasses import dataclass
from typing import Any

HF_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Architecture as ``config.json`` names it, and the file in ``engine/models`` that serves it."""

GGUF_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "qwen3moe": "qwen3_moe",
}
"""The same for ``general.architecture``."""

ROPE_TYPES = ("linear", "llama3", "yarn")
"""RoPE scalings that are computed (``default`` is no scaling)."""


class ModelError(ValueError):
    """The model cannot be served: not found, not complete, or of a kind that is not supported.

    The message names the file, the architecture, dtype or quantisation, and what is missing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers that define a decoder-only transformer.

    Attributes:
        family: The file in ``engine/models`` that describes its layers.
        intermediate_size: Width of the feed-forward part; of one expert in a mixture.
        rope_theta: RoPE base.
        rope_scaling: Hugging Face's names: ``rope_type`` (one of ``ROPE_TYPES``), ``factor`` ...
        local_rope_theta: RoPE base of the layers with a window, if it is another; never scaled.
        layer_windows: For each layer how many keys a query sees, its own included; ``None`` is
            all. Empty: no layer has a window.
        query_scale: What scores are multiplied with, if not ``1 / sqrt(head_dim)``.
        num_experts: Experts per layer; 0 is no mixture.
        experts_per_token: How many of them compute a token.
        normalise_experts: Whether the weights of these add up to one.
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
        """The smallest window of any layer."""
        return min((w for w in self.layer_windows if w is not None), default=None)


def refuse_family(where: str, architecture: str, known: dict[str, str]) -> None:
    """Raise unless the architecture is one of ``known``.

    Raises:
        ModelError: It names what is supported.
    """
    if architecture not in known:
        raise ModelError(f"{where} is not supported (supported: {', '.join(sorted(known))})")


def refuse_rope(where: str, kind: str) -> None:
    """Raise unless the RoPE scaling is computed.

    Raises:
        ModelError: It names the scaling and those that are supported.
    """
    if kind not in ("default", *ROPE_TYPES):
        supported = ", ".join(ROPE_TYPES)
        raise ModelError(f"{where}: RoPE scaling {kind!r} is not supported (only {supported})")


def windows(window: int | None, local: list[bool]) -> tuple[int | None, ...]:
    """``ModelConfig.layer_windows`` for the layers that are ``local``."""
    if window is None or not any(local):
        return ()
    return tuple(window if is_local else None for is_local in local)
