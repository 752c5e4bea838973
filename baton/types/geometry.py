"""Shape of a paged KV pool."""

import msgspec

TOKEN_BYTES = 4  # of a packed token, a little-endian uint32
BLOCK_TOKENS = 16

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "int8": 1, "fp8": 1}
SCALED = ("int8", "fp8")
SCALE_BYTES = 4  # fp32, after the values of each vector


def head_bytes(dtype: str, head_dim: int) -> int:
    """Return the bytes of one K or V vector of one head, its scale included."""
    elements = head_dim + SCALE_BYTES if dtype in SCALED else head_dim
    return elements * DTYPE_BYTES[dtype]


def context_tokens(begin: int, end: int) -> int:
    """Return the sum of the context lengths of the tokens ``begin`` to ``end - 1``."""
    return (end - begin) * (begin + end - 1) // 2


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one pool: ``[layer, k|v, block, token, head, dim]``, contiguous, row-major.

    This is the CPU layout: adjacent blocks of a sequence are one contiguous run of tokens. Only the
    wire order is fixed (see ``kvtransfer/chunk.py``).

    In ``int8`` and ``fp8`` each vector is followed by its scale (``baton/engine/cpu/kv_codec.py``):
    a token's KV depends on that token alone and is copied as one run of bytes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    dtype: str  # "bf16" | "fp32" | "int8" | "fp8"
    block_tokens: int = BLOCK_TOKENS

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def head_elements(self) -> int:
        """Elements of one K or V vector of one head, its scale included."""
        return self.head_bytes // self.itemsize_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one K or V vector of one head, its scale included."""
        return head_bytes(self.dtype, self.head_dim)

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Dimensions ``(layers, 2, blocks, tokens per block, heads, elements)``."""
        return (
            self.num_layers,
            2,
            self.num_blocks,
            self.block_tokens,
            self.num_kv_heads,
            self.head_elements,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_bytes
        return per_token * self.block_tokens

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.block_bytes * self.num_blocks
