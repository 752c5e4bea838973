"""Copies of KV blocks within a pool, and between the pools of the device and of the host."""

# ruff: noqa: N803 - constexpr are upper case

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs"])
def copy_blocks_kernel(
    source_ptr,
    target_ptr,
    blocks_ptr,
    pairs,
    source_blocks,
    target_blocks,
    width,
    TILE: tl.constexpr,
):
    """Copy one tile of one layer's K or V of one block.

    Pools are ``[layer and K or V, block, width]``; ``blocks`` has the source ids, then the targets.
    """
    pair = tl.program_id(0)
    part = tl.program_id(1).to(tl.int64)
    source = tl.load(blocks_ptr + pair)
    target = tl.load(blocks_ptr + pairs + pair)
    offsets = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = offsets < width
    values = tl.load(source_ptr + (part * source_blocks + source) * width + offsets, mask=inside)
    tl.store(target_ptr + (part * target_blocks + target) * width + offsets, values, mask=inside)
