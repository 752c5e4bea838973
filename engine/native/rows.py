"""Between a decoder's products, by the native kernels; see ``engine/models/rows.py``."""

# ruff: noqa: N803, N806 - suffixes such as x_TE give shapes

import ctypes
from collections.abc import Iterable

import torch

from engine.models.rows import Activation, TorchRows
from engine.native.library import load

LANES = 16
"""Widths must be multiples of this."""


def native_rows(dtype: torch.dtype, eps: float, widths: Iterable[int]) -> "NativeRows | None":
    """The kernels if they can work on rows of such widths, else ``None``."""
    if dtype != torch.bfloat16 or any(width % LANES for width in widths):
        return None
    library = load()
    return None if library is None else NativeRows(library, eps)


class NativeRows(TorchRows):
    """bf16 rows, each of which is read and written once per call.

    Args:
        library: The compiled kernels.
        eps: Of the norms.
    """

    def __init__(self, library: ctypes.CDLL, eps: float) -> None:
        super().__init__(torch.bfloat16, eps)
        self._library = library

    def add_norm(
        self,
        x_TE: torch.Tensor,
        part_TE: torch.Tensor | None,
        post_E: torch.Tensor | None,
        weight_E: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``TorchRows``."""
        if part_TE is not None and part_TE.dtype != torch.bfloat16:
            return super().add_norm(x_TE, part_TE, post_E, weight_E)  # a mixture of experts
        rows, width = x_TE.shape
        out_TE = torch.empty(0 if weight_E is None else rows, width, dtype=torch.bfloat16)
        self._library.baton_residual(
            x_TE.data_ptr(),
            x_TE.stride(0),
            None if part_TE is None else part_TE.data_ptr(),
            0 if part_TE is None else part_TE.stride(0),
            None if post_E is None else post_E.data_ptr(),
            None if weight_E is None else weight_E.data_ptr(),
            self.eps,
            out_TE.data_ptr(),
            width,
            rows,
            width,
            torch.get_num_threads(),
        )
        return out_TE

    def heads(
        self,
        qkv_TN: torch.Tensor,
        rotated: int,
        head_dim: int,
        bias_N: torch.Tensor | None,
        norm_HD: torch.Tensor | None,
        rotation: torch.Tensor,
    ) -> None:
        """See ``TorchRows``."""
        rows, width = qkv_TN.shape
        self._library.baton_heads(
            qkv_TN.data_ptr(),
            qkv_TN.stride(0),
            None if bias_N is None else bias_N.data_ptr(),
            None if norm_HD is None else norm_HD.data_ptr(),
            self.eps,
            rotation.data_ptr(),
            rows,
            rotated,
            width // head_dim - rotated,
            head_dim,
            torch.get_num_threads(),
        )

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See ``TorchRows``."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=torch.bfloat16)
        self._library.baton_gate(
            gate_up.data_ptr(),
            gate_up.stride(0),
            out.data_ptr(),
            width,
            rows,
            width,
            int(activation != "silu"),
            torch.get_num_threads(),
        )
        return out
