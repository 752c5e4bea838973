"""Attention by the native kernel, in place of ``engine.attention.PagedAttention``.

Each query row is computed by itself from the pages where its keys lie: no copies of K and V, no
masks, and bits that depend on nothing but the row's position and keys, with any number of threads.
"""

# ruff: noqa: N803 - suffixes such as q_THD give shapes

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import Layout, Span
from engine.core.geometry import KvGeometry
from engine.native.library import load

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class NativeCalls:
    """One step's queries: ``[n, 4]`` of (row, start, count, place of the table), and tables."""

    spans: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]


def native_library(geometry: KvGeometry, num_heads: int, kv_heads: int) -> ctypes.CDLL | None:
    """The library if it can attend over such a pool, else ``None``."""
    if geometry.dtype != "bf16" or geometry.block_tokens != BLOCK_TOKENS:
        return None
    library = load()
    if library is None:
        return None
    fits = library.baton_attention_supports(geometry.head_dim, num_heads // kv_heads)
    return library if fits else None


class NativeAttention:
    """See the module; the interface is that of ``PagedAttention``.

    Args:
        library: From ``native_library``.
        pool: The KV pool, bf16.
        geometry: Its shape.
        num_heads: Query heads.
        layout: Kept for whoever asks; this kernel cuts nothing.
        windows: Keys that a query sees, for each layer; ``None`` is all of them.
        kv_heads: The KV heads that are read here, if not all.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        pool: torch.Tensor,
        geometry: KvGeometry,
        num_heads: int,
        layout: Layout,
        windows: Sequence[int | None] = (),
        kv_heads: range | None = None,
    ) -> None:
        self.layout = layout
        self._library = library
        self._heads = num_heads
        self._dim = geometry.head_dim
        shape = (geometry.num_layers, 2, -1, geometry.num_kv_heads, geometry.head_dim)
        mine = slice(None) if kv_heads is None else slice(kv_heads.start, kv_heads.stop)
        self.tokens = [layer[:, :, mine] for layer in pool.view(shape)]
        self._kv_heads = self.tokens[0].shape[2]
        self._scale = geometry.head_dim**-0.5
        self._windows = [window or 0 for window in windows] or [0] * geometry.num_layers

    def plan(
        self, decodes: Sequence[Span], chunks: Sequence[Span], *, isolated: bool = False
    ) -> NativeCalls:
        """Calls for one step; a sequence's own blocks are all that is ever read."""
        rows, tables, place = [], [], 0
        for span in (*decodes, *chunks):
            count = -(-(span.start + span.count) // BLOCK_TOKENS)
            rows.append((span.row, span.start, span.count, place))
            tables.append(np.asarray(span.blocks[:count], dtype=np.int32))
            place += count
        return NativeCalls(np.asarray(rows, dtype=np.int32), np.concatenate(tables))

    def sort_key(self, position: int, blocks: Sequence[int]) -> tuple[int, int]:
        """Order of decode rows: as they come."""
        return (0, 0)

    def run(self, layer: int, calls: NativeCalls, q_THD: torch.Tensor) -> torch.Tensor:
        """``[T, H, D] -> [T, H * D]`` against the pool of one layer."""
        tokens = self.tokens[layer]
        out = torch.empty(q_THD.shape[0], self._heads * self._dim, dtype=torch.bfloat16)
        self._library.baton_attention(
            q_THD.data_ptr(),
            q_THD.stride(0),
            tokens[0].data_ptr(),
            tokens[1].data_ptr(),
            tokens.stride(1),
            tokens.stride(2),
            calls.spans.ctypes.data,
            len(calls.spans),
            calls.tables.ctypes.data,
            self._heads,
            self._kv_heads,
            self._dim,
            self._windows[layer],
            self._scale,
            out.data_ptr(),
            out.stride(0),
            torch.get_num_threads(),
        )
        return out
