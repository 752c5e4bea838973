"""Device code of attention over a paged pool, launched by ``../attention.py``.

A program computes a *tile*: up to ``BLOCK_M // G`` consecutive queries of one sequence, for one KV
head, with the G query heads that share it packed into the rows of one matrix:

    row r of the tile  =  query ``r // G``, head ``kv_head * G + r % G``

Keys are read in tiles of ``KV_TILE`` that begin at multiples of it, and form *splits* of ``SPLIT``
tokens that begin at multiples of that. Splits are merged from left to right. So the order of sums
depends on a query's position alone: not on the batch, not on the query's chunk, and not on whether
one program had all splits or each split its own program.

Tiles are the columns of a table: first row, number of queries (0 = unused), first position,
sequence, and first item. An *item* is one split of a tile; the items of a tile are adjacent.

Keys go through a loop with a mask or one without, depending on the tile's first query. Both must
round alike: the one fused multiply-add is explicit, and the launches forbid all others.
"""

# ruff: noqa: N803 - constexpr are upper case

import triton
import triton.language as tl


@triton.jit
def attend_keys(
    q,
    positions,
    m,
    total,
    acc,
    lo,
    hi,
    end,
    table_ptr,
    k_ptr,
    v_ptr,
    token_stride,
    scale_log2,
    window,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run a tile's online softmax over keys ``lo ... hi - 1``; none from ``end`` on is read."""
    n_offsets = tl.arange(0, KV_TILE)
    d_offsets = tl.arange(0, D_PAD)
    d_inside = d_offsets < D
    for start in range(lo, hi, KV_TILE):
        n = start + n_offsets
        if MASKED:
            n_inside = n < end
            blocks = tl.load(table_ptr + n // BLOCK, mask=n_inside, other=0)
        else:
            blocks = tl.load(table_ptr + n // BLOCK)
        slots = (blocks.to(tl.int64) * BLOCK + n % BLOCK) * token_stride
        k_at = k_ptr + slots[None, :] + d_offsets[:, None]
        v_at = v_ptr + slots[:, None] + d_offsets[None, :]
        if MASKED:
            k = tl.load(k_at, mask=n_inside[None, :] & d_inside[:, None], other=0.0)
            v = tl.load(v_at, mask=n_inside[:, None] & d_inside[None, :], other=0.0)
        elif D != D_PAD:
            k = tl.load(k_at, mask=d_inside[:, None], other=0.0)
            v = tl.load(v_at, mask=d_inside[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        s = tl.dot(q, k, input_precision=PRECISION)
        if MASKED:
            seen = n[None, :] <= positions[:, None]
            if WINDOWED:
                seen = seen & (n[None, :] > positions[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        m_used = m_new
        if MASKED:
            m_used = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that sees nothing yet
        alpha = tl.exp2(m - m_used)
        p = tl.exp2(tl.fma(s, scale_log2, -m_used[:, None]))
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return m, total, acc


@triton.jit
def attend_split(
    q,
    positions,
    lo,
    hi,
    first,
    end,
    table_ptr,
    k_ptr,
    v_ptr,
    token_stride,
    scale_log2,
    window,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KV_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return maximum, sum and weighted values of a tile over one range of keys.

    Keys that every query of the tile sees (``first`` is the tile's first position) need no mask.
    """
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    middle = lo
    if not WINDOWED:
        middle = tl.maximum(lo, tl.minimum(hi, (first + 1) // KV_TILE * KV_TILE))
        m, total, acc = attend_keys(
            q, positions, m, total, acc, lo, middle, end, table_ptr, k_ptr, v_ptr, token_stride,
            scale_log2, window, D, D_PAD, BLOCK, KV_TILE, False, WINDOWED, PRECISION,
        )  # fmt: skip
    m, total, acc = attend_keys(
        q, positions, m, total, acc, middle, hi, end, table_ptr, k_ptr, v_ptr, token_stride,
        scale_log2, window, D, D_PAD, BLOCK, KV_TILE, True, WINDOWED, PRECISION,
    )  # fmt: skip
    return m, total, acc


@triton.jit
def merge(m, total, acc, m_next, total_next, acc_next):
    """Merge the state over the keys so far with the split that follows them."""
    m_new = tl.maximum(m, m_next)
    m_used = tl.where(m_new == float("-inf"), 0.0, m_new)
    before = tl.exp2(m - m_used)
    after = tl.exp2(m_next - m_used)
    total_new = total * before + total_next * after
    acc_new = acc * before[:, None] + acc_next * after[:, None]
    return m_new, total_new, acc_new


@triton.jit(do_not_specialize=["num_tiles", "num_items"])
def list_items_kernel(
    tiles_ptr,
    items_ptr,
    num_tiles,
    num_items,
    SPLIT: tl.constexpr,
    TILES_PAD: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Write ``(tile, split)`` of some items, tile -1 for those behind the last, and first items."""
    tile = tl.arange(0, TILES_PAD)
    inside = tile < num_tiles
    count = tl.load(tiles_ptr + num_tiles + tile, mask=inside, other=0)
    first = tl.load(tiles_ptr + 2 * num_tiles + tile, mask=inside, other=0)
    splits = tl.where(count > 0, (first + count + SPLIT - 1) // SPLIT, 0)
    ends = tl.cumsum(splits, 0)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    ended = (ends[None, :] <= item[:, None]) & inside[None, :]
    owner = tl.sum(ended.to(tl.int32), 1)
    begin = tl.max(tl.where(ended, ends[None, :], 0), 1)
    item_inside = item < num_items
    tl.store(items_ptr + item, tl.where(owner < num_tiles, owner, -1), mask=item_inside)
    tl.store(items_ptr + num_items + item, item - begin, mask=item_inside)
    if tl.program_id(0) == 0:
        tl.store(tiles_ptr + 4 * num_tiles + tile, ends - splits, mask=inside)


@triton.jit(do_not_specialize=["num_tiles", "programs", "rows_per_tile", "window"])
def attend_kernel(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    tiles_ptr,
    items_ptr,
    partial_ptr,
    stats_ptr,
    num_tiles,
    programs,
    rows_per_tile,
    q_row_stride,
    table_stride,
    token_stride,
    scale_log2,
    window,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KV_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTIAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend over all keys of a tile, or with ``PARTIAL`` over one item.

    There are ``programs`` of them for each KV head, over two dimensions of the grid.
    ``SPLIT`` 0 (not with ``PARTIAL``): all keys are one split.
    """
    kv_head = tl.program_id(0)  # heads are neighbours: together they read whole pages
    num_kv_heads = tl.num_programs(0)
    item = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    tile = item
    if item >= programs:
        return
    if PARTIAL:
        tile = tl.load(items_ptr + item)
        if tile < 0:
            return
    count = tl.load(tiles_ptr + num_tiles + tile)
    if count == 0:
        return
    row0 = tl.load(tiles_ptr + tile)
    first = tl.load(tiles_ptr + 2 * num_tiles + tile)
    sequence = tl.load(tiles_ptr + 3 * num_tiles + tile)
    end = first + count
    begin = end * 0
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0) // KV_TILE * KV_TILE
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    k_ptr += kv_head * D
    v_ptr += kv_head * D

    r = tl.arange(0, BLOCK_M)
    query = r // G
    head = kv_head * G + r % G
    r_inside = query < count
    positions = tl.where(r_inside, first + query, first)
    d_offsets = tl.arange(0, D_PAD)
    inside = r_inside[:, None] & (d_offsets < D)[None, :]
    rows = (row0 + query).to(tl.int64)
    q_at = q_ptr + rows[:, None] * q_row_stride + head[:, None] * D + d_offsets[None, :]

    if PARTIAL:
        split = tl.load(items_ptr + programs + item)
        lo = tl.maximum(split * SPLIT, begin)
        hi = tl.minimum(split * SPLIT + SPLIT, end)
        if lo < hi:
            q = tl.load(q_at, mask=inside, other=0.0)
            m, total, acc = attend_split(
                q, positions, lo, hi, first, end, table_ptr, k_ptr, v_ptr, token_stride, scale_log2,
                window, D, D_PAD, BLOCK, BLOCK_M, KV_TILE, WINDOWED, PRECISION,
            )  # fmt: skip
            cell = item.to(tl.int64) * num_kv_heads + kv_head
            part = cell * rows_per_tile + r
            tl.store(partial_ptr + part[:, None] * D + d_offsets[None, :], acc, mask=inside)
            tl.store(stats_ptr + part * 2, m, mask=r_inside)
            tl.store(stats_ptr + part * 2 + 1, total, mask=r_inside)
    else:
        q = tl.load(q_at, mask=inside, other=0.0)
        if SPLIT == 0:
            m, total, acc = attend_split(
                q, positions, begin, end, first, end, table_ptr, k_ptr, v_ptr, token_stride,
                scale_log2, window, D, D_PAD, BLOCK, BLOCK_M, KV_TILE, WINDOWED, PRECISION,
            )  # fmt: skip
        else:
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
            for start in range(begin // SPLIT * SPLIT, end, SPLIT):
                lo = tl.maximum(start, begin)
                hi = tl.minimum(start + SPLIT, end)
                m_next, total_next, acc_next = attend_split(
                    q, positions, lo, hi, first, end, table_ptr, k_ptr, v_ptr, token_stride,
                    scale_log2, window, D, D_PAD, BLOCK, BLOCK_M, KV_TILE, WINDOWED, PRECISION,
                )  # fmt: skip
                m, total, acc = merge(m, total, acc, m_next, total_next, acc_next)
        out = acc / total[:, None]
        num_heads = num_kv_heads * G
        out_at = out_ptr + (rows * num_heads + head)[:, None] * D + d_offsets[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tiles", "rows_per_tile", "window"])
def reduce_kernel(
    out_ptr,
    tiles_ptr,
    partial_ptr,
    stats_ptr,
    num_tiles,
    num_kv_heads,
    rows_per_tile,
    window,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    KV_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Merge the splits of some rows of a tile, from left to right."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    count = tl.load(tiles_ptr + num_tiles + tile)
    r_inside = r // G < count
    row = tl.load(tiles_ptr + tile) + r // G
    first = tl.load(tiles_ptr + 2 * num_tiles + tile)
    end = first + count
    begin = end * 0
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0) // KV_TILE * KV_TILE // SPLIT
    last = tl.where(count > 0, (end + SPLIT - 1) // SPLIT, 0)
    d_offsets = tl.arange(0, D_PAD)
    inside = r_inside[:, None] & (d_offsets < D)[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    item0 = tl.load(tiles_ptr + 4 * num_tiles + tile).to(tl.int64)
    for base in range(begin, last, UNROLL):
        for step in tl.static_range(UNROLL):  # loads of several splits are in flight together
            there = base + step < last
            cell = (item0 + base + step) * num_kv_heads + kv_head
            part = cell * rows_per_tile + r
            values_at = partial_ptr + part[:, None] * D + d_offsets[None, :]
            acc_next = tl.load(values_at, mask=inside & there, other=0.0)
            m_next = tl.load(stats_ptr + part * 2, mask=r_inside & there, other=float("-inf"))
            total_next = tl.load(stats_ptr + part * 2 + 1, mask=r_inside & there, other=0.0)
            m, total, acc = merge(m, total, acc, m_next, total_next, acc_next)
    head = kv_head * G + r % G
    out_row = row.to(tl.int64) * (num_kv_heads * G) + head
    out_at = out_ptr + out_row[:, None] * D + d_offsets[None, :]
    out = acc / tl.where(r_inside, total, 1.0)[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
