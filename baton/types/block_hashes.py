"""Block hashes: 16-byte names of full KV cache blocks, equal in every process.

The first 12 bytes of a hash are keyed BLAKE2b over (parent hash, token ids). The first parent is
the *seed*, which covers everything else that affects the KV: weights, KV format, numerics, adapter,
and the cache scope that separates tenants. So equal hashes mean equal bytes, and tenants cannot
find each other's blocks.

The last 4 bytes are the *tag* of the seed, the same in the whole chain: a digest of the owner of
the cache scope. They select the blocks to erase when a tenant is deleted. Two tenants with the same
tag still have different hashes.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from baton.types.geometry import BLOCK_TOKENS

HASH_BYTES = 16
TAG_BYTES = 4
KEY = b"baton block name v2"  # part of every hash: it never changes
_SEED = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")


def hash_seed(
    weights_digest: bytes,
    kv_format: str,
    numerics_id: str,
    adapter: str = "",
    cache_scope: str = "",
) -> bytes:
    """Return the 16-byte root of a chain of hashes.

    ``kv_format`` is the dtype and shape of a block, e.g. ``"bf16/30x3x64/16"``. ``adapter`` is a
    LoRA adapter's name and digest, or "". Different scopes share no blocks; a scope is its owner,
    NUL, and the salt of a client.
    """
    digest = blake2b(key=KEY, digest_size=HASH_BYTES)
    for field in (weights_digest, kv_format, numerics_id, adapter, cache_scope):
        data = field if isinstance(field, bytes) else field.encode()
        digest.update(len(data).to_bytes(4, "little"))  # lengths keep the fields apart
        digest.update(data)
    return digest.digest()[:-TAG_BYTES] + tag_of(cache_scope.partition("\0")[0])


def seed_past_baton(salts: Sequence[str]) -> bytes:
    """Return the root of the hashes of a request with these cache salts; Baton sends its seed."""
    for seed in filter(_SEED.fullmatch, salts):
        return bytes.fromhex(seed)
    return hash_seed(b"", "past Baton", "", "", "\0".join(("", *salts)))


def tag_of(owner: str) -> bytes:
    """Return the tag of the blocks of an owner, as in the scopes of its requests."""
    return blake2b(owner.encode(), key=KEY, digest_size=TAG_BYTES).digest()


def tag_in(block_hash: bytes) -> bytes:
    """Return the tag in a hash."""
    return block_hash[-TAG_BYTES:]


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of the block with ``tokens`` behind ``parent`` (a hash, or the seed)."""
    packed = np.asarray(tokens, dtype="<u4").tobytes()
    digest = blake2b(parent + packed, key=KEY, digest_size=HASH_BYTES).digest()
    return digest[:-TAG_BYTES] + tag_in(parent)


def block_hashes(seed: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Return the hashes of all full blocks of ``tokens``, in order."""
    packed = np.asarray(tokens, dtype="<u4").tobytes()
    hashes = []
    parent = seed
    tag = tag_in(seed)
    step = 4 * BLOCK_TOKENS
    for begin in range(0, len(packed) - len(packed) % step, step):
        data = parent + packed[begin : begin + step]
        parent = blake2b(data, key=KEY, digest_size=HASH_BYTES).digest()[:-TAG_BYTES] + tag
        hashes.append(parent)
    return hashes
