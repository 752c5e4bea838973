"""Row-wise operations by the native kernels; see ``baton/engine/cpu/rows.py``."""

# ruff: noqa: N803, N806 - suffixes such as x_TE give shapes

import ctypes
from collections.abc import Iterable

import torch

from baton.engine.cpu.native.library import load
from baton.engine.cpu.native.threads import job_threads
from baton.engine.cpu.rows import Activation, TorchRows
from baton.engine.sampling import sample

LANES = 16
"""Widths must be multiples of this."""

_FINITE = (torch.bfloat16, torch.float32)


def native_rows(dtype: torch.dtype, eps: float, widths: Iterable[int]) -> "NativeRows | None":
    """Return the kernels if they accept rows of such widths, else ``None``."""
    if dtype != torch.bfloat16 or any(width % LANES for width in widths):
        return None
    library = load()
    return None if library is None else NativeRows(library, eps)


class NativeRows(TorchRows):
    """Operations on bf16 rows, each of which is read and written once per call."""

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
        """Add and norm as ``TorchRows`` does."""
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
            job_threads(),
        )
        return out_TE

    def norm_fp32(self, x_TE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        """Apply the RMS norm in fp32."""
        if x_TE.dtype != torch.float32 or x_TE.stride(-1) != 1:
            return super().norm_fp32(x_TE, weight_E)
        rows, width = x_TE.shape
        out_TE = torch.empty(rows, width)
        self._library.baton_norm(
            x_TE.data_ptr(),
            x_TE.stride(0),
            weight_E.data_ptr(),
            self.eps,
            out_TE.data_ptr(),
            width,
            rows,
            width,
            job_threads(),
        )
        return out_TE

    def refine(
        self, raw_SV: torch.Tensor, h_SE: torch.Tensor, table_VE: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Refine the best logits as ``TorchRows`` does."""
        if not raw_SV.dtype == table_VE.dtype == torch.bfloat16:
            return super().refine(raw_SV, h_SE, table_VE, count)
        rows, width = h_SE.shape
        threads = job_threads()
        ids_SC = torch.empty(rows, count, dtype=torch.int64)
        self._library.baton_largest(
            raw_SV.data_ptr(),
            raw_SV.stride(0),
            rows,
            raw_SV.shape[1],
            count,
            ids_SC.data_ptr(),
            threads,
        )
        refined_SC = torch.empty(rows, count)
        self._library.baton_dots(
            h_SE.data_ptr(),
            h_SE.stride(0),
            table_VE.data_ptr(),
            table_VE.stride(0),
            ids_SC.data_ptr(),
            count,
            refined_SC.data_ptr(),
            rows,
            width,
            threads,
        )
        return ids_SC, refined_SC

    def heads(
        self,
        qkv_TN: torch.Tensor,
        rotated: int,
        head_dim: int,
        bias_N: torch.Tensor | None,
        norm_HD: torch.Tensor | None,
        rotation: torch.Tensor,
    ) -> None:
        """Finish Q, K and V as ``TorchRows`` does."""
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
            job_threads(),
        )

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Multiply the activation of the first half by the second."""
        if activation == "swiglu_clamped":
            return super().gate(gate_up, activation)
        rows = gate_up.shape[0]
        width = gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=torch.bfloat16)
        self._library.baton_gate(
            gate_up.data_ptr(),
            gate_up.stride(0),
            out.data_ptr(),
            width,
            rows,
            width,
            int(activation != "silu"),
            job_threads(),
        )
        return out


def finite_rows(x_TN: torch.Tensor) -> list[bool]:
    """Return for each row whether it is free of NaN and Inf."""
    library = load() if x_TN.dtype in _FINITE and x_TN.device.type == "cpu" else None
    if library is None or x_TN.stride(1) != 1:
        return sample.finite_rows(x_TN)
    rows, width = x_TN.shape
    finite_T = torch.empty(rows, dtype=torch.bool)
    library.baton_finite(
        x_TN.data_ptr(),
        x_TN.stride(0),
        int(x_TN.dtype == torch.float32),
        finite_T.data_ptr(),
        rows,
        width,
        job_threads(),
    )
    result: list[bool] = finite_T.tolist()
    return result
