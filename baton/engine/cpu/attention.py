"""Attention over a paged KV pool: one routine for prefill chunks, decode steps, and mixtures.

A step's rows are grouped into *calls* of the CPU flash kernel. Query heads that share a KV head are
packed into one matrix, so that the kernel reads K and V once:

    q [rows, H, D]  ->  [B, Hkv, queries * G, D]        G = H / Hkv

**Why the bits do not depend on the path** (``exact``). The kernel's sums depend on its number of
keys and, for very few query rows, on that number too. So the number of keys is a function of the
position alone, ``ceil((p + 1) / unit) * unit``, and the rest is masked. Prefill is cut into tiles
that end at multiples of ``unit``. No call has fewer than ``min_rows`` query rows (or, where the
kernels require it, all have exactly the same number). ``choose_tiling`` measures what this machine
needs, and raises an error if nothing works.

**Sliding windows.** In a layer with a window of W, the query at ``p`` sees the keys ``p - W + 1``
to ``p``. Its keys begin at a multiple of ``unit`` too (``AttentionTiling.first_key``), so their
start and number are functions of the position, as above. A step is planned once for each distinct
window; ``run`` takes the plan of its layer. Blocks before the window are not read, and not freed
either: all layers share one block table.

Masked keys are read: their weight is zero, but zero times NaN is NaN. So the pool should hold
finite values everywhere, and the runner computes a row that meets NaN again, isolated from others.
"""

# ruff: noqa: N803, N806 - suffixes such as q_THD give shapes

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.cpu.kv_codec import KvCodec
from baton.engine.cpu.rows import with_sink
from baton.types.geometry import KvGeometry

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001

_VIEW_TOKENS = 512  # from this length on, a call per sequence is cheaper than copying the keys


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """Units in which queries and keys are cut.

    Attributes:
        unit: The number of keys is a multiple of this many tokens.
        tile: Queries of one prefill call; divides ``unit`` in ``exact``.
        align: Queries of a prefill call begin and end at multiples of this.
        decode_rows: Query rows per KV head of a decode call.
    """

    unit: int
    tile: int
    align: int
    decode_rows: int

    def keys(self, position: int) -> int:
        """Return the number of keys in a call with the query at ``position``."""
        return -(-(position + 1) // self.unit) * self.unit

    def first_key(self, position: int, window: int | None) -> int:
        """Return the first of the keys in a call with the query at ``position``.

        It is the same for all positions of a unit, so that rows with equal ``keys`` share a call.
        """
        if window is None:
            return 0
        begin = position // self.unit * self.unit
        return max(0, begin - window + 1) // self.unit * self.unit


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Queries of one sequence: rows ``row ... row + count - 1`` at positions ``start ...``."""

    row: int
    start: int
    count: int
    blocks: Sequence[int]


@dataclass(slots=True)
class _Keys:
    """Location of a call's keys: a view of the pool, or blocks to gather."""

    first_token: int = -1
    stride_tokens: int = 0
    gather: torch.Tensor | None = None


@dataclass(slots=True)
class _Decode:
    """Sequences with one query each, all with the same number of keys."""

    row: int
    count: int
    keys: int
    where: _Keys
    mask: torch.Tensor  # [B, 1, 1, keys]


@dataclass(slots=True)
class _Tile:
    begin: int  # in packed query rows of the chunk, multiplied by G
    end: int
    keys: slice  # of the chunk's keys
    mask: torch.Tensor  # [1, 1, (end - begin), keys]


@dataclass(slots=True)
class _Chunk:
    row: int
    count: int
    lead: int  # padding queries before the first
    padded: int
    keys: int
    where: _Keys
    tiles: list[_Tile]


@dataclass(slots=True)
class _Write:
    """Destination of rows of K and V: consecutive slots from ``first``, or ``slots``."""

    rows: slice
    first: int
    slots: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """Plan of one step: destinations of its K and V, and the calls for each distinct window."""

    writes: Sequence[_Write]
    by_window: Mapping[int | None, Sequence[_Decode | _Chunk]]


def slots_of(
    start: int, count: int, blocks: Sequence[int], block_tokens: int
) -> npt.NDArray[np.int64]:
    """Return the pool's slots of positions ``start ...`` of a sequence."""
    positions = np.arange(start, start + count)
    table = np.asarray(blocks, dtype=np.int64)
    slots: npt.NDArray[np.int64] = (
        table[positions // block_tokens] * block_tokens + positions % block_tokens
    )
    return slots


class Attention(Protocol):
    """Interface of attention over a paged pool."""

    def plan(
        self, decodes: Sequence[QuerySpan], chunks: Sequence[QuerySpan], *, isolated: bool = False
    ) -> Any:
        """Plan the calls of one step, for all layers."""

    def sort_key(self, position: int, blocks: Sequence[int]) -> tuple[int, int]:
        """Return the sort key of a decode row for the best layout."""

    def write(self, layer: int, calls: Any, kv: torch.Tensor) -> None:
        """Store K and V of the step's rows, ``[2, T, K, D]``."""

    def run(self, layer: int, calls: Any, q_THD: torch.Tensor) -> torch.Tensor:
        """Attend, ``[T, H, D] -> [T, H * D]``, over the pool of one layer."""


class PagedAttention:
    """Attention over ``pool``, a tensor of ``geometry.shape``, by torch's flash kernel.

    Args:
        pool: The KV pool; the caller keeps every value in it finite.
        windows: Keys that a query sees, its own included, for each layer; ``None`` is all of them.
        kv_heads: KV heads that are read here, if not all (``num_heads`` are their queries).
        sinks: Score of each head without a value, fp32, by layer.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        geometry: KvGeometry,
        num_heads: int,
        tiling: AttentionTiling,
        windows: Sequence[int | None] = (),
        kv_heads: range | None = None,
        codec: KvCodec | None = None,
        sinks: Sequence[torch.Tensor] = (),
    ) -> None:
        self.tiling = tiling
        self._heads = num_heads
        self._kv_heads = geometry.num_kv_heads if kv_heads is None else len(kv_heads)
        self._group = num_heads // self._kv_heads
        self._sinks = sinks
        self._dim = geometry.head_dim
        self._block_tokens = geometry.block_tokens
        self._num_blocks = geometry.num_blocks
        tokens = geometry.num_blocks * geometry.block_tokens
        self._stored = geometry.head_elements
        width = self._row = geometry.num_kv_heads * self._stored
        self._codec = codec
        self.tokens = list(
            pool.view(geometry.num_layers, 2, tokens, geometry.num_kv_heads, self._stored)
        )
        self._blocks = list(
            pool.view(geometry.num_layers, 2, geometry.num_blocks, geometry.block_tokens * width)
        )
        if kv_heads is not None:
            mine = slice(kv_heads.start, kv_heads.stop)
            self.tokens = [tokens[:, :, mine] for tokens in self.tokens]
            self._blocks = [layer[..., mine, :] for layer in pool]
        self._dtype = pool.dtype if codec is None else codec.dtype
        self._scale = geometry.head_dim**-0.5
        self._isolated = False
        self._windows = tuple(windows) or (None,) * geometry.num_layers

    def plan(
        self, decodes: Sequence[QuerySpan], chunks: Sequence[QuerySpan], *, isolated: bool = False
    ) -> AttentionCalls:
        """Plan the calls of one step.

        Args:
            decodes: Spans with one query, in row order, sorted by ``sort_key``.
            chunks: Spans with any number of queries.
            isolated: Read only the sequences' own blocks, with equal bits but more slowly.
        """
        self._isolated = isolated
        by_window = {w: self._calls(decodes, chunks, w) for w in set(self._windows)}
        return AttentionCalls(self._writes(decodes, chunks), by_window)

    def _writes(self, decodes: Sequence[QuerySpan], chunks: Sequence[QuerySpan]) -> list[_Write]:
        size = self._block_tokens
        writes = []
        if decodes:
            slots = [s.blocks[s.start // size] * size + s.start % size for s in decodes]
            begin = decodes[0].row
            writes.append(_Write(slice(begin, begin + len(decodes)), -1, torch.tensor(slots)))
        for span in chunks:
            rows = slice(span.row, span.row + span.count)
            own = slots_of(span.start, span.count, span.blocks, size)
            if (np.diff(own) == 1).all():
                writes.append(_Write(rows, int(own[0]), None))
            else:
                writes.append(_Write(rows, -1, torch.from_numpy(own)))
        return writes

    def _calls(
        self, decodes: Sequence[QuerySpan], chunks: Sequence[QuerySpan], window: int | None
    ) -> list[_Decode | _Chunk]:
        calls: list[_Decode | _Chunk] = []
        begin = 0
        while begin < len(decodes):
            keys = self.tiling.keys(decodes[begin].start)
            end = begin + 1
            while end < len(decodes) and self.tiling.keys(decodes[end].start) == keys:
                end += 1
            first_key = self.tiling.first_key(decodes[begin].start, window)
            calls += self._decode_calls(decodes[begin:end], first_key, keys, window)
            begin = end
        calls += [self._chunk(span, window) for span in chunks]
        return calls

    def sort_key(self, position: int, blocks: Sequence[int]) -> tuple[int, int]:
        """Sort equal lengths, and neighbours in the pool, together."""
        return self.tiling.keys(position), blocks[0]

    def _decode_calls(
        self, spans: Sequence[QuerySpan], first_key: int, end_key: int, window: int | None
    ) -> list[_Decode | _Chunk]:
        positions = torch.tensor([span.start for span in spans])
        mask = self._mask(positions, first_key, end_key, window)[:, None, None]
        keys = end_key - first_key
        firsts = [self._view(span, first_key, keys) for span in spans]
        stride = self._common_stride(firsts)
        if stride is not None:
            where = _Keys(first_token=firsts[0], stride_tokens=stride)
            return [_Decode(spans[0].row, len(spans), keys, where, mask)]
        if keys < _VIEW_TOKENS:
            where = self._gather(spans, first_key, keys)
            return [_Decode(spans[0].row, len(spans), keys, where, mask)]
        calls: list[_Decode | _Chunk] = []
        for index, (span, first) in enumerate(zip(spans, firsts, strict=True)):
            where = (
                _Keys(first_token=first) if first >= 0 else self._gather([span], first_key, keys)
            )
            calls.append(_Decode(span.row, 1, keys, where, mask[index : index + 1]))
        return calls

    def _mask(
        self, positions_Q: torch.Tensor, first_key: int, end_key: int, window: int | None
    ) -> torch.Tensor:
        """Return ``[Q, keys]``: 0 where a query sees a key, else minus infinity."""
        keys = torch.arange(first_key, end_key)
        queries = positions_Q.view(-1, 1)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        return mask.masked_fill_(hidden, float("-inf"))

    @staticmethod
    def _common_stride(firsts: Sequence[int]) -> int | None:
        """Return the tokens between the sequences if a strided view covers all, else ``None``."""
        if min(firsts) < 0:
            return None
        if len(firsts) == 1:
            return 0
        stride = firsts[1] - firsts[0]
        steps = pairwise(firsts)
        return stride if stride > 0 and all(b - a == stride for a, b in steps) else None

    def _view(self, span: QuerySpan, first_key: int, keys: int) -> int:
        """Return the pool token of ``first_key`` if the keys are contiguous, else -1."""
        size = self._block_tokens
        blocks = span.blocks
        skipped = first_key // size
        needed = -(-(span.start + span.count) // size)
        first = blocks[skipped]
        fits = first + keys // size <= self._num_blocks and not self._isolated
        if not fits or blocks[needed - 1] != first + needed - 1 - skipped:
            return -1
        if any(blocks[i] != first + i - skipped for i in range(skipped + 1, needed - 1)):
            return -1
        return first * size

    def _gather(self, spans: Sequence[QuerySpan], first_key: int, keys: int) -> _Keys:
        skipped = first_key // self._block_tokens
        count = keys // self._block_tokens
        index = []
        for span in spans:
            needed = -(-(span.start + span.count) // self._block_tokens)
            own = span.blocks[skipped:needed]
            # blocks after the end are masked: any block will do, as all hold finite values
            index += [*own, *([span.blocks[0]] * (count - len(own)))]
        return _Keys(gather=torch.tensor(index))

    def _chunk(self, span: QuerySpan, window: int | None) -> _Chunk:
        tiling = self.tiling
        group = self._group
        end = span.start + span.count
        lead = span.start % tiling.align
        base = span.start - lead
        limit = -(-end // tiling.align) * tiling.align
        origin = tiling.first_key(base, window)
        tiles = []
        begin = base
        while begin < limit:
            stop = min((begin // tiling.tile + 1) * tiling.tile, limit)
            first = tiling.first_key(begin, window)
            last = tiling.keys(stop - 1)
            mask = self._mask(torch.arange(begin, stop), first, last, window)
            mask = mask.repeat_interleave(group, 0)[None, None]
            keys = slice(first - origin, last - origin)
            tiles.append(_Tile((begin - base) * group, (stop - base) * group, keys, mask))
            begin = stop
        count = tiles[-1].keys.stop
        view = self._view(span, origin, count)
        where = _Keys(first_token=view) if view >= 0 else self._gather([span], origin, count)
        return _Chunk(span.row, span.count, lead, limit - base, count, where, tiles)

    def write(self, layer: int, plan: AttentionCalls, kv: torch.Tensor) -> None:
        """Store ``[2, T, K, D]`` in the slots of the step's rows."""
        tokens = self.tokens[layer]  # [2, slots, K, elements]
        if self._codec is not None:
            kv = self._codec.encode(kv)
        for write in plan.writes:
            if write.slots is not None:
                tokens.index_copy_(1, write.slots, kv[:, write.rows])
            else:
                count = write.rows.stop - write.rows.start
                tokens[:, write.first : write.first + count].copy_(kv[:, write.rows])

    def run(self, layer: int, plan: AttentionCalls, q_THD: torch.Tensor) -> torch.Tensor:
        """Attend, ``[T, H, D] -> [T, H * D]``, over the pool of one layer."""
        calls = plan.by_window[self._windows[layer]]
        if len(calls) == 1 and isinstance(calls[0], _Decode):
            return self._run_decode(layer, calls[0], q_THD)
        out = q_THD.new_empty(q_THD.shape[0], self._heads * self._dim)
        for call in calls:
            rows = slice(call.row, call.row + call.count)
            if isinstance(call, _Decode):
                out[rows] = self._run_decode(layer, call, q_THD[rows])
            else:
                self._run_chunk(layer, call, q_THD[rows], out[rows])
        return out

    def _keys(
        self, layer: int, where: _Keys, batch: int, keys: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as ``[B, Hkv, keys, D]``."""
        tokens = self.tokens[layer]
        if where.gather is not None:
            gathered = self._blocks[layer].index_select(1, where.gather)
            both = gathered.view(2, batch, keys, self._kv_heads, self._stored)
        else:
            shape = (2, batch, keys, self._kv_heads, self._stored)
            strides = (tokens.stride(0), where.stride_tokens * self._row, *tokens.stride()[1:])
            offset = tokens.storage_offset() + where.first_token * self._row
            both = tokens.as_strided(shape, strides, offset)
        if self._codec is not None:
            both = self._codec.decode(both)
        k, v = both.transpose(2, 3).unbind(0)
        return k, v

    def _run_decode(self, layer: int, call: _Decode, q_THD: torch.Tensor) -> torch.Tensor:
        batch = call.count
        group = self._group
        rows = self.tiling.decode_rows
        q = q_THD.view(batch, self._kv_heads, group, self._dim)
        if rows > group:
            q = torch.nn.functional.pad(q, (0, 0, 0, rows - group))
        k, v = self._keys(layer, call.where, batch, call.keys)
        out, sums = _flash(q, k, v, 0.0, False, attn_mask=call.mask, scale=self._scale)
        out = with_sink(out[:, :, :group], sums[:, :, :group], self._sinks, layer)
        return out.reshape(batch, self._heads * self._dim)

    def _run_chunk(
        self, layer: int, call: _Chunk, q_THD: torch.Tensor, out_TE: torch.Tensor
    ) -> None:
        heads = self._kv_heads
        group = self._group
        dim = self._dim
        if call.padded != call.count:
            tail = call.padded - call.count - call.lead
            q_THD = torch.nn.functional.pad(q_THD, (0, 0, 0, 0, call.lead, tail))
        q = q_THD.view(call.padded, heads, group, dim).transpose(0, 1)
        q = q.reshape(1, heads, call.padded * group, dim)
        k, v = self._keys(layer, call.where, 1, call.keys)
        last = call.lead + call.count
        for tile in call.tiles:
            part, sums = _flash(
                q[:, :, tile.begin : tile.end],
                k[:, :, tile.keys],
                v[:, :, tile.keys],
                0.0,
                False,
                attn_mask=tile.mask,
                scale=self._scale,
            )
            part = with_sink(part, sums, self._sinks, layer)
            begin = tile.begin // group
            end = tile.end // group
            part = part.view(heads, end - begin, group, dim).transpose(0, 1)
            lo = max(begin, call.lead)
            hi = min(end, last)
            target = out_TE[lo - call.lead : hi - call.lead].view(hi - lo, heads, group, dim)
            target.copy_(part[lo - begin : hi - begin])
