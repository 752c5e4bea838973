"""Row-wise operations of a decoder between its products: residual sums, norms, RoPE, the gate.

This module uses torch, in any dtype; ``baton/engine/cpu/native/rows.py`` does the same for bf16 in
fewer passes.
"""

# ruff: noqa: N803, N806 - suffixes such as x_TE give shapes

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]


class TorchRows:
    """Row-wise operations by torch.

    Args:
        dtype: Dtype of the rows that products take.
    """

    def __init__(self, dtype: torch.dtype, eps: float) -> None:
        self.dtype = dtype
        self.eps = eps

    def add_norm(
        self,
        x_TE: torch.Tensor,
        part_TE: torch.Tensor | None,
        post_E: torch.Tensor | None,
        weight_E: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add a layer's part to the residual sum, and norm the sum for the next product.

        Args:
            x_TE: Residual sum, fp32; changed in place.
            part_TE: Part to add, if any.
            post_E: Weights of a norm of the part before it is added, if any.
            weight_E: Weights of the norm of the sum; ``None`` after the last layer.

        Returns:
            ``[T, E]`` in ``dtype``; no rows without ``weight_E``.
        """
        if part_TE is not None:
            x_TE += part_TE if post_E is None else self.norm_fp32(part_TE, post_E)
        if weight_E is None:
            return x_TE[:0].to(self.dtype)
        return self.norm_fp32(x_TE, weight_E).to(self.dtype)

    def norm_fp32(self, x_TE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        """Apply the RMS norm in fp32."""
        return F.rms_norm(x_TE.float(), weight_E.shape, weight_E, self.eps)

    def refine(
        self, raw_SV: torch.Tensor, h_SE: torch.Tensor, table_VE: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best tokens of each row and their logits in fp32, each row by itself.

        Args:
            raw_SV: All logits, less precise.
            h_SE: Normed hidden rows, fp32.
            table_VE: Rows of the LM head.
            count: Number of tokens for each row.

        Returns:
            Ids, best first by ``raw_SV``, and logits, ``[S, count]`` each.
        """
        ids_SC = raw_SV.topk(count, dim=-1).indices
        rows = zip(F.embedding(ids_SC, table_VE).float(), h_SE, strict=True)
        return ids_SC, torch.stack([torch.mv(w_CE, h_E) for w_CE, h_E in rows])

    def heads(
        self,
        qkv_TN: torch.Tensor,
        rotated: int,
        head_dim: int,
        bias_N: torch.Tensor | None,
        norm_HD: torch.Tensor | None,
        rotation: torch.Tensor,
    ) -> None:
        """Finish Q, K and V in place: bias to all; Q and K normed by head, then rotated.

        Args:
            qkv_TN: Rows of ``rotated`` heads of Q and K, and the heads of V.
            rotated: Number of heads of Q and K.
            head_dim: Size of a head.
            bias_N: Bias in fp32, or ``None``.
            norm_HD: Weights in fp32 of the norm by head ``[rotated, head_dim]``, or ``None``.
            rotation: RoPE factors, ``[T, 1, head_dim / 2]`` complex.
        """
        rows = qkv_TN.shape[0]
        end = rotated * head_dim
        heads = qkv_TN[:, :end].float()
        if bias_N is not None:
            heads += bias_N[:end]
            qkv_TN[:, end:] += bias_N[end:]
        heads = heads.view(rows, rotated, head_dim)
        if norm_HD is not None:
            heads = F.rms_norm(heads, (head_dim,), None, self.eps).mul_(norm_HD)
        pairs = torch.view_as_complex(heads.view(rows, rotated, head_dim // 2, 2))
        # the copy rounds to the rows' dtype
        qkv_TN[:, :end] = torch.view_as_real(pairs * rotation).view(rows, end)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Multiply the activation of the first half by the second: ``[T, 2 F] -> [T, F]``."""
        x, up = gate_up.float().chunk(2, dim=1)
        if activation == "swiglu_clamped":
            x = x.clamp(max=_CLAMP)
            up = up.clamp(-_CLAMP, _CLAMP) + 1.0
            inner = x * _SWIGLU_GAIN
        else:  # GELU by tanh: 1 + tanh(u) is 2 sigmoid(2 u)
            inner = x if activation == "silu" else (x * x * 0.044715 + 1.0) * x * _TWICE_ROOT_2_PI
        return (x * sigmoid(inner) * up).to(self.dtype)


_CLAMP = 7.0
_SWIGLU_GAIN = 1.702
_TWICE_ROOT_2_PI = 2.0 * math.sqrt(2.0 / math.pi)


def with_sink(
    out: torch.Tensor, log_sums: torch.Tensor, sinks: Sequence[torch.Tensor], layer: int
) -> torch.Tensor:
    """Return attention ``[B, Hkv, queries * G, D]`` with the layer's sinks, given log-sum-exps."""
    if not sinks:
        return out
    sink = sinks[layer].view(out.shape[1], -1)
    scores = log_sums - sink.repeat(1, out.shape[2] // sink.shape[1])
    return (out.float() * sigmoid(scores.contiguous())[..., None]).to(out.dtype)


def sigmoid(x_TF: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid by numpy: torch computes the last few elements of a run differently.

    With torch an element's bits would depend on its position, and a row's on its rank's width.
    """
    with np.errstate(over="ignore"):
        return torch.from_numpy(1.0 / (1.0 + np.exp(-x_TF.numpy())))
