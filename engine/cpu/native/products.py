"""Products with bf16 weights by the native kernel.

Each element is one chain over K: its bits do not depend on how many rows there are.

    M rows, N outputs, K inputs:   x_MK @ weight_NK.T -> y_MN
"""

# ruff: noqa: N803, N806 - suffixes such as x_MK give shapes

import torch

from engine.cpu.native.library import load


def native_fits(inputs: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is there and takes such weights: it reads inputs in pairs."""
    return dtype == torch.bfloat16 and inputs % 2 == 0 and load() is not None


class NativeWeight:
    """A packed weight, of the size of the plain one.

    Args:
        weight_NK: Contiguous bf16 ``[outputs, inputs]``; ``native_fits``.
    """

    def __init__(self, weight_NK: torch.Tensor) -> None:
        library = load()
        if library is None:
            raise RuntimeError("ask native_fits first")
        self._outputs, self._inputs = weight_NK.shape
        self._product = library.baton_product
        size = library.baton_packed_size(self._outputs, self._inputs)
        self._packed = torch.empty(size, dtype=torch.bfloat16)
        self._place = self._packed.data_ptr()
        library.baton_pack(
            weight_NK.data_ptr(), self._outputs, self._inputs, self._place, torch.get_num_threads()
        )

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """``[M, K] -> [M, N]``."""
        if x_MK.stride(1) != 1:
            x_MK = x_MK.contiguous()
        rows = x_MK.shape[0]
        y_MN = torch.empty(rows, self._outputs, dtype=torch.bfloat16)
        self._product(
            x_MK.data_ptr(),
            x_MK.stride(0),
            self._place,
            y_MN.data_ptr(),
            self._outputs,
            rows,
            self._outputs,
            self._inputs,
            torch.get_num_threads(),
        )
        return y_MN
