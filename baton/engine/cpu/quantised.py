"""Linear layers whose weights have 8 or 4 bits.

**int8** multiplies integers: weights are rounded to 8 bits with a scale per output, activations
with a scale per row. Integer sums are the same in any order, so a row's bits cannot depend on its
neighbours, whatever the kernel does. Activations are split into two digits of 8 bits, high and low;
with one digit, every tenth token differed. The kernel is our own where there are native ones,
else oneDNN's, which gets both digits as twice the rows.

**int4** keeps 32 inputs of one output as 4-bit levels with a scale and an offset, for bf16
activations. Our own kernel splits these into two digits too; torch's multiplies them unchanged.
GGUF's Q4_1 and Q4_0 have the same groups, so their levels are restored exactly.

The LM head is int8 under both, with one digit: the best logits of each row are computed from the
plain embedding anyway. ``docs/measurements/2026-11.md`` has the loss in accuracy.
"""

# ruff: noqa: N803, N806 - suffixes such as q_THD give shapes

from collections.abc import Callable, Iterator
from typing import Any

import torch

from baton.engine.cpu.linear import ANY_ROWS, Linear
from baton.engine.cpu.native.products import NativeInt4Weight, NativeInt8Weight, int8_fits
from baton.engine.loading.memory import INT4_GROUP_INPUTS
from baton.model.artifact import ModelError
from baton.types.errors import InternalError

_LEVELS = 127.0
_DIGIT = 254.0  # the second digit counts in 254ths of the first: half of its last place
_ZERO_POINT = 128  # the kernels need unsigned activations
_TINY = 1e-30
_SLICE_VALUES = 1 << 16  # values quantised at a time; each needs up to 40 bytes meanwhile
_OUTPUTS_STEP = 16  # the int4 kernel needs a multiple of so many outputs


class IntegerKernelError(InternalError):
    """The integer products of this machine overflow; int8 weights would give wrong results."""

    code = "numerics_setup"


class Int8Linear(Linear):
    """Linear layer in integers, with a scale per output and one per row of ``x``.

    Args:
        weight_NK: Weight in bf16 or fp32, which is the dtype of ``x`` and ``y`` too.
        digits: Number of 8-bit digits of the activations: 1 or 2.
    """

    def __init__(self, weight_NK: torch.Tensor, digits: int = 2) -> None:
        self._digits = digits
        super().__init__(weight_NK, ANY_ROWS)

    def _pack(self, weight_NK: torch.Tensor) -> Any:
        whole = torch.empty(weight_NK.shape, dtype=torch.int8)
        scale_N1 = torch.empty(len(weight_NK), 1)
        for rows in _slices(weight_NK):
            values = weight_NK[rows].float()
            scale = values.abs().amax(1, keepdim=True).mul_(1 / _LEVELS).clamp_(min=_TINY)
            whole[rows] = (values / scale).round_()
            scale_N1[rows] = scale
        self._scale_N = scale_N1.view(-1)
        self._is_native = int8_fits(self.dtype)
        if self._is_native:
            return NativeInt8Weight(whole, self._scale_N, self._digits)
        self._zeros_N = torch.zeros(len(whole), dtype=torch.int32)
        packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(whole, None)
        return packed

    def _multiply(self, x_MK: torch.Tensor) -> torch.Tensor:
        if self._is_native:
            product: torch.Tensor = self._packed(x_MK)
            return product
        rows = x_MK.shape[0]
        values = x_MK.float()
        scale = values.abs().amax(1, keepdim=True).mul_(1 / _LEVELS).clamp_(min=_TINY)
        digits = values / scale
        if self._digits == 1:
            y_MN = self._integer_product(digits.round_())
        else:
            high = digits.round()
            low = digits.sub_(high).mul_(_DIGIT).round_()
            both = self._integer_product(torch.cat((high, low)))
            y_MN = both[:rows].add_(both[rows:], alpha=1 / _DIGIT)
        return y_MN.mul_(scale).to(x_MK.dtype)

    def _integer_product(self, whole_MK: torch.Tensor) -> torch.Tensor:
        """Multiply integers from -127 to 127, in fp32, by the weight and its scales; fp32."""
        shifted = whole_MK.add_(_ZERO_POINT).to(torch.uint8)
        y_MN: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            shifted,
            1.0,
            _ZERO_POINT,
            self._packed,
            self._scale_N,
            self._zeros_N,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return y_MN


class Int4Linear(Linear):
    """Linear layer with 4-bit levels; a scale and an offset per output and 32 inputs."""

    def _pack(self, weight_NK: torch.Tensor) -> Any:
        outputs, inputs = weight_NK.shape
        groups = inputs // INT4_GROUP_INPUTS
        whole = torch.empty(outputs, inputs, dtype=torch.uint8)
        scales = torch.empty(outputs, groups)
        offsets = torch.empty(outputs, groups)
        for rows in _slices(weight_NK):
            levels, scales[rows], offsets[rows] = quantise_groups(weight_NK[rows].float())
            whole[rows] = levels.flatten(1)
        self._is_native = int8_fits(self.dtype)
        if self._is_native:  # fp16, as GGUF's files have them
            return NativeInt4Weight(whole, scales.half(), offsets.half())
        # torch's kernel computes (level - 8) * scale + offset
        pairs_NG2 = torch.stack((scales, offsets + 8 * scales), dim=-1)
        self._scales = pairs_NG2.transpose(0, 1).bfloat16().contiguous()
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # noqa: SLF001
        packed: torch.Tensor = pack(whole.int(), 1)
        return packed

    def _multiply(self, x_MK: torch.Tensor) -> torch.Tensor:
        if self._is_native:
            native: torch.Tensor = self._packed(x_MK)
            return native
        product = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001
        y_MN: torch.Tensor = product(x_MK, self._packed, INT4_GROUP_INPUTS, self._scales)
        return y_MN


def _slices(weight_NK: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows to quantise together, so few that temporary memory stays small."""
    outputs, inputs = weight_NK.shape
    step = max(1, _SLICE_VALUES // inputs)
    for begin in range(0, outputs, step):
        yield slice(begin, begin + step)


def quantise_groups(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return levels ``[N, groups, 32]``, scales and offsets ``[N, groups]`` of 4-bit groups.

    A value is level * scale + offset. Two grids are tried for each group: from least to greatest
    (like Q4_1), and from the value of greatest size towards the other sign (like Q4_0). The nearer
    one is used.
    """
    groups = weight_NK.view(weight_NK.shape[0], -1, INT4_GROUP_INPUTS)
    least = groups.amin(2)
    greatest = groups.amax(2)
    extreme = torch.where(greatest.abs() > least.abs(), greatest, least)
    candidates = [((greatest - least) / 15, least), (-extreme / 8, extreme)]
    fits = []
    for scale, offset in candidates:
        safe = torch.where(scale == 0, 1.0, scale)
        levels = ((groups - offset[..., None]) / safe[..., None]).round_().clamp_(0, 15)
        error = (levels * scale[..., None] + offset[..., None] - groups).square_().sum(2)
        fits.append((error, levels, scale, offset))
    (error, levels, scale, offset), other = fits
    better = other[0] < error
    levels = torch.where(better[..., None], other[1], levels)
    return levels, torch.where(better, other[2], scale), torch.where(better, other[3], offset)


def packer(quantisation: str, dtype: str) -> Callable[[str, torch.Tensor], Linear | None]:
    """Return a function that makes quantised layers, or ``None`` for a layer that stays plain.

    Raises:
        ModelError: The combination is not supported; the message names it.
        IntegerKernelError: The kernels of this machine overflow.
    """
    if quantisation == "none":
        return lambda name, weight: None
    if quantisation == "fp8":
        raise ModelError(
            "quantisation.weights fp8 needs CUDA (docs/design/gpu.md); use int8 or int4 on a CPU"
        )
    if quantisation not in ("int8", "int4"):
        raise ModelError(
            f"quantisation.weights {quantisation!r} is not supported; use int8 or int4"
        )
    if quantisation == "int4" and dtype != "bf16":
        raise ModelError(f"quantisation.weights int4 does not support dtype {dtype}; use bf16")
    check_integer_kernel()

    def pack(name: str, weight_NK: torch.Tensor) -> Linear | None:
        if name == "router":  # small, and selects the experts
            return None
        if quantisation == "int8" or name == "head":
            return Int8Linear(weight_NK, digits=1 if name == "head" else 2)
        outputs, inputs = weight_NK.shape
        if inputs % INT4_GROUP_INPUTS or outputs % _OUTPUTS_STEP:
            raise ModelError(
                f"quantisation.weights int4: {name} is {outputs} x {inputs}; the kernel needs "
                f"multiples of {_OUTPUTS_STEP} x {INT4_GROUP_INPUTS}"
            )
        return Int4Linear(weight_NK)

    return pack


def check_integer_kernel() -> None:
    """Prove that the greatest products are summed without overflow, for few and many rows.

    Old CPUs add pairs of 8-bit products in 16 bits, which are too few.
    """
    weight = torch.full((48, 256), 127.0)
    weight[1::2] = -127.0
    layer = Int8Linear(weight, digits=1)
    for rows in (1, 5, 16, 64):
        x = torch.full((rows, 256), 127.0)
        if not torch.equal(layer(x), x @ weight.T):
            raise IntegerKernelError(
                "quantisation.weights: the integer products of this CPU overflow (no VNNI), and "
                "int8 and int4 weights need them without native kernels; use none"
            )
