"""Matrix product whose rows do not depend on their number (``exact``)."""

# ruff: noqa: N803 - constexpr are upper case

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    rows,
    width_out,
    width_in,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute ``out = x @ w.T``; each element is one sum over K in steps of ``BLOCK_K``.

    ``SCALED``: weights are narrower than ``x``, with a scale for each output.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside = m < rows
    n_inside = n < width_out
    x_at = x_ptr + m.to(tl.int64)[:, None] * width_in + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * width_in + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width_in, BLOCK_K):
        inside = k < width_in - start
        x = tl.load(x_at, mask=m_inside[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at, mask=n_inside[None, :] & inside[:, None], other=0.0)
        if SCALED:
            w = w.to(x.dtype)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K
    if SCALED:
        acc *= tl.load(scale_ptr + n, mask=n_inside, other=0.0)[None, :]
    out_at = out_ptr + m.to(tl.int64)[:, None] * width_out + n[None, :]
    inside_out = m_inside[:, None] & n_inside[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside_out)
