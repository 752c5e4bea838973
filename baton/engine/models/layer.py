"""Parts of a layer that both backends' decoders share. Needs only torch."""

# ruff: noqa: N803 - suffixes such as x_TE give shapes

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Deltas(Protocol):
    """Contribution of a step's adapters to the layers' products."""

    def apply(self, layer: int, name: str, x_TE: torch.Tensor, y_TN: torch.Tensor) -> None:
        """Add the deltas of product ``name`` to ``y_TN`` for the inputs ``x_TE``."""


class HeadShape(Protocol):
    """Shape of a layer's attention heads."""

    @property
    def num_heads(self) -> int:
        """Number of query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""

    @property
    def head_dim(self) -> int:
        """Number of elements per head."""

    @property
    def query_scale(self) -> float | None:
        """Factor of attention scores, if not ``1 / sqrt(head_dim)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVectors:
    """Norms and biases of a layer, in fp32; ``None`` if the family has none."""

    attn_norm: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None  # [H + K, D], for Q and K
    attn_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp_post_norm: torch.Tensor | None
    o_bias: torch.Tensor | None
    sinks: torch.Tensor | None  # [H]


def take_vectors(
    weights: MutableMapping[str, torch.Tensor],
    index: int,
    heads: HeadShape,
    place: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
) -> LayerVectors:
    """Take the norms and biases of layer ``index`` out of the model's weights.

    ``heads`` are the heads of this rank; ``place`` converts a vector to fp32 on the device.
    """

    def take(name: str) -> torch.Tensor | None:
        vector = weights.pop(f"layers.{index}.{name}", None)
        return None if vector is None else place(vector)

    biases = [bias for name in "qkv" if (bias := take(f"{name}_bias")) is not None]
    return LayerVectors(
        attn_norm=place(weights.pop(f"layers.{index}.attn_norm")),
        qkv_bias=torch.cat(biases) if biases else None,
        head_norm=_head_norm(heads, take("q_norm"), take("k_norm")),
        attn_post_norm=take("attn_post_norm"),
        mlp_norm=place(weights.pop(f"layers.{index}.mlp_norm")),
        mlp_post_norm=take("mlp_post_norm"),
        o_bias=take("o_bias"),
        sinks=take("sinks"),
    )


def _head_norm(
    heads: HeadShape, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
) -> torch.Tensor | None:
    """Return ``[H + K, D]`` with one row per head, which includes the query scale."""
    if q_norm is None or k_norm is None:
        return None
    if heads.query_scale is not None:
        q_norm = q_norm * (heads.query_scale * math.sqrt(heads.head_dim))
    return torch.cat((q_norm.expand(heads.num_heads, -1), k_norm.expand(heads.num_kv_heads, -1)))
