"""Paged attention on CUDA: tiles of a step's queries, and the launches.

    T rows of a step, N tiles, H query heads, K KV heads, G = H / K, D head dim, S sequences

The pool is ``[layer, k|v, block, token, head, dim]``, as on the CPU. The rows of one head are 256
bytes apart, multiplied by the number of heads. So each load is whole sectors, and the programs of
the other heads, which run side by side, read the rest of the same pages.

Nothing here waits for the device: grids are known on the host, lengths are read by the kernels.
"""

# ruff: noqa: N803, N815 - suffixes such as q_THD give shapes

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from baton.engine.cuda.kernels.configs import AttentionConfig
from baton.engine.cuda.kernels.device import attention as device

_LOG2E = 1.4426950408889634
_UNROLL = 8  # splits whose loads are in flight together
_REDUCE_ROWS = 4


@dataclass(frozen=True, slots=True)
class Span:
    """Queries of one sequence: rows ``row ... row + count - 1`` at positions ``start ...``."""

    row: int
    start: int
    count: int
    sequence: int  # row of the block tables


def tiles_of(
    spans: Sequence[Span], queries: int, *, aligned: bool = True
) -> list[tuple[int, int, int, int]]:
    """Cut spans into tiles ``(row, count, position, sequence)`` of at most ``queries`` queries.

    ``aligned`` tiles begin at positions that are multiples of ``queries``, wherever the chunk
    begins. Others begin where the chunk does, so a short chunk has fewer of them. Tiles with the
    most keys come first, so that none of them runs alone at the end.
    """
    tiles = []
    for span in spans:
        end = span.start + span.count
        begin = span.start
        while begin < end:
            stop = min(end, begin - (begin % queries if aligned else 0) + queries)
            tiles.append((span.row + begin - span.start, stop - begin, begin, span.sequence))
            begin = stop
    tiles.sort(key=lambda tile: -tile[2])
    return tiles


class Workspace:
    """Partial results of the splits, shared by all layers.

    A CUDA graph keeps the addresses with which it was captured, so used buffers are never freed.
    Each is at least twice the one before, so all together are at most twice the largest.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []

    def get(self, elements: int) -> torch.Tensor:
        """Return an fp32 buffer of at least ``elements``."""
        have = self._buffers[-1].numel() if self._buffers else 0
        if have < elements:
            size = max(elements, 2 * have)
            self._buffers.append(torch.empty(size, dtype=torch.float32, device=self._device))
        return self._buffers[-1]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one launch.

    Attributes:
        table_4N: int32 rows: first row, queries (0 = nothing to do), first position, sequence.
        splits: 0: each program processes all keys; else the number of splits of the grid, at least
            as many as the longest sequence needs.
    """

    table_4N: torch.Tensor
    splits: int
    max_queries: int


def paged_attention(
    q_THD: torch.Tensor,
    pool_2BTKD: torch.Tensor,
    tables_SB: torch.Tensor,
    tiles: Tiles,
    out_THD: torch.Tensor,
    config: AttentionConfig,
    workspace: Workspace,
    *,
    window: int = 0,
) -> None:
    """Attend over one layer's pages, which hold the queries' own K and V: causal, grouped.

    Args:
        q_THD: Queries; a row may be part of a wider one.
        pool_2BTKD: K and V of one layer.
        tables_SB: Block ids by sequence, int32.
        tiles: Tiles of the queries; rows in no tile are not changed.
        out_THD: Results, contiguous; written.
        config: Sizes of tiles and splits.
        workspace: Memory for the splits.
        window: Keys that a query sees, itself included; 0 = all.

    Raises:
        ValueError: The tiles have more queries than the configuration has rows, or no split size.
    """
    _, _, block, kv_heads, dim = pool_2BTKD.shape
    heads = q_THD.shape[1]
    group = heads // kv_heads
    if tiles.max_queries * group > config.block_m:
        raise ValueError(f"{tiles.max_queries} queries of {group} heads exceed {config.block_m}")
    if tiles.splits and not config.split:
        raise ValueError("splits need a configuration with a split size")
    count = tiles.table_4N.shape[1]
    rows = tiles.max_queries * group
    # unused without splits
    partial = q_THD
    stats = q_THD
    if tiles.splits:
        cells = count * kv_heads * tiles.splits * rows
        buffer = workspace.get(cells * (dim + 2))
        partial = buffer
        stats = buffer[cells * dim :]
    padded = triton.next_power_of_2(dim)
    windowed = window > 0
    grid = (kv_heads, count, max(tiles.splits, 1))
    device.attend_kernel[grid](
        q_THD,
        out_THD,
        pool_2BTKD[0],
        pool_2BTKD[1],
        tables_SB,
        tiles.table_4N,
        partial,
        stats,
        count,
        rows,
        q_THD.stride(0),
        tables_SB.stride(0),
        kv_heads * dim,
        _LOG2E / math.sqrt(dim),
        window,
        G=group,
        D=dim,
        D_PAD=padded,
        BLOCK=block,
        BLOCK_M=config.block_m,
        KV_TILE=config.kv_tile,
        SPLIT=config.split,
        PARTIAL=tiles.splits > 0,
        WINDOWED=windowed,
        PRECISION="ieee",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    if tiles.splits:
        per_program = min(triton.next_power_of_2(rows), _REDUCE_ROWS)
        device.reduce_kernel[(count, kv_heads, triton.cdiv(rows, per_program))](
            out_THD,
            tiles.table_4N,
            partial,
            stats,
            count,
            tiles.splits,
            kv_heads,
            rows,
            window,
            G=group,
            D=dim,
            D_PAD=padded,
            KV_TILE=config.kv_tile,
            SPLIT=config.split,
            WINDOWED=windowed,
            ROWS=per_program,
            UNROLL=_UNROLL,
            num_warps=4,
            enable_fp_fusion=False,
        )
