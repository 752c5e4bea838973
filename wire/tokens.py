"""Token ids on the wire: little-endian uint32, never JSON."""

from collections.abc import Sequence

import numpy as np


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Little-endian uint32, as token ids travel everywhere."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of ``pack_tokens``."""
    tokens: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return tokens
