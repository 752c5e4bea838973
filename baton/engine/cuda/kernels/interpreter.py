"""Corrections of Triton's interpreter: right results for bf16, and speed enough for tests.

Four parts of triton 3.6's interpreter are replaced. It does not round to bf16 to nearest even, it
rounds the product of a fused multiply-add to fp32 (to fp64, here), and each call of a device
function scans the whole of ``triton.language`` again. ``tl.dot`` multiplies bf16 bit patterns as
integers, by numpy's product, in which the bits of a row depend on its place in the matrix. Here, as
in matrix units, each element is a separate chain: it begins with the accumulator and goes over K
from left to right.
"""

# ruff: noqa: SLF001 - private names of Triton are replaced

from typing import Any

import numpy as np
import numpy.typing as npt


def repair() -> None:
    """Replace these parts in this process; a second call does nothing."""
    import triton.language as tl
    from triton.runtime import interpreter as theirs

    builder = theirs.InterpreterBuilder
    if builder.create_dot.__module__ == __name__:
        return
    convert = theirs._convert_float

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left = _as_fp32(a, tl)
        right = _as_fp32(b, tl)
        total = d.data.copy()
        for k in np.flatnonzero(left.any(0) | right.any(1)):  # the others are padding
            total += left[:, k, None] * right[k]
        return theirs.TensorHandle(total, d.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        product = x.data.astype(np.float64) * y.data  # exact for fp32
        return theirs.TensorHandle((product + z.data).astype(z.data.dtype), z.dtype.scalar)

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return round_to_bf16(values)
        return convert(values, source, target, rounding)

    patched = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        home = self.fn.__module__
        if not home.startswith("baton.engine.cuda.kernels") and home not in patched:
            theirs._patch_lang(self.fn)  # ours are patched by the launch
            patched.add(home)
        return self.rewrite()(*args, **kwargs)

    builder.create_dot = dot
    builder.create_fma = fma
    theirs._convert_float = convert_float
    theirs.InterpretedFunction.__call__ = call


def _as_fp32(x: Any, tl: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x.data
    return (x.data.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bf16, ties to even; NaN stays NaN."""
    raw = np.ascontiguousarray(values).view(np.uint32)
    rounded = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
