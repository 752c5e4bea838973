"""Description of a decoder family, and the list of its weights.

A family is data: the names of its weights in GGUF and Hugging Face files, and a few switches. Its
weights determine the forward pass (``baton/engine/cpu/decoder.py``): a family with ``q_bias`` has
biases, one with ``router`` is a mixture of experts.

    canonical name                  meaning
    attn_norm, mlp_norm             RMS norms before attention and before the feed-forward part
    attn_post_norm, mlp_post_norm   RMS norms after them, before the residual sum (Gemma 3)
    q, k, v, o, *_bias              projections of attention
    q_norm, k_norm                  RMS norms of each head, before RoPE (Qwen3, Gemma 3)
    gate, up, down                  the gated feed-forward part
    router, experts.J.gate ...      N gated feed-forward parts, J = 0 ... N - 1, and their router
    sinks                           score without a value of each query head (gpt-oss)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from baton.model.model_config import ModelConfig

Names = Mapping[str, tuple[str, str]]
"""Canonical name -> (GGUF name, Hugging Face name); ``{i}`` is the layer, ``{j}`` the expert."""

GLOBAL_NAMES: Names = {
    "embed": ("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "model.norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
}
IGNORED = ("rotary_emb.inv_freq",)
ROPE_FACTORS = "rope_freqs.weight"  # GGUF's form of llama3 scaling: one divisor per pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names and options of a decoder family.

    Attributes:
        gguf_pairs: Order of the RoPE pairs of Q and K in GGUF: llama.cpp's converter makes those of
            the Llama family adjacent and keeps the others in halves, as Hugging Face does.
        unit_norms: Norms multiply with ``1 + w``; safetensors contain ``w``, GGUF ``1 + w``.
        scale_embedding: Embeddings are multiplied with the square root of their width.
        joined_experts: Safetensors have all experts in one tensor, with inputs before outputs, and
            outputs of gate and up by turns.
    """

    name: str
    layer_names: Names
    gguf_pairs: Literal["adjacent", "halves"] = "halves"
    activation: Literal["silu", "gelu_tanh", "swiglu_clamped"] = "silu"
    unit_norms: bool = False
    scale_embedding: bool = False
    joined_experts: bool = False


@dataclass(frozen=True, slots=True)
class WeightName:
    """Weight: its canonical name, and its name and shape in the artifact.

    Attributes:
        part: Index in the artifact's first dimension, if all experts are in one tensor.
        turn: First output and step in that tensor, if others have outputs between these.
        pairs: Whether rows are in halves and must become adjacent (``baton.engine.models.rope``).
        add_one: Whether the artifact contains ``w`` where the model needs ``1 + w``.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    part: int | None = None
    turn: tuple[int, int] | None = None
    pairs: bool = False
    add_one: bool = False

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of this weight alone."""
        shape = self.shape if self.part is None else self.shape[1:]
        return shape if self.turn is None else (shape[-1] // self.turn[1], *shape[:-1])


def weights_of(family: Family, config: ModelConfig, file_format: str) -> list[WeightName]:
    """Return every weight that a model needs, in loading order."""
    column = 0 if file_format == "gguf" else 1
    halves = file_format != "gguf" or family.gguf_pairs == "halves"
    shapes = _shapes(config)

    def entry(name: str, kind: str, source: str, part: int | None = None) -> WeightName:
        shape = shapes[kind]
        turn = None
        if family.joined_experts and file_format != "gguf" and part is not None:
            turn = _TURNS.get(kind.removesuffix("_bias"), (0, 1))
            shape = (*shape[1:], shape[0] * turn[1])
        return WeightName(
            name,
            source,
            shape if part is None else (config.num_experts, *shape),
            part,
            turn,
            pairs=halves and kind in _PAIRED,
            add_one=family.unit_norms and file_format != "gguf" and kind.endswith("norm"),
        )

    table = [
        entry(name, name, names[column])
        for name, names in GLOBAL_NAMES.items()
        if not (name == "head" and config.tie_word_embeddings)
    ]
    for i in range(config.num_layers):
        for name, names in family.layer_names.items():
            for own, source, part in _instances(name, names[column], i, config.num_experts):
                table.append(entry(own, name.split(".")[-1], source, part))
    return table


def _instances(
    name: str, pattern: str, layer: int, experts: int
) -> Iterator[tuple[str, str, int | None]]:
    """Yield ``(canonical name, source, part)`` of a table row; several for experts."""
    if "{j}" not in name:
        yield f"layers.{layer}.{name}", pattern.format(i=layer), None
        return
    for j in range(experts):
        part = None if "{j}" in pattern else j
        yield f"layers.{layer}.{name.format(j=j)}", pattern.format(i=layer, j=j), part


_TURNS = {"gate": (0, 2), "up": (1, 2)}
_PAIRED = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    q = c.num_heads * c.head_dim
    kv = c.num_kv_heads * c.head_dim
    e = c.hidden_size
    f = c.intermediate_size
    return {
        "embed": (c.vocab_size, e),
        "final_norm": (e,),
        "head": (c.vocab_size, e),
        "attn_norm": (e,),
        "q": (q, e),
        "k": (kv, e),
        "v": (kv, e),
        "q_bias": (q,),
        "k_bias": (kv,),
        "v_bias": (kv,),
        "q_norm": (c.head_dim,),
        "k_norm": (c.head_dim,),
        "o": (e, q),
        "o_bias": (e,),
        "sinks": (c.num_heads,),
        "attn_post_norm": (e,),
        "mlp_norm": (e,),
        "router": (c.num_experts, e),
        "router_bias": (c.num_experts,),
        "gate_bias": (f,),
        "up_bias": (f,),
        "down_bias": (e,),
        "gate": (f, e),
        "up": (f, e),
        "down": (e, f),
        "mlp_post_norm": (e,),
    }
