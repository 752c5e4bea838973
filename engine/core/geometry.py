"""The shape of a paged KV pool."""

import msgspec

BLOCK_TOKENS = 16

DTYPE_BYTES = {"bf16": 2, "fp32": 4}


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """One kv group's pool: ``[layer, k|v, block, token, head, dim]``, contiguous, row-major.

    That is the CPU layout: blocks that follow each other in one sequence are one contiguous run of
    tokens. Only the wire order is fixed (see ``kvtransfer/chunk.py``).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    dtype: str  # "bf16" | "fp32"
    block_tokens: int = BLOCK_TOKENS

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """``(layers, 2, blocks, tokens per block, heads, dim)``."""
        return (
            self.num_layers,
            2,
            self.num_blocks,
            self.block_tokens,
            self.num_kv_heads,
            self.head_dim,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return per_token * self.block_tokens * self.itemsize_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.block_bytes * self.num_blocks
