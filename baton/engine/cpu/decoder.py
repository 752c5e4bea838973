"""Decoder: building blocks and forward pass of every supported model family.

    T rows of a step, E hidden size, H query heads, K KV heads, D head dim, F feed-forward size,
    L layers, V vocabulary

The weights of a family determine the blocks of its layers (``baton/engine/models/family.py``).
RoPE pairs are adjacent here and in the pool, whatever the file format
(``baton/engine/models/rope.py``).
"""

# ruff: noqa: N803, N806 - suffixes such as q_THD give shapes

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from baton.engine.cpu.experts import Experts
from baton.engine.cpu.linear import Linear, PackFn, plain
from baton.engine.cpu.native.layers import LayerParts, NativeLayers, native_layers
from baton.engine.cpu.native.rows import NativeRows, finite_rows, native_rows
from baton.engine.cpu.parallel.shard import Shard
from baton.engine.cpu.rows import TorchRows
from baton.engine.models.families import FAMILIES
from baton.engine.models.layer import Deltas, LayerVectors, take_vectors
from baton.engine.models.rope import (
    has_other_frequencies,
    other_frequencies,
    rope_frequencies,
    rope_magnitude,
)
from baton.engine.sampling.sample import Logits
from baton.model.artifact import ModelConfig

REFINED = 32  # logits of each row that are computed again in fp32


@dataclass(frozen=True, slots=True)
class _Layer:
    vectors: LayerVectors
    qkv: Linear
    o: Linear
    mlp: "_Dense | Experts"
    frequencies: int  # index into the model's


@dataclass(frozen=True, slots=True)
class _Dense:
    gate_up: Linear
    down: Linear


AttentionFn = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(layer, q [T, H, D], kv [2, T, K, D]) -> [T, H * D]``; stores K and V first."""


class Decoder:
    """A loaded model: packed weights and the forward pass.

    Args:
        weights: Tensors by canonical name (``families.weight_table``); Q and K with adjacent pairs.
            Emptied while packing, so that the peak stays near one copy.
        dtype: ``bf16`` or ``fp32``, of weights and activations.
        quantisation: Name of the quantisation in ``pack``; part of the numerics id.
        shard: This rank's part of a tensor-parallel model; ``weights`` are cut to it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: MutableMapping[str, torch.Tensor],
        dtype: torch.dtype,
        pack: PackFn = plain,
        quantisation: str = "",
        shard: Shard | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.shard = shard
        self.local = config if shard is None else shard.local(config)
        self.quantisation = quantisation
        self.deltas: Deltas | None = None  # LoRA deltas of the running step
        epsilon = config.rms_norm_eps
        native = native_rows(dtype, epsilon, (config.head_dim, config.hidden_size))
        self._rows: TorchRows = native or TorchRows(dtype, epsilon)  # the same on all ranks
        self._family = FAMILIES[config.family]
        self._split = (
            self.local.num_heads * config.head_dim,
            (self.local.num_heads + self.local.num_kv_heads) * config.head_dim,
        )
        other = other_frequencies(config)
        factors = weights.pop("rope_factors", None)
        self._frequencies = [rope_frequencies(config, factors)]
        self._magnitudes = [rope_magnitude(config)]
        if other is not None:
            self._frequencies.append(other)
            self._magnitudes.append(1.0)
        self._embed = weights.pop("embed")
        self._embed_scale = math.sqrt(config.hidden_size) if self._family.scale_embedding else 1.0
        self._final_norm = weights.pop("final_norm").float()
        self._head_rows = weights.pop("head", self._embed)
        head = self._head_rows if shard is None else shard.head_part(self._head_rows)
        self._head = pack("head", head)
        self._layers = [self._layer(i, weights, pack) for i in range(config.num_layers)]
        sinks = [layer.vectors.sinks for layer in self._layers]
        self.sinks = [sink for sink in sinks if sink is not None]

    def _layer(
        self, index: int, weights: MutableMapping[str, torch.Tensor], pack: PackFn
    ) -> _Layer:
        c = self.config

        def linear(*names: str) -> Linear:
            parts = [weights.pop(f"layers.{index}.{name}") for name in names]
            weight = torch.cat(parts) if len(parts) > 1 else parts[0]
            parts.clear()
            return pack(names[0], weight)

        def bias(*names: str) -> torch.Tensor | None:
            parts = [weights.pop(f"layers.{index}.{name}_bias", None) for name in names]
            given = [part for part in parts if part is not None]
            return torch.cat(given) if given else None

        vectors = take_vectors(weights, index, self.local)
        mlp: _Dense | Experts
        if c.num_experts:
            stems = [f"experts.{j}." for j in range(c.num_experts)]
            biases = {"router": bias("router")}
            for stem in stems:
                biases[f"{stem}gate_up"] = bias(f"{stem}gate", f"{stem}up")
                biases[f"{stem}down"] = bias(f"{stem}down")
            mlp = Experts(
                router=linear("router"),
                gate_up=[linear(f"{stem}gate", f"{stem}up") for stem in stems],
                down=[linear(f"{stem}down") for stem in stems],
                chosen=c.experts_per_token,
                normalise=c.normalise_experts,
                biases=biases,
            )
        else:
            mlp = _Dense(linear("gate", "up"), linear("down"))
        return _Layer(
            vectors=vectors,
            qkv=linear("q", "k", "v"),
            o=linear("o"),
            mlp=mlp,
            frequencies=int(has_other_frequencies(c, index)),
        )

    def linears(self) -> Mapping[str, Linear]:
        """Return a linear layer of each kind, for the self-test."""
        first = self._layers[0]
        kinds = {"head": self._head, "qkv": first.qkv, "o": first.o}
        if isinstance(first.mlp, Experts):
            mlp = first.mlp
            return {**kinds, "router": mlp.router, "gate_up": mlp.gate_up[0], "down": mlp.down[0]}
        return {**kinds, "gate_up": first.mlp.gate_up, "down": first.mlp.down}

    def rotations(self, positions_T: torch.Tensor) -> list[torch.Tensor]:
        """Return the RoPE factors of the pairs: ``[T, 1, D / 2]`` complex for each base."""
        rotations = []
        for frequencies, magnitude in zip(self._frequencies, self._magnitudes, strict=True):
            angles = positions_T.to(torch.float32).view(-1, 1, 1) * frequencies
            rotations.append(torch.polar(torch.full_like(angles, magnitude), angles))
        return rotations

    def native_layers(self, attention: object) -> NativeLayers | None:
        """Return all layers as one native call over a pool, or ``None`` if a part is not native."""
        if not isinstance(self._rows, NativeRows) or self.shard is not None:
            return None
        parts = []
        for layer in self._layers:
            if isinstance(layer.mlp, Experts):
                return None
            linears = (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
            parts.append(LayerParts(linears, layer.vectors, layer.frequencies))
        is_gelu = self._family.activation != "silu"
        return native_layers(parts, attention, self.config.rms_norm_eps, is_gelu=is_gelu)

    def begin(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return the input of the layers: sum ``[T, E]`` fp32, its norm, and the rotations."""
        x_TE = self._embedding(tokens_T).float()
        if self._embed_scale != 1.0:
            x_TE *= self._embed_scale
        h_TE = self._rows.add_norm(x_TE, None, None, self._layers[0].vectors.attn_norm)
        return x_TE, h_TE, self.rotations(positions_T)

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionFn,
        on_layers_done: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Return ``[T, E]`` fp32: hidden rows after the last layer, before the final norm.

        The sum over the layers is kept in fp32, which halves the error of bf16 at hardly any cost.
        ``on_layers_done`` gets 1, 2, ... as soon as that many layers' KV is stored.
        """
        x_TE, h_TE, rotations = self.begin(tokens_T, positions_T)
        rows = self._rows
        following = [layer.vectors.attn_norm for layer in self._layers[1:]]
        for index, layer in enumerate(self._layers):
            q, kv = self._heads(layer, index, h_TE, rotations[layer.frequencies])
            a_TE = attention(index, q, kv)
            if on_layers_done is not None:
                on_layers_done(index + 1)
            o_TE = self._project(layer.o, index, "o", a_TE)
            if layer.vectors.o_bias is not None:
                o_TE = (o_TE.float() + layer.vectors.o_bias).to(self.dtype)
            h_TE = rows.add_norm(x_TE, o_TE, layer.vectors.attn_post_norm, layer.vectors.mlp_norm)
            m_TE = self._mlp(layer, index, h_TE)
            next_norm = following[index] if index < len(following) else None
            h_TE = rows.add_norm(x_TE, m_TE, layer.vectors.mlp_post_norm, next_norm)
        return x_TE

    def _heads(
        self, layer: _Layer, index: int, h_TE: torch.Tensor, rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Q ``[T, H, D]`` and K with V ``[2, T, K, D]``: biased, normed and rotated."""
        c = self.local
        rows = h_TE.shape[0]
        dim = self.config.head_dim
        q_end, k_end = self._split
        qkv = self._project(layer.qkv, index, "qkv", h_TE)
        bias = layer.vectors.qkv_bias
        norm = layer.vectors.head_norm
        self._rows.heads(qkv, k_end // dim, dim, bias, norm, rotation)
        kv = qkv[:, q_end:].view(rows, 2, c.num_kv_heads, dim).transpose(0, 1)
        return qkv[:, :q_end].view(rows, c.num_heads, dim), kv

    def _mlp(self, layer: _Layer, index: int, h_TE: torch.Tensor) -> torch.Tensor:
        """Compute the feed-forward part without norms, ``[T, E] -> [T, E]``."""
        mlp = layer.mlp
        if isinstance(mlp, Experts):
            return mlp(
                h_TE, self._gate, lambda linear, name, x: self._project(linear, index, name, x)
            )
        act_TF = self._gate(self._project(mlp.gate_up, index, "gate_up", h_TE))
        return self._project(mlp.down, index, "down", act_TF)

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._rows.gate(gate_up, self._family.activation)

    def _project(self, linear: Linear, index: int, name: str, x_TE: torch.Tensor) -> torch.Tensor:
        """Apply one linear layer; every product of the layers goes through here."""

        def product(x_TE: torch.Tensor) -> torch.Tensor:
            y_TN = linear(x_TE)
            if self.deltas is not None:
                self.deltas.apply(index, name, x_TE, y_TN)
            return y_TN

        return product(x_TE) if self.shard is None else self.shard.project(product, name, x_TE)

    def _embedding(self, tokens_T: torch.Tensor) -> torch.Tensor:
        if self.shard is None:
            return F.embedding(tokens_T, self._embed)
        return self.shard.embedding(tokens_T, self._embed)

    def _head_product(self, h_SE: torch.Tensor) -> torch.Tensor:
        return self._head(h_SE) if self.shard is None else self.shard.logits(self._head, h_SE)

    def follow_logits(self, rows: int) -> None:
        """Compute this rank's part of the leader's ``logits`` for so many rows."""
        self._head_product(torch.empty(rows, self.config.hidden_size, dtype=self.dtype))

    def normed(self, x_SE: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to rows of ``forward``'s result: ``[S, E]`` fp32."""
        return self._rows.norm_fp32(x_SE, self._final_norm)

    def logits(self, x_SE: torch.Tensor) -> Logits:
        """Return the logits of some rows of ``forward``'s result.

        A bf16 product rounds them to 1/8 (between 16 and 32), where ties are common, and an 8-bit
        head is coarser still. So the best are computed again in fp32, row by row.
        """
        h_SE = self.normed(x_SE)
        raw_SV = self._head_product(h_SE.to(self.dtype))
        if self.dtype == torch.float32 and not self.quantisation:
            return Logits(raw_SV, finite_rows=finite_rows)
        count = min(REFINED, raw_SV.shape[1])
        refined = self._rows.refine(raw_SV, h_SE, self._head_rows, count)
        return Logits(raw_SV, *refined, finite_rows)
