"""Operations on each row between the matrix products: no program has two rows.

Everything is computed in fp32 and rounded once. The sum over the layers (``x``) stays in fp32.
"""

# ruff: noqa: N803 - constexpr are upper case

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x_ptr,
    delta_ptr,
    post_ptr,
    weight_ptr,
    out_ptr,
    width,
    eps,
    ADD: tl.constexpr,
    POST: tl.constexpr,
    NORM: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Compute ``x += delta`` (``ADD``), then ``out = x / rms(x) * weight`` (``NORM``).

    ``POST``: the added value is ``delta / rms(delta) * post``.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, WIDTH_PAD)
    inside = offsets < width
    x = tl.load(x_ptr + row * width + offsets, mask=inside, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + row * width + offsets, mask=inside, other=0.0).to(tl.float32)
        if POST:
            post = tl.load(post_ptr + offsets, mask=inside, other=0.0)
            delta = delta * (1.0 / tl.sqrt_rn(tl.sum(delta * delta, 0) / width + eps)) * post
        x += delta
        tl.store(x_ptr + row * width + offsets, x, mask=inside)
    if NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
        out = x * scale * weight
        tl.store(out_ptr + row * width + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def fp8_rows_kernel(x_ptr, out_ptr, scale_ptr, width, share, most, tiny, WIDTH_PAD: tl.constexpr):
    """Round each row to e4m3: its largest value times ``share`` is the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, WIDTH_PAD)
    inside = offsets < width
    x = tl.load(x_ptr + row * width + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) * share, tiny)
    y = tl.clamp(tl.div_rn(x, scale), -most, most)
    tl.store(out_ptr + row * width + offsets, y.to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def rotate_heads(
    source_ptr,
    target_ptr,
    bias_ptr,
    norm_ptr,
    cos,
    sin,
    first,
    count,
    eps,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Rotate the pairs (2i, 2i + 1) of ``HEADS`` heads from ``first`` on, of ``count`` in all.

    Source and target may be the same. First a bias is added (``BIASED``), then each head is normed
    (``NORMED``); both have one row per head.
    """
    heads = first + tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF_PAD)
    inside = (heads < count)[:, None] & (pairs < D // 2)[None, :]
    at = heads[:, None] * D + pairs[None, :] * 2
    even = tl.load(source_ptr + at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(source_ptr + at + 1, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        even += tl.load(bias_ptr + at, mask=inside, other=0.0)
        odd += tl.load(bias_ptr + at + 1, mask=inside, other=0.0)
    if NORMED:
        mean = tl.sum(even * even + odd * odd, 1) / D
        scale = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        even = even * scale * tl.load(norm_ptr + at, mask=inside, other=0.0)
        odd = odd * scale * tl.load(norm_ptr + at + 1, mask=inside, other=0.0)
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
    bias_ptr,
    norm_ptr,
    table_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Rotate Q in place; rotate K and store it, and V, in the slots of the block table.

    A program has a row and up to ``HEADS`` heads of Q, of K or of V: the parts of a row run side by
    side, since a decode step has few rows. ``bias`` has Q, K and V side by side, ``norm`` the heads
    of Q and of K. A row without a sequence (-1) is padding and stores nothing.
    """
    q_parts: tl.constexpr = (H + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (K + HEADS - 1) // HEADS
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
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
    k_at = H * D
    v_at = (H + K) * D
    if part < q_parts:
        rotate_heads(
            q_ptr, q_ptr, bias_ptr, norm_ptr, cos, sin, part * HEADS, H, eps,
            D, HEADS, HALF_PAD, BIASED, NORMED,
        )  # fmt: skip
    elif part < q_parts + kv_parts:
        rotate_heads(
            q_ptr + k_at, k_ptr + slot, bias_ptr + k_at, norm_ptr + k_at, cos, sin,
            (part - q_parts) * HEADS, K, eps, D, HEADS, HALF_PAD, BIASED, NORMED,
        )  # fmt: skip
    else:
        heads = (part - q_parts - kv_parts) * HEADS + tl.arange(0, HEADS)
        dims = tl.arange(0, D_PAD)
        inside = (heads < K)[:, None] & (dims < D)[None, :]
        offsets = heads[:, None] * D + dims[None, :]
        v = tl.load(q_ptr + v_at + offsets, mask=inside, other=0.0)
        if BIASED:
            v = v.to(tl.float32) + tl.load(bias_ptr + v_at + offsets, mask=inside, other=0.0)
        tl.store(v_ptr + slot + offsets, v.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(gate_up_ptr, out_ptr, width, GELU: tl.constexpr, TILE: tl.constexpr):
    """Compute ``silu(gate) * up`` of rows with gate and up side by side; ``GELU``: by tanh."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = offsets < width
    at = gate_up_ptr + row * width * 2 + offsets
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    out = gate / (1.0 + tl.exp(-inner)) * up
    tl.store(out_ptr + row * width + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)
