"""Matrix products of the layers: cuBLAS in ``fast``, a kernel of fixed order in ``exact``.

cuBLAS chooses its kernel by the number of rows, so a row's bits depend on its batch. ``exact``
therefore takes ``linear_kernel`` with a cut that never changes; a second, faster cut for many rows
is used only when it was found, for this weight on this device, to give the same bits.
"""

# ruff: noqa: N803, N806 - suffixes such as x_TE give shapes

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
import triton

from engine.kernels.configs import EXACT_MANY_ROWS, EXACT_ROWS, LinearConfig, tuned_linear
from engine.kernels.device import matmul

_MANY = 256
"""Rows from which the second cut pays."""


def fixed_linear(
    x_TE: torch.Tensor, weight_NE: torch.Tensor, config: LinearConfig, dtype: torch.dtype
) -> torch.Tensor:
    """``[T, N]`` product in one cut, rounded once to ``dtype``."""
    count, width_in = x_TE.shape
    width_out = weight_NE.shape[0]
    out_TN = torch.empty(count, width_out, dtype=dtype, device=x_TE.device)
    grid = (triton.cdiv(count, config.block_m), triton.cdiv(width_out, config.block_n))
    matmul.linear_kernel[grid](
        x_TE,
        weight_NE,
        out_TN,
        count,
        width_out,
        width_in,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PRECISION="ieee",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_TN


class Products:
    """``x @ weight.T`` for the weights of one model.

    Args:
        exact: Rows never depend on how many there are.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._many_allowed: dict[tuple[int, int], bool] = {}

    def __call__(
        self, x_TE: torch.Tensor, weight_NE: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """``[T, N]`` in ``dtype``, by default that of ``x``; ``x`` is contiguous."""
        kind = dtype or x_TE.dtype
        if self._exact:
            many = x_TE.shape[0] >= _MANY and self._allows_many(weight_NE)
            return fixed_linear(x_TE, weight_NE, EXACT_MANY_ROWS if many else EXACT_ROWS, kind)
        config = tuned_linear(x_TE.shape[0], *weight_NE.shape)
        if config is not None:
            return fixed_linear(x_TE, weight_NE, config, kind)
        if kind == x_TE.dtype:
            return F.linear(x_TE, weight_NE)
        if x_TE.is_cuda and kind == torch.float32:
            return torch.mm(x_TE, weight_NE.t(), out_dtype=kind)
        return F.linear(x_TE.to(kind), weight_NE.to(kind))

    def prepare(self, weight_NE: torch.Tensor) -> None:
        """Probe a weight's shape beforehand: while a graph is captured it would be too late."""
        if self._exact and weight_NE.is_cuda:
            self._allows_many(weight_NE)

    def _allows_many(self, weight_NE: torch.Tensor) -> bool:
        shape = (weight_NE.shape[0], weight_NE.shape[1])
        found = self._many_allowed.get(shape)
        if found is None:
            found = same_bits_by_cut(*shape, weight_NE.dtype, weight_NE.device)
            self._many_allowed[shape] = found
        return found


def same_bits_by_cut(
    width_out: int, width_in: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether both cuts give the same bits, on pairs that cancel: what is left is rounding."""
    generator = torch.Generator().manual_seed(0)
    half_in = (width_in + 1) // 2
    rows = min(_MANY, 2 * EXACT_MANY_ROWS.block_m)
    outputs = min(width_out, 2 * EXACT_MANY_ROWS.block_n)
    x = torch.randn(rows, half_in, generator=generator)
    w = torch.randn(outputs, half_in, generator=generator)
    x_TE = torch.cat((x, x), 1)[:, :width_in].contiguous().to(device, dtype)
    w_NE = torch.cat((w, -w), 1)[:, :width_in].contiguous().to(device, dtype)
    left, right = (
        fixed_linear(x_TE, w_NE, cut, torch.float32) for cut in (EXACT_ROWS, EXACT_MANY_ROWS)
    )
    return torch.equal(left.view(torch.int32), right.view(torch.int32))
