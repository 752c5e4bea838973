"""Attention by the native kernel, in place of ``baton.engine.cpu.attention.PagedAttention``.

Each query row is computed separately from the pages of its keys: no copies of K and V, no masks,
and bits that depend only on the row's position and keys, with any number of threads.
"""

# ruff: noqa: N803 - suffixes such as q_THD give shapes

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.cpu.attention import AttentionTiling, QuerySpan
from baton.engine.cpu.native.library import load, sums
from baton.engine.cpu.native.threads import job_threads
from baton.types.geometry import KvGeometry

BLOCK_TOKENS = 16
_FORMATS = {"bf16": 0, "int8": 1, "fp8": 2}  # of a pool; pages.h has the same numbers


@dataclass(frozen=True, slots=True)
class NativeCalls:
    """Queries of one step: ``[n, 4]`` of (row, start, count, offset of the table), and tables."""

    spans: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    threads: int

    def pointers(self) -> tuple[int, int, int]:
        """Return spans, their number, and tables for the library."""
        return self.spans.ctypes.data, len(self.spans), self.tables.ctypes.data


def native_library(
    geometry: KvGeometry, dtype: torch.dtype, num_heads: int, kv_heads: int
) -> ctypes.CDLL | None:
    """Return the library if it can attend over such a pool, else ``None``."""
    if dtype != torch.bfloat16 or geometry.dtype not in _FORMATS:
        return None
    if geometry.block_tokens != BLOCK_TOKENS:
        return None
    library = load()
    if library is None:
        return None
    fits = library.baton_attention_supports(geometry.head_dim, num_heads // kv_heads)
    return library if fits else None


class NativeAttention:
    """Attention by the native kernel, with the interface of ``PagedAttention``.

    Args:
        windows: Keys that a query sees, for each layer; ``None`` is all of them.
        kv_heads: KV heads that are read here, if not all.
        sinks: Score of each head without a value, fp32, for each layer; empty: none.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        pool: torch.Tensor,
        geometry: KvGeometry,
        num_heads: int,
        tiling: AttentionTiling,
        windows: Sequence[int | None] = (),
        kv_heads: range | None = None,
        sinks: Sequence[torch.Tensor] = (),
    ) -> None:
        self.tiling = tiling
        self._sinks = sinks
        self.library = library
        self._heads = num_heads
        self._dim = geometry.head_dim
        shape = (geometry.num_layers, 2, -1, geometry.num_kv_heads, geometry.head_elements)
        mine = slice(None) if kv_heads is None else slice(kv_heads.start, kv_heads.stop)
        layers = [layer[:, :, mine] for layer in pool.view(shape)]
        self._pool = pool  # keeps the memory alive
        self._kv_heads = layers[0].shape[2]
        size = pool.element_size()
        stored = _FORMATS[geometry.dtype]
        self._layers = [
            (kv[0].data_ptr(), kv[1].data_ptr(), size * kv.stride(1), size * kv.stride(2), stored)
            for kv in layers
        ]
        self._scale = geometry.head_dim**-0.5
        self._sums = sums()
        self._windows = [window or 0 for window in windows] or [0] * geometry.num_layers

    @property
    def shape(self) -> dict[str, float]:
        """Numbers of heads and pool, by the names in ``layers.cpp``; ``format`` has a number."""
        *_, token_bytes, head_bytes, stored = self._layers[0]
        heads = {"heads": self._heads, "kv_heads": self._kv_heads, "dim": self._dim}
        pool = {"format": stored, "token_bytes": token_bytes, "head_bytes": head_bytes}
        return {**heads, **pool, "scale": self._scale}

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yield the addresses of each layer's K and V, and the keys that a query sees (0: all)."""
        for (keys, values, *_), window in zip(self._layers, self._windows, strict=True):
            yield keys, values, window

    def plan(
        self, decodes: Sequence[QuerySpan], chunks: Sequence[QuerySpan], *, isolated: bool = False
    ) -> NativeCalls:
        """Plan the calls of one step; only a sequence's own blocks are ever read."""
        rows = []
        tables = []
        place = 0
        for span in (*decodes, *chunks):
            count = -(-(span.start + span.count) // BLOCK_TOKENS)
            rows.append((span.row, span.start, span.count, place))
            tables.append(np.asarray(span.blocks[:count], dtype=np.int32))
            place += count
        return NativeCalls(np.asarray(rows, dtype=np.int32), np.concatenate(tables), job_threads())

    def sort_key(self, position: int, blocks: Sequence[int]) -> tuple[int, int]:
        """Return equal keys: the order of decode rows does not matter."""
        return (0, 0)

    def write(self, layer: int, calls: NativeCalls, kv: torch.Tensor) -> None:
        """Store ``[2, T, K, D]`` in the slots of the step's rows."""
        self.library.baton_store(
            kv[0].data_ptr(),
            kv[1].data_ptr(),
            kv.stride(1),
            *self._layers[layer],
            *calls.pointers(),
            self._kv_heads,
            self._dim,
            calls.threads,
        )

    def run(self, layer: int, calls: NativeCalls, q_THD: torch.Tensor) -> torch.Tensor:
        """Attend, ``[T, H, D] -> [T, H * D]``, over the pool of one layer."""
        width = self._heads * self._dim
        out = torch.empty(q_THD.shape[0], width, dtype=torch.bfloat16)
        self.library.baton_attention(
            q_THD.data_ptr(),
            q_THD.stride(0),
            *self._layers[layer],
            *calls.pointers(),
            self._heads,
            self._kv_heads,
            self._dim,
            self._windows[layer],
            self._scale,
            out.data_ptr(),
            width,
            calls.threads,
            self._sums,
            self._sinks[layer].data_ptr() if self._sinks else None,
        )
        return out
