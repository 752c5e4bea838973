"""Paged attention on CUDA: tiles of a step's queries, and the launches.

    T rows of a step, N tiles, I items, H query heads, K KV heads, G = H / K, D head dim,
    S sequences

The pool is ``[layer, k|v, block, token, head, dim]``, as on the CPU. The rows of one head are 256
bytes apart, multiplied by the number of heads. So each load is whole sectors, and the programs of
the other heads, which run side by side, read the rest of the same pages.

Nothing here waits for the device: grids are known on the host, lengths are read by the kernels.
"""

# ruff: noqa: N803, N806, N815 - suffixes such as q_THD give shapes

import itertools
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
_LISTED = 16_384  # pairs of item and tile in one program that lists items
_GRID_LIMIT = 65_535  # of CUDA, for the second dimension of a grid


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
        table_5N: int32 rows: first row, queries (0 = nothing to do), first position, sequence,
            first item.
        items_2I: int32 rows: tile, split; tile -1 = nothing to do. ``None``: each program processes
            all keys of a tile.
        max_queries: Limit of the queries of a tile.
    """

    table_5N: torch.Tensor
    items_2I: torch.Tensor | None
    max_queries: int


def tile_tables(
    spans: Sequence[Span], queries: int, *, split: int = 0, aligned: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return both tables of ``Tiles``, in host memory, for spans cut by ``tiles_of``.

    With ``split``, tiles are spread over programs, one for each ``split`` keys, unless each tile
    has so few keys that one program processes them.
    """
    tiles = tiles_of(spans, queries, aligned=aligned)
    splits = [-(-(position + count) // split) if split else 1 for _, count, position, _ in tiles]
    first_items = [0, *itertools.accumulate(splits)][:-1]
    columns = [(*tile, item) for tile, item in zip(tiles, first_items, strict=True)]
    table_5N = torch.tensor(columns, dtype=torch.int32).t()
    if max(splits) == 1:
        return table_5N, None
    items = [(tile, number) for tile, count in enumerate(splits) for number in range(count)]
    return table_5N, torch.tensor(items, dtype=torch.int32).t()


def make_tiles(
    spans: Sequence[Span],
    queries: int,
    device: torch.device,
    *,
    split: int = 0,
    aligned: bool = True,
) -> Tiles:
    """Return the tiles of ``tile_tables`` on the device."""
    table_5N, items_2I = tile_tables(spans, queries, split=split, aligned=aligned)
    items = None if items_2I is None else items_2I.contiguous().to(device)
    return Tiles(table_5N.contiguous().to(device), items, queries)


def list_items(table_5N: torch.Tensor, items_2I: torch.Tensor, split: int) -> None:
    """Write the items of the tiles, and the tiles' first items; for some hundred tiles."""
    count = table_5N.shape[1]
    num_items = items_2I.shape[1]
    padded = triton.next_power_of_2(count)
    per_program = min(max(_LISTED // padded, 1), 64)
    device.list_items_kernel[(triton.cdiv(num_items, per_program),)](
        table_5N,
        items_2I,
        count,
        num_items,
        SPLIT=split,
        TILES_PAD=padded,
        ITEMS=per_program,
        num_warps=4,
    )


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
        ValueError: The tiles have more queries than the configuration has rows, or items without a
            split size.
    """
    _, _, block, kv_heads, dim = pool_2BTKD.shape
    heads = q_THD.shape[1]
    group = heads // kv_heads
    if tiles.max_queries * group > config.block_m:
        raise ValueError(f"{tiles.max_queries} queries of {group} heads exceed {config.block_m}")
    if tiles.items_2I is not None and not config.split:
        raise ValueError("items need a configuration with a split size")
    count = tiles.table_5N.shape[1]
    programs = count
    rows = tiles.max_queries * group
    # unused without items
    items = tiles.table_5N
    partial = q_THD
    stats = q_THD
    if tiles.items_2I is not None:
        items = tiles.items_2I
        programs = items.shape[1]
        cells = programs * kv_heads * rows
        buffer = workspace.get(cells * (dim + 2))
        partial = buffer
        stats = buffer[cells * dim :]
    padded = triton.next_power_of_2(dim)
    windowed = window > 0
    width = min(programs, _GRID_LIMIT)
    grid = (kv_heads, width, triton.cdiv(programs, width))
    device.attend_kernel[grid](
        q_THD,
        out_THD,
        pool_2BTKD[0],
        pool_2BTKD[1],
        tables_SB,
        tiles.table_5N,
        items,
        partial,
        stats,
        count,
        programs,
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
        PARTIAL=tiles.items_2I is not None,
        WINDOWED=windowed,
        PRECISION="ieee",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    if tiles.items_2I is not None:
        per_program = min(triton.next_power_of_2(rows), _REDUCE_ROWS)
        device.reduce_kernel[(count, kv_heads, triton.cdiv(rows, per_program))](
            out_THD,
            tiles.table_5N,
            partial,
            stats,
            count,
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
