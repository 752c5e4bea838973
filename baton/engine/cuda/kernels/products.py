"""Matrix products of the layers: cuBLAS in ``fast``, a kernel of fixed order in ``exact``.

cuBLAS chooses its kernel by the number of rows, so a row's bits depend on its batch. ``exact``
therefore uses ``linear_kernel`` with fixed sizes. Second, faster sizes for many rows are used only
if they were found to give the same bits for this weight on this device.

Weights in fp8 (e4m3, a scale per output) are widened inside that kernel, so a row's bits still
depend on the row alone. In ``fast``, more than 16 rows are rounded to fp8 themselves, with a scale
per row, and multiplied by ``torch._scaled_mm``, which was faster from there on.
"""

# ruff: noqa: N803, N806, N815 - suffixes such as x_TE give shapes

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
import triton

from baton.engine.cuda.kernels.configs import (
    EXACT_MANY_ROWS,
    EXACT_ROWS,
    FP8_FEW_ROWS,
    LinearConfig,
    tuned_linear,
)
from baton.engine.cuda.kernels.device import matmul, rows

FP8 = torch.float8_e4m3fn
FP8_SIDE = 16
"""``torch._scaled_mm`` needs outputs and inputs to be multiples of this."""

_MANY = 256  # rows from which the second sizes pay
_FP8_MAX = 448.0
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in e4m3, with a factor for each of its outputs (fp32)."""

    values_NE: torch.Tensor
    scale_N: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the weight."""
        return self.values_NE.shape[0], self.values_NE.shape[1]


Weight = torch.Tensor | Fp8Weight


def to_fp8(values: torch.Tensor) -> Fp8Weight:
    """Round each row to e4m3, with its largest value at the format's largest."""
    wide = values.float()
    scale = wide.abs().amax(1).mul_(1 / _FP8_MAX).clamp_(min=_TINY)
    return Fp8Weight((wide / scale[:, None]).clamp_(-_FP8_MAX, _FP8_MAX).to(FP8), scale)


def fixed_linear(
    x_TE: torch.Tensor, weight: Weight, config: LinearConfig, dtype: torch.dtype
) -> torch.Tensor:
    """Return the ``[T, N]`` product with fixed sizes, rounded once to ``dtype``."""
    scaled = isinstance(weight, Fp8Weight)
    values_NE = weight.values_NE if isinstance(weight, Fp8Weight) else weight
    count, width_in = x_TE.shape
    width_out = values_NE.shape[0]
    out_TN = torch.empty(count, width_out, dtype=dtype, device=x_TE.device)
    grid = (triton.cdiv(count, config.block_m), triton.cdiv(width_out, config.block_n))
    matmul.linear_kernel[grid](
        x_TE,
        values_NE,
        weight.scale_N if isinstance(weight, Fp8Weight) else values_NE,
        out_TN,
        count,
        width_out,
        width_in,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SCALED=scaled,
        PRECISION="ieee",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    return out_TN


def rows_to_fp8(x_TE: torch.Tensor) -> Fp8Weight:
    """Return what ``to_fp8`` does, by one kernel. Triton's interpreter rounds to fp8 wrongly."""
    if not x_TE.is_cuda:
        return to_fp8(x_TE)
    count, width = x_TE.shape
    values_TE = torch.empty(count, width, dtype=FP8, device=x_TE.device)
    scale_T = torch.empty(count, dtype=torch.float32, device=x_TE.device)
    padded = triton.next_power_of_2(width)
    rows.fp8_rows_kernel[(count,)](
        x_TE,
        values_TE,
        scale_T,
        width,
        1 / _FP8_MAX,
        _FP8_MAX,
        _TINY,
        WIDTH_PAD=padded,
        num_warps=8 if padded >= 4096 else 4,
        enable_fp_fusion=False,
    )
    return Fp8Weight(values_TE, scale_T)


def scaled_linear(x_TE: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """Return the ``[T, N]`` bf16 product of rows that are rounded to fp8 too."""
    narrow = rows_to_fp8(x_TE)
    y_TN: torch.Tensor = torch._scaled_mm(  # noqa: SLF001 - torch has no public name for it
        narrow.values_NE,
        weight.values_NE.t(),
        scale_a=narrow.scale_N[:, None],
        scale_b=weight.scale_N[None, :],
        out_dtype=torch.bfloat16,
    )
    return y_TN


class Products:
    """Products ``x @ weight.T`` for the weights of one model."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._many_allowed: dict[tuple[int, int, bool], bool] = {}

    def __call__(
        self, x_TE: torch.Tensor, weight: Weight, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return ``[T, N]`` in ``dtype``, by default that of ``x``; ``x`` is contiguous."""
        kind = dtype or x_TE.dtype
        count = x_TE.shape[0]
        if self._exact:
            many = count >= _MANY and self._allows_many(weight)
            return fixed_linear(x_TE, weight, EXACT_MANY_ROWS if many else EXACT_ROWS, kind)
        if isinstance(weight, Fp8Weight):
            few = count <= FP8_FEW_ROWS.block_m
            if not few and kind == torch.bfloat16:
                return scaled_linear(x_TE, weight)
            return fixed_linear(x_TE, weight, FP8_FEW_ROWS if few else EXACT_ROWS, kind)
        config = tuned_linear(count, weight.shape[0], weight.shape[1])
        if config is not None:
            return fixed_linear(x_TE, weight, config, kind)
        if kind == x_TE.dtype:
            return F.linear(x_TE, weight)
        if x_TE.is_cuda and kind == torch.float32:
            return torch.mm(x_TE, weight.t(), out_dtype=kind)
        return F.linear(x_TE.to(kind), weight.to(kind))

    def prepare(self, weight: Weight, dtype: torch.dtype) -> None:
        """Probe a shape now: it is impossible during the capture of a graph."""
        values_NE = weight.values_NE if isinstance(weight, Fp8Weight) else weight
        if not values_NE.is_cuda:
            return
        if self._exact:
            self._allows_many(weight)
        elif isinstance(weight, Fp8Weight):
            ones = torch.ones(
                FP8_FEW_ROWS.block_m + 1, weight.shape[1], dtype=dtype, device=values_NE.device
            )
            self(ones, weight)

    def _allows_many(self, weight: Weight) -> bool:
        scaled = isinstance(weight, Fp8Weight)
        outputs = weight.shape[0]
        inputs = weight.shape[1]
        key = (outputs, inputs, scaled)
        allowed = self._many_allowed.get(key)
        if allowed is None:
            values_NE = weight.values_NE if isinstance(weight, Fp8Weight) else weight
            dtype = torch.bfloat16 if scaled else values_NE.dtype
            allowed = same_bits_by_cut(outputs, inputs, dtype, values_NE.device, scaled=scaled)
            self._many_allowed[key] = allowed
        return allowed


def same_bits_by_cut(
    width_out: int, width_in: int, dtype: torch.dtype, device: torch.device, *, scaled: bool
) -> bool:
    """Return whether both sizes give the same bits, on pairs that cancel but for their rounding."""
    generator = torch.Generator().manual_seed(0)
    half_in = (width_in + 1) // 2
    rows = min(_MANY, 2 * EXACT_MANY_ROWS.block_m)
    outputs = min(width_out, 2 * EXACT_MANY_ROWS.block_n)
    x = torch.randn(rows, half_in, generator=generator)
    w = torch.randn(outputs, half_in, generator=generator)
    x_TE = torch.cat((x, x), 1)[:, :width_in].contiguous().to(device, dtype)
    w_NE = torch.cat((w, -w), 1)[:, :width_in].contiguous().to(device, dtype)
    weight = to_fp8(w_NE) if scaled else w_NE
    left, right = (
        fixed_linear(x_TE, weight, cut, torch.float32) for cut in (EXACT_ROWS, EXACT_MANY_ROWS)
    )
    return torch.equal(left.view(torch.int32), right.view(torch.int32))
