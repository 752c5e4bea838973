"""Paged attention on CUDA: what a step's queries are cut into, and the launches.

    T rows of a step, N tiles, H query heads, K KV heads, G = H / K, D head dim, S sequences

The pool is ``[layer, k|v, block, token, head, dim]``, as on the CPU: the rows of one head are 256
bytes apart by the number of heads, so each load is whole sectors, and the programs of the other
heads, which run side by side, read the rest of the same pages.

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
    """One sequence's queries: rows ``row ... row + count - 1`` at positions ``start ...``."""

    row: int
    start: int
    count: int
    sequence: int  # row of the block tables


def tiles_of(
    spans: Sequence[Span], queries: int, *, aligned: bool = True
) -> list[tuple[int, int, int, int]]:
    """Cut spans into tiles ``(row, count, position, sequence)`` of at most ``queries`` queries.

    ``aligned`` tiles begin at positions that are multiples of ``queries``, wherever the chunk
    begins; else at the chunk's begin, which makes fewer of them out of a short one. Those
    with the most keys come first, so that none of them is left alone at the end.
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

    A CUDA graph keeps the addresses that it was captured with, so buffers that were handed out are
    never given back; as each is at least twice the one before, all together are at most twice the
    largest.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []

    def get(self, elements: int) -> torch.Tensor:
        """An fp32 buffer of at least ``elements``."""
        have = self._buffers[-1].numel() if self._buffers else 0
        if have < elements:
            size = max(elements, 2 * have)
            self._buffers.append(torch.empty(size, dtype=torch.float32, device=self._device))
        return self._buffers[-1]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one launch.

    Attributes:
        table_4N: int32 rows: first row, queries (0 = nothing to do), first position, sequence.
        splits: 0: each program goes over all keys; else the grid has so many splits, at least
            as many as the longest sequence needs.
        max_queries: Most queries of a tile.
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
    """Attend: causal, grouped, over one layer's pages; K and V of the queries are in them already.

    Args:
        q_THD: Queries; a row may be part of a wider one.
        pool_2BTKD: K and V of one layer.
        tables_SB: int32 block ids by sequence.
        tiles: Which queries; rows of no tile are left as they are.
        out_THD: Takes the results, contiguous.
        config: How to cut.
        workspace: For the splits.
        window: Keys a query sees, itself included; 0 = all.

    Raises:
        ValueError: The tiles hold more queries than the cut has rows, or there is no split size.
    """
    _, _, block, kv_heads, dim = pool_2BTKD.shape
    heads = q_THD.shape[1]
    group = heads // kv_heads
    if tiles.max_queries * group > config.block_m:
        raise ValueError(f"{tiles.max_queries} queries of {group} heads exceed {config.block_m}")
    if tiles.splits and not config.split:
        raise ValueError("a cut without split cannot be spread over splits")
    count = tiles.table_4N.shape[1]
    rows = tiles.max_queries * group
    # not touched without splits
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
        )
