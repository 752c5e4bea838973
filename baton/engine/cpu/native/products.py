"""Products with packed weights by the native kernels.

Each element has one order of its sums over K, so its bits do not depend on the number of rows.

    M rows, N outputs, K inputs:   x_MK @ weight_NK.T -> y_MN
"""

# ruff: noqa: N803, N806 - suffixes such as x_MK give shapes

import ctypes
from collections.abc import Callable

import torch

from baton.engine.cpu.native.library import PAIRS, load, sums
from baton.engine.cpu.native.memory import memory_for
from baton.engine.cpu.native.threads import job_threads

_PANEL = 32  # outputs: scales are padded to whole panels


def native_fits(inputs: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel exists and accepts such weights (it needs pairs of inputs)."""
    return dtype == torch.bfloat16 and inputs % 2 == 0 and load() is not None


class _Bf16Product:
    """A packed weight whose product takes and returns bf16."""

    _inputs: int
    _outputs: int
    _product: Callable[..., None]
    _sums: tuple[int, ...] = ()
    place: int

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Compute ``[M, K] -> [M, N]``."""
        x_MK, rows = _rows(x_MK)
        y_MN = torch.empty(rows, self._outputs, dtype=torch.bfloat16)
        self._product(
            x_MK.data_ptr(),
            x_MK.stride(0),
            self.place,
            y_MN.data_ptr(),
            self._outputs,
            rows,
            self._outputs,
            self._inputs,
            job_threads(),
            *self._sums,
        )
        return y_MN


class NativeWeight(_Bf16Product):
    """A packed weight, of the size of the plain one.

    Args:
        weight_NK: Contiguous bf16 ``[outputs, inputs]``, for which ``native_fits``.
    """

    def __init__(self, weight_NK: torch.Tensor) -> None:
        library = _loaded()
        self._outputs, self._inputs = weight_NK.shape
        self._sums = () if sums() == PAIRS else (sums(),)
        kind = "baton" if sums() == PAIRS else "baton_tile"
        self._product = getattr(library, f"{kind}_product")
        size = getattr(library, f"{kind}_packed_size")(self._outputs, self._inputs)
        self._memory, self.place = memory_for(2 * size)
        pack = getattr(library, f"{kind}_pack")
        pack(weight_NK.data_ptr(), self._outputs, self._inputs, self.place, job_threads())


def int8_fits(dtype: torch.dtype) -> bool:
    """Return whether there are kernels for weights of 8 and 4 bits."""
    return load() is not None and dtype in (torch.bfloat16, torch.float32)


class NativeInt8Weight:
    """A packed weight of 8 bits.

    Args:
        whole_NK: Contiguous int8 ``[outputs, inputs]``, for which ``int8_fits``.
        scale_N: Scales of the outputs, fp32.
        digits: Number of 8-bit digits of the activations: 1 or 2.
    """

    def __init__(self, whole_NK: torch.Tensor, scale_N: torch.Tensor, digits: int) -> None:
        library = _loaded()
        self._outputs, self._inputs = whole_NK.shape
        self.digits = digits
        self._product = library.baton_int8_product
        padded = -(-self._outputs // _PANEL) * _PANEL
        self.scales = torch.zeros(padded)
        self.scales[: self._outputs] = scale_N
        self.offsets = torch.zeros(padded, dtype=torch.int32)
        size = library.baton_int8_packed_size(self._outputs, self._inputs)
        self._memory, self.place = memory_for(size)
        library.baton_int8_pack(
            whole_NK.data_ptr(),
            self._outputs,
            self._inputs,
            self.place,
            self.offsets.data_ptr(),
            job_threads(),
        )

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Compute ``[M, K] -> [M, N]``, in the dtype of ``x_MK``: bf16 or fp32."""
        x_MK, rows = _rows(x_MK)
        y_MN = torch.empty(rows, self._outputs, dtype=x_MK.dtype)
        self._product(
            x_MK.data_ptr(),
            x_MK.stride(0),
            x_MK.dtype == torch.bfloat16,
            self.place,
            self.scales.data_ptr(),
            self.offsets.data_ptr(),
            y_MN.data_ptr(),
            self._outputs,
            rows,
            self._outputs,
            self._inputs,
            self.digits,
            job_threads(),
        )
        return y_MN


class NativeInt4Weight(_Bf16Product):
    """A packed weight of 4 bits, for activations in bf16: ``level * scale + offset``.

    Args:
        levels_NK: Contiguous uint8 ``[outputs, inputs]``, from 0 to 15; whole groups of 32 inputs.
        scale_NG: Scales ``[outputs, groups]``, fp16.
        offset_NG: Offsets ``[outputs, groups]``, fp16.
    """

    def __init__(
        self, levels_NK: torch.Tensor, scale_NG: torch.Tensor, offset_NG: torch.Tensor
    ) -> None:
        library = _loaded()
        self._outputs, self._inputs = levels_NK.shape
        self._product = library.baton_int4_product
        size = library.baton_int4_packed_size(self._outputs, self._inputs)
        self._memory, self.place = memory_for(size)
        library.baton_int4_pack(
            levels_NK.data_ptr(),
            scale_NG.data_ptr(),
            offset_NG.data_ptr(),
            self._outputs,
            self._inputs,
            self.place,
            job_threads(),
        )


def _loaded() -> ctypes.CDLL:
    library = load()
    if library is None:
        raise RuntimeError("no native library; check native_fits or int8_fits first")
    return library


def _rows(x_MK: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return rows with adjacent inputs, for the kernels, and their number."""
    return (x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()), x_MK.shape[0]
