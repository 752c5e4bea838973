"""What happens to each row between the matrix products: one program each, so no row sees another.

Everything is computed in fp32 and rounded once. The sum over the layers (``x``) stays in fp32.
"""

# ruff: noqa: N803 - constexpr are upper case

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    width,
    eps,
    ADD: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """``x += delta`` (``ADD``), then ``out = x / rms(x) * weight``."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, WIDTH_PAD)
    inside = offsets < width
    x = tl.load(x_ptr + row * width + offsets, mask=inside, other=0.0)
    if ADD:
        x += tl.load(delta_ptr + row * width + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * width + offsets, x, mask=inside)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
    out = x * scale * weight
    tl.store(out_ptr + row * width + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(
    source_ptr,
    target_ptr,
    cos,
    sin,
    count,
    D: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Turn the pairs (2i, 2i + 1) of ``count`` heads; source and target may be the same."""
    heads = tl.arange(0, HEADS_PAD)
    pairs = tl.arange(0, HALF_PAD)
    inside = (heads < count)[:, None] & (pairs < D // 2)[None, :]
    at = heads[:, None] * D + pairs[None, :] * 2
    even = tl.load(source_ptr + at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(source_ptr + at + 1, mask=inside, other=0.0).to(tl.float32)
    kind = target_ptr.dtype.element_ty
    tl.store(target_ptr + at, (even * cos - odd * sin).to(kind), mask=inside)
    tl.store(target_ptr + at + 1, (even * sin + odd * cos).to(kind), mask=inside)


@triton.jit
def rope_write_kernel(
    qkv_ptr,
    positions_ptr,
    sequences_ptr,
    rotation_ptr,
    tables_ptr,
    k_ptr,
    v_ptr,
    table_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    H_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Rotate Q in place; rotate K and write it, and V, where the block table says.

    A row without a sequence (-1) only pads a batch and writes nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequences_ptr + row)
    if sequence < 0:
        return
    position = tl.load(positions_ptr + row)
    pairs = tl.arange(0, HALF_PAD)
    at = rotation_ptr + position.to(tl.int64) * D + pairs * 2
    cos = tl.load(at, mask=pairs < D // 2, other=0.0)[None, :]
    sin = tl.load(at + 1, mask=pairs < D // 2, other=0.0)[None, :]
    block = tl.load(tables_ptr + sequence.to(tl.int64) * table_stride + position // BLOCK)
    slot = (block.to(tl.int64) * BLOCK + position % BLOCK) * (K * D)
    q_ptr = qkv_ptr + row * ((H + 2 * K) * D)
    rotate_heads(q_ptr, q_ptr, cos, sin, H, D, H_PAD, HALF_PAD)
    rotate_heads(q_ptr + H * D, k_ptr + slot, cos, sin, K, D, K_PAD, HALF_PAD)
    heads, dims = tl.arange(0, K_PAD), tl.arange(0, D_PAD)
    inside = (heads < K)[:, None] & (dims < D)[None, :]
    offsets = heads[:, None] * D + dims[None, :]
    v = tl.load(q_ptr + (H + K) * D + offsets, mask=inside, other=0.0)
    tl.store(v_ptr + slot + offsets, v, mask=inside)


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, TILE: tl.constexpr):
    """``silu(gate) * up`` of rows that hold gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = offsets < width
    at = gate_up_ptr + row * width * 2 + offsets
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)
