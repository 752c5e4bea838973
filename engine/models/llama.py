"""The Llama family: which weights it has, what they are called elsewhere, and its forward pass.

    T rows of a step, E hidden size, H query heads, K KV heads, D head dim, F feed-forward size,
    L layers, V vocabulary

RoPE pairs are kept adjacent ``(x0, x1), (x2, x3), ...``, as in the original weights and in GGUF, so
that rotation is one complex product. Hugging Face stores Q and K with the pairs split in halves;
``pair_rows`` turns one into the other. K in the pool is in the adjacent order too.
"""

# ruff: noqa: N803, N806 - suffixes such as q_THD give shapes

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from engine.linear import Linear, PackFn, plain
from engine.sampling import Logits
from engine.text.artifact import ModelConfig

ROPE_ORDER = "adjacent"
REFINED = 32  # logits of each row that are computed in fp32

# canonical name -> (GGUF name, Hugging Face name); {i} is the layer
GLOBAL_NAMES = {
    "embed": ("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "model.norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
}
LAYER_NAMES = {
    "attn_norm": ("blk.{i}.attn_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    "q": ("blk.{i}.attn_q.weight", "model.layers.{i}.self_attn.q_proj.weight"),
    "k": ("blk.{i}.attn_k.weight", "model.layers.{i}.self_attn.k_proj.weight"),
    "v": ("blk.{i}.attn_v.weight", "model.layers.{i}.self_attn.v_proj.weight"),
    "o": ("blk.{i}.attn_output.weight", "model.layers.{i}.self_attn.o_proj.weight"),
    "mlp_norm": ("blk.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    "gate": ("blk.{i}.ffn_gate.weight", "model.layers.{i}.mlp.gate_proj.weight"),
    "up": ("blk.{i}.ffn_up.weight", "model.layers.{i}.mlp.up_proj.weight"),
    "down": ("blk.{i}.ffn_down.weight", "model.layers.{i}.mlp.down_proj.weight"),
}
IGNORED = ("rotary_emb.inv_freq",)
ROPE_FACTORS = "rope_freqs.weight"  # GGUF's form of llama3 scaling: one divisor per pair


@dataclass(frozen=True, slots=True)
class WeightName:
    """One weight: its own name, its name in the artifact, and its shape."""

    name: str
    source: str
    shape: tuple[int, ...]


def weight_table(config: ModelConfig, file_format: str) -> list[WeightName]:
    """Every weight that the model needs, in the order of loading."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    e, f = c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (c.vocab_size, e),
        "final_norm": (e,),
        "head": (c.vocab_size, e),
        "attn_norm": (e,),
        "q": (q, e),
        "k": (kv, e),
        "v": (kv, e),
        "o": (e, q),
        "mlp_norm": (e,),
        "gate": (f, e),
        "up": (f, e),
        "down": (e, f),
    }
    column = 0 if file_format == "gguf" else 1
    table = [
        WeightName(name, names[column], shapes[name])
        for name, names in GLOBAL_NAMES.items()
        if not (name == "head" and c.tie_word_embeddings)
    ]
    for i in range(c.num_layers):
        table += [
            WeightName(f"layers.{i}.{name}", names[column].format(i=i), shapes[name])
            for name, names in LAYER_NAMES.items()
        ]
    return table


def pair_rows(weight_NE: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of Q or K from Hugging Face's split halves to adjacent pairs."""
    heads = weight_NE.shape[0] // head_dim
    split = weight_NE.view(heads, 2, head_dim // 2, -1)
    return split.transpose(1, 2).reshape(weight_NE.shape)


def unpair_rows(weight_NE: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of ``pair_rows``."""
    heads = weight_NE.shape[0] // head_dim
    pairs = weight_NE.view(heads, head_dim // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight_NE.shape)


def rope_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Angle per position of each pair, ``[D / 2]``, fp32, with the model's scaling applied."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if factors is not None:
        frequencies = frequencies / factors.float()
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    waves = 2 * math.pi / frequencies
    smooth = ((original / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


@dataclass(frozen=True, slots=True)
class _Layer:
    attn_norm: torch.Tensor
    qkv: Linear
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


AttentionFn = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(layer, q [T, H, D], kv [2, T, K, D]) -> [T, H * D]``; writes K and V first."""


class Llama:
    """A loaded model: packed weights and the forward pass.

    Args:
        config: The model's numbers.
        weights: By canonical name (``weight_table``); Q and K with adjacent pairs. Emptied while
            packing, so that the peak stays near one copy.
        dtype: ``bf16`` or ``fp32``, of weights and activations.
        pack: Makes a linear layer of a weight; it is told which one it is ("qkv", "head", ...).
        quantisation: What ``pack`` does to the weights, by name; part of the numerics id.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        dtype: torch.dtype,
        pack: PackFn = plain,
        quantisation: str = "",
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.quantisation = quantisation
        self._split = (
            config.num_heads * config.head_dim,
            (config.num_heads + config.num_kv_heads) * config.head_dim,
        )

        def linear(name: str, *parts: torch.Tensor) -> Linear:
            return pack(name, torch.cat(parts) if len(parts) > 1 else parts[0])

        factors = weights.pop("rope_factors", None)
        self._embed = weights.pop("embed")
        self._final_norm = weights.pop("final_norm").float()
        self._head_rows = weights.pop("head", self._embed)
        self._head = linear("head", self._head_rows)
        self._layers = []
        for i in range(config.num_layers):
            part = {name: weights.pop(f"layers.{i}.{name}") for name in LAYER_NAMES}
            layer = _Layer(
                attn_norm=part["attn_norm"].float(),
                qkv=linear("qkv", part["q"], part["k"], part["v"]),
                o=linear("o", part["o"]),
                mlp_norm=part["mlp_norm"].float(),
                gate_up=linear("gate_up", part["gate"], part["up"]),
                down=linear("down", part["down"]),
            )
            self._layers.append(layer)
        self._frequencies = rope_frequencies(config, factors)

    def linears(self) -> Mapping[str, Linear]:
        """One linear layer of each kind, for the self-test."""
        first = self._layers[0]
        names = ("qkv", "o", "gate_up", "down")
        return {"head": self._head, **{name: getattr(first, name) for name in names}}

    def rotation(self, positions_T: torch.Tensor) -> torch.Tensor:
        """``[T, 1, D / 2]`` complex: what RoPE multiplies the pairs with."""
        angles = positions_T.to(torch.float32).view(-1, 1, 1) * self._frequencies
        return torch.polar(torch.ones_like(angles), angles)

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionFn,
        on_layers_done: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """``[T, E]`` hidden rows after the last layer, before the final norm; always fp32.

        The sum over the layers is kept in fp32: that halves the error of bf16 at hardly any cost.

        Args:
            tokens_T: Token ids.
            positions_T: Their positions.
            attention: Writes K and V, and attends.
            on_layers_done: Called with 1, 2, ... as soon as that many layers' KV is written.
        """
        c, eps = self.config, self.config.rms_norm_eps
        shape_E = (c.hidden_size,)
        rows, dim = tokens_T.shape[0], c.head_dim
        q_end, k_end = self._split
        rotation = self.rotation(positions_T)
        x_TE = F.embedding(tokens_T, self._embed).float()
        for index, layer in enumerate(self._layers):
            h_TE = F.rms_norm(x_TE, shape_E, layer.attn_norm, eps).to(self.dtype)
            qkv = self._project(layer.qkv, index, "qkv", h_TE)
            pairs = torch.view_as_complex(qkv[:, :k_end].float().view(rows, -1, dim // 2, 2))
            rotated = torch.view_as_real(pairs * rotation).view(rows, k_end)
            qkv[:, :k_end] = rotated  # rounds to the model's dtype in the same pass
            kv = qkv[:, q_end:].view(rows, 2, c.num_kv_heads, dim).transpose(0, 1)
            q = qkv[:, :q_end].view(rows, c.num_heads, dim)
            a_TE = attention(index, q, kv)
            if on_layers_done is not None:
                on_layers_done(index + 1)
            x_TE += self._project(layer.o, index, "o", a_TE)
            h_TE = F.rms_norm(x_TE, shape_E, layer.mlp_norm, eps).to(self.dtype)
            gate_up = self._project(layer.gate_up, index, "gate_up", h_TE)
            f = c.intermediate_size
            act_TF = F.silu(gate_up[:, :f]).mul_(gate_up[:, f:])
            x_TE += self._project(layer.down, index, "down", act_TF)
        return x_TE

    def _project(self, linear: Linear, index: int, name: str, x_TE: torch.Tensor) -> torch.Tensor:
        """One linear layer of layer ``index``; every product of the layers goes through here."""
        return linear(x_TE)

    def logits(self, x_SE: torch.Tensor) -> Logits:
        """Logits of some rows of ``forward``'s result.

        A bf16 product rounds them to 1/8 (between 16 and 32), where ties are common; so the best
        are computed again in fp32, row by row.
        """
        eps = self.config.rms_norm_eps
        h_SE = F.rms_norm(x_SE, (self.config.hidden_size,), self._final_norm, eps)
        raw_SV = self._head(h_SE.to(self.dtype))
        if self.dtype == torch.float32:
            return Logits(raw_SV)
        ids_SC = raw_SV.topk(min(REFINED, raw_SV.shape[1]), dim=-1).indices
        rows = zip(F.embedding(ids_SC, self._head_rows).float(), h_SE, strict=True)
        return Logits(raw_SV, ids_SC, torch.stack([torch.mv(w_CE, h_E) for w_CE, h_E in rows]))
