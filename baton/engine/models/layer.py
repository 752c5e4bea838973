"""What the decoders of both backends have in common in a layer. Needs torch, nothing else."""

# ruff: noqa: N803 - suffixes such as x_TE give shapes

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Deltas(Protocol):
    """What the adapters of a step add to the layers' products."""

    def apply(self, layer: int, name: str, x_TE: torch.Tensor, y_TN: torch.Tensor) -> None:
        """Change ``y_TN``, the product ``name`` of a layer for the inputs ``x_TE``."""


class HeadShape(Protocol):
    """The heads of a layer."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""

    @property
    def head_dim(self) -> int:
        """Elements of one."""

    @property
    def query_scale(self) -> float | None:
        """What scores are multiplied with, if not ``1 / sqrt(head_dim)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVectors:
    """All of a layer but its matrices, in fp32; what a family has not is ``None``."""

    attn_norm: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None  # [H + K, D], for Q and K
    attn_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp_post_norm: torch.Tensor | None


def take_vectors(
    weights: MutableMapping[str, torch.Tensor],
    index: int,
    heads: HeadShape,
    place: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
) -> LayerVectors:
    """Take the norms and biases of layer ``index`` out of the model's weights.

    Args:
        weights: By canonical name (``baton/engine/models/family.py``).
        index: Of the layer.
        heads: The heads that are computed here.
        place: Makes fp32 of a vector, where it is needed.
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
    )


def _head_norm(
    heads: HeadShape, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
) -> torch.Tensor | None:
    """``[H + K, D]``: a row for each head. A query scale of the model's own goes in here."""
    if q_norm is None or k_norm is None:
        return None
    if heads.query_scale is not None:
        q_norm = q_norm * (heads.query_scale * math.sqrt(heads.head_dim))
    return torch.cat((q_norm.expand(heads.num_heads, -1), k_norm.expand(heads.num_kv_heads, -1)))
