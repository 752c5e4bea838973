"""Linear layers over packed weights, and the row counts at which their bits do not depend on M.

A matrix product may sum in another order when it has another number of rows, so a token's result
would depend on the other tokens of its batch. ``probe_row_counts`` finds, per weight shape and on
this machine, the row counts that give the bits of the 16-row tile. In ``exact`` mode a product of M
rows is cut into such counts. Where the kernels are row-invariant throughout (oneDNN on AVX-512) it
is not cut at all.

    M rows, N outputs, K inputs:   x_MK @ weight_NK.T -> y_MN
"""

# ruff: noqa: N803, N806 - suffixes such as q_THD give shapes

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.engine.cpu.native.products import (
    NativeInt4Weight,
    NativeInt8Weight,
    NativeWeight,
    native_fits,
)
from baton.engine.numerics import NumericsSetupError, cancelling, same_bits

TILE_ROWS = 16

_SMALL = (*range(1, 34), 40, 47, 48, 63, 64, 65)
_HEAD = (*range(1, 10), 12, 13, 15, 16, 17, 23, 24, 31, 32, 33, 48)
_LARGE = (100, 128, 129, 192, 257, 384, 511, 512, 768, 1001, 1024, 2048)
_TRIED = (1, 2, 3, 5, 7, 13, 16, 17, 31, 33, 50, 64)  # of 64 rows, on a loaded weight
_TRIED_OF_HEAD = (1, 3, 7, 16, 17, 33)
_PROBE_FLOPS = 4e10  # keeps the search below about a second for each shape of any model
_NARROW_COLUMNS = 16_384  # wider weights are LM heads, which never get a whole prefill chunk


class OneDnnWeight:
    """A weight packed for oneDNN, of any float dtype.

    oneDNN has no bf16 products for CPUs below AVX-512. There the weight is kept in fp32, with twice
    the memory, and products are rounded to bf16.
    """

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._dtype = weight_NK.dtype
        self._kept = self._dtype
        if self._dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
            self._kept = torch.float32
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001
            weight_NK.to(self._kept), None
        )

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Compute ``[M, K] -> [M, N]``."""
        y_MN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            x_MK.to(self._kept), self._packed, None, "none", [], ""
        )
        return y_MN.to(self._dtype)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Row counts that give the bits of the 16-row tile.

    Attributes:
        free_from: Every probed count from here to ``limit`` was equal, odd ones too, so that any
            count between is computed whole; ``None`` if there is no such range.
    """

    equal: frozenset[int]
    free_from: int | None
    limit: int
    _pieces: dict[int, tuple[tuple[int, int], ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def whole(self, rows: int) -> bool:
        """Return whether ``rows`` rows may be computed in one product."""
        free = self.free_from is not None and self.free_from <= rows <= self.limit
        return free or rows in self.equal

    def pieces(self, rows: int) -> tuple[tuple[int, int], ...]:
        """Cut ``rows`` into ``(count, padded count)``, every padded count being equal."""
        known = self._pieces.get(rows)
        if known is None:
            known = self._pieces[rows] = tuple(self._cut(rows))
        return known

    def _cut(self, rows: int) -> list[tuple[int, int]]:
        pieces = []
        while rows:
            if self.whole(rows):
                take = padded = rows
            elif self.free_from is not None and rows > self.limit:
                take = padded = self.limit
            else:
                below = max((n for n in self.equal if n < rows), default=0)
                above = min((n for n in self.equal if n > rows), default=0)
                # a little padding is cheaper than one more pass over the weights
                if above and (not below or above - rows <= TILE_ROWS):
                    take = rows
                    padded = above
                else:
                    take = padded = below
            pieces.append((take, padded))
            rows -= take
        return pieces


ANY_ROWS = RowCounts(equal=frozenset(), free_from=1, limit=1 << 30)
"""Every product is computed whole: its kernel sums in one way only, or bits may differ."""


def probe_row_counts(outputs: int, inputs: int, dtype: torch.dtype) -> RowCounts:
    """Find the row counts of a ``[outputs, inputs]`` weight that equal its 16-row tile.

    Takes well below a second. The native kernel needs no search: it sums in one way only.
    """
    if native_fits(inputs, dtype):
        return ANY_ROWS
    is_head = outputs >= _NARROW_COLUMNS
    affordable = _PROBE_FLOPS / (2.0 * outputs * inputs)
    counts: list[int] = []
    for count in _HEAD if is_head else (*_SMALL, *_LARGE):
        if count == TILE_ROWS or sum(counts) + count <= affordable:
            counts.append(count)
    weight = OneDnnWeight(cancelling(outputs, inputs, dtype, sign=1.0, seed=1))
    most = max(counts)
    x = cancelling(-(-most // TILE_ROWS) * TILE_ROWS, inputs, dtype, sign=-1.0, seed=2)
    tiles = torch.cat([weight(tile) for tile in torch.split(x, TILE_ROWS)])

    def equal(count: int) -> bool:
        # small counts are tried at several positions: few rows hide a difference more easily
        starts = range(0, min(64, most - count + 1), count) if count <= 8 else (most - count,)
        for start in starts:
            part = slice(start, start + count)
            if not same_bits(weight(x[part]), tiles[part]):
                return False
        return True

    invariant = frozenset(count for count in counts if equal(count))
    return RowCounts(equal=invariant, free_from=_free_from(counts, invariant), limit=most)


def _free_from(counts: Sequence[int], invariant: frozenset[int]) -> int | None:
    """Return the start of the range in which every probed count is equal."""
    failed = max((count for count in counts if count not in invariant), default=0)
    above = [count for count in counts if count > failed]
    enough = len(above) >= 10 and any(count % 2 for count in above[-6:])
    return failed + 1 if enough else None


class Linear:
    """Linear layer ``y = x @ weight.T`` without bias.

    The weight is packed once, for the native kernel where it fits, else for oneDNN; the plain one
    is not kept.
    """

    def __init__(self, weight_NK: torch.Tensor, rows: RowCounts = ANY_ROWS) -> None:
        self.outputs, self.inputs = weight_NK.shape
        self.dtype = weight_NK.dtype
        self.rows = rows
        self._is_head = self.outputs >= _NARROW_COLUMNS
        self._packed = self._pack(weight_NK)

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Compute ``[M, K] -> [M, N]``."""
        if self.rows.whole(x_MK.shape[0]):
            return self._multiply(x_MK)
        y_MN = x_MK.new_empty(x_MK.shape[0], self.outputs)
        start = 0
        for count, padded in self.rows.pieces(x_MK.shape[0]):
            part = slice(start, start + count)
            y_MN[part] = self._multiply(_padded(x_MK[part], padded))[:count]
            start += count
        return y_MN

    @property
    def native(self) -> NativeWeight | NativeInt8Weight | NativeInt4Weight | None:
        """Packed weight if a native kernel computes any number of rows whole, else ``None``."""
        is_native = isinstance(self._packed, NativeWeight | NativeInt8Weight | NativeInt4Weight)
        return self._packed if is_native and self.rows is ANY_ROWS else None

    def _pack(self, weight_NK: torch.Tensor) -> Any:
        weight_NK = weight_NK.contiguous()
        if native_fits(self.inputs, self.dtype):
            return NativeWeight(weight_NK)
        return OneDnnWeight(weight_NK)

    def _multiply(self, x_MK: torch.Tensor) -> torch.Tensor:
        y_MN: torch.Tensor = self._packed(x_MK)
        return y_MN

    def check(self) -> None:
        """Prove on this weight that every way of cutting rows gives the tile's bits."""
        x = cancelling(64, self.inputs, self.dtype, sign=-1.0, seed=4)
        x += cancelling(64, self.inputs, self.dtype, sign=1.0, seed=5, scale=1e-3)
        tiles = torch.cat([self._multiply(tile) for tile in torch.split(x, TILE_ROWS)])
        # The head is large, and each product reads all of it.
        counts, step = (_TRIED_OF_HEAD, 64) if self._is_head else (_TRIED, 4)
        for count in counts:
            for start in {*range(0, 64 - count + 1, max(count, step)), 64 - count}:
                part = slice(start, start + count)
                if not same_bits(self(x[part]), tiles[part]):
                    raise NumericsSetupError(
                        f"numerics exact: a linear layer of {self.outputs} x {self.inputs} gives "
                        f"other bits for {count} rows than for {TILE_ROWS}; use numerics: fast"
                    )


PackFn = Callable[[str, torch.Tensor], Linear]
"""``(name, weight [N, K]) -> layer``; the name is its first part's: "q", "gate", "head" ..."""


def plain(name: str, weight_NK: torch.Tensor) -> Linear:
    """Return a layer whose bits may depend on the batch (``numerics: fast``)."""
    return Linear(weight_NK)


def _padded(x_MK: torch.Tensor, rows: int) -> torch.Tensor:
    if x_MK.shape[0] == rows:
        return x_MK
    padded = x_MK.new_zeros(rows, x_MK.shape[1])
    padded[: x_MK.shape[0]] = x_MK
    return padded
