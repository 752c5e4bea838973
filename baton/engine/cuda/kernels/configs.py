"""Tile sizes of the kernels, as data. ``python3 -m benchmarks.gpu --tune`` prints better ones.

``exact`` uses the same sizes for prefill, decode and verification, so that a query's bits do not
depend on which of them computes it. ``fast`` chooses by the kind of work.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tile sizes of attention.

    Attributes:
        block_m: Rows of a tile (queries times the query heads that share a KV head).
        kv_tile: Keys per inner step; a multiple of 16 (the matrix units' smallest side).
        split: Tokens per split, a multiple of ``kv_tile``; 0 = one split (prefill in ``fast``).
        num_stages: Loads of block ids and then of pages are two pipelined steps, so Triton keeps
            ``(num_stages - 1) // 2`` tiles of pages in flight: none overlaps below 5. With few
            warps, other programs of the same multiprocessor compute meanwhile.
    """

    block_m: int
    kv_tile: int
    split: int
    num_warps: int
    num_stages: int

    def queries(self, group: int) -> int:
        """Return the queries of a tile when ``group`` query heads share a KV head."""
        if group > self.block_m:
            raise ValueError(f"{group} heads share a KV head; a tile has {self.block_m} rows")
        return self.block_m // group


SPLIT_TOKENS = 512
"""Keys of a split in ``exact``. It is fixed for every batch and context: sums follow its order."""

EXACT = AttentionConfig(block_m=64, kv_tile=64, split=SPLIT_TOKENS, num_warps=4, num_stages=2)
"""64 rows: the smallest tile of Hopper's wide matrix instructions, which prefill needs."""

# (kind, largest head dim) -> sizes; the fastest of those tried on an H200 (docs/design/gpu.md)
FAST: dict[tuple[Kind, int], AttentionConfig] = {
    ("decode", 64): AttentionConfig(16, 128, 512, num_warps=4, num_stages=3),
    ("decode", 128): AttentionConfig(16, 128, 1024, num_warps=4, num_stages=4),
    ("decode", 256): AttentionConfig(16, 128, 512, num_warps=4, num_stages=3),
    ("prefill", 64): AttentionConfig(128, 64, 0, num_warps=8, num_stages=3),
    ("prefill", 128): AttentionConfig(128, 32, 0, num_warps=4, num_stages=5),
    ("prefill", 256): AttentionConfig(128, 64, 0, num_warps=8, num_stages=3),
}


def attention_config(kind: Kind, head_dim: int, *, exact: bool) -> AttentionConfig:
    """Return the sizes for a kind of work and a head dim."""
    if head_dim > 256:
        raise ValueError(f"head_dim is {head_dim}, the attention kernels' limit is 256")
    if exact and head_dim <= 128:
        return EXACT
    if exact:  # two accumulators of 64 x 256 would not fit into registers
        stages = 5 if kind == "decode" else 2  # more would spill registers in prefill
        return AttentionConfig(64, 32, SPLIT_TOKENS, num_warps=8, num_stages=stages)
    width = next(limit for limit in (64, 128, 256) if head_dim <= limit)
    return FAST[kind, width]


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Tile sizes of a matrix product: rows, outputs and inputs of a step, warps and stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


EXACT_ROWS = LinearConfig(64, 32, 128, num_warps=4, num_stages=4)
"""Narrow, so that one row already keeps every multiprocessor busy reading weights."""

EXACT_MANY_ROWS = LinearConfig(128, 128, 64, num_warps=8, num_stages=3)

FP8_FEW_ROWS = LinearConfig(16, 32, 256, num_warps=4, num_stages=3)
"""Weights in fp8 and at most 16 rows, in ``fast``."""

# (outputs, inputs) -> [(most rows, sizes)]: where ours was measured to beat cuBLAS; none was
FAST_LINEAR: dict[tuple[int, int], list[tuple[int, LinearConfig]]] = {}


def tuned_linear(rows: int, outputs: int, inputs: int) -> LinearConfig | None:
    """Return the sizes for a product in ``fast``; ``None`` = cuBLAS."""
    for limit, config in FAST_LINEAR.get((outputs, inputs), []):
        if rows <= limit:
            return config
    return None
