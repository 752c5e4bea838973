"""Hashes of the blocks of prompts, in C++: a third of a microsecond each, Python takes two."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.engine.compiled import Functions, loaded
from baton.types.block_hashes import HASH_BYTES, KEY, block_hashes
from baton.types.geometry import BLOCK_TOKENS, TOKEN_BYTES

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-w")
_POINTER = ctypes.c_void_p
_COUNT = ctypes.c_uint32
_FUNCTIONS: Functions = {
    "baton_block_names": (
        None,
        (_POINTER, _COUNT, _POINTER, _POINTER, ctypes.c_uint64, _COUNT, _POINTER),
    )
}


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None where it is unavailable."""
    return loaded("names", Path(__file__).parent, _FLAGS, _FUNCTIONS)


def packed_names(seed: bytes, packed: bytes) -> bytes:
    """Return the hashes of all full blocks of packed tokens, one behind the other."""
    block_bytes = TOKEN_BYTES * BLOCK_TOKENS
    count = len(packed) // block_bytes
    library = load()
    if library is None:
        return b"".join(block_hashes(seed, np.frombuffer(packed, dtype="<u4").tolist()))
    if not count:
        return b""
    # Not a ctypes buffer: each length is a new type, which takes longer to create.
    names = bytearray(count * HASH_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(names))
    library.baton_block_names(KEY, len(KEY), seed, packed, count, block_bytes, address)
    return bytes(names)


def block_names(seed: bytes, tokens: Sequence[int] | bytes) -> list[bytes]:
    """Return the hashes of all full blocks of tokens, packed or not, as `block_hashes` does."""
    packed = tokens if isinstance(tokens, bytes) else np.asarray(tokens, dtype="<u4").tobytes()
    names = packed_names(seed, packed)
    return [names[begin : begin + HASH_BYTES] for begin in range(0, len(names), HASH_BYTES)]
