"""KV of a bf16 pool as int8 on the wire: about half of the bytes, for slow links.

    a vector on the wire    D levels, int8 | 4 bytes: the scale, fp32

The scale is the largest magnitude divided by 127. A decoded value differs by one scale at most.
Encoding it again changes nothing, so KV that is passed on loses nothing after the first time.

The layout is that of a pool in int8 (``baton/engine/cpu/kv_codec.py``), and so are sizes and
digests. Here the scale keeps its fp32, since nothing computes with the bytes on the wire.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from baton.types.geometry import SCALE_BYTES, KvGeometry

ENCODES = "bf16"  # the only dtype of a pool that can be encoded
_LEVELS = np.float32(127)
_TINY = np.finfo(np.float32).tiny  # a vector of zeros has a scale too
_PASS_VECTORS = 2048  # as many as fit into a core's cache

Buffer = memoryview | bytearray | bytes
Floats = npt.NDArray[np.float32]


def wire_geometry(geometry: KvGeometry) -> KvGeometry:
    """Return the geometry of an encoded payload."""
    return msgspec.structs.replace(geometry, dtype="int8")


def encode_int8(plain: Buffer, head_dim: int, into: memoryview) -> None:
    """Encode vectors of ``head_dim`` bf16 values as vectors of ``head_dim + 4`` bytes.

    A vector with NaN or Inf decodes to NaN as a whole.
    """
    bits: npt.NDArray[np.uint16] = np.frombuffer(plain, np.uint16).reshape(-1, head_dim)
    coded = np.frombuffer(into, np.int8).reshape(-1, head_dim + SCALE_BYTES)
    for begin in range(0, len(bits), _PASS_VECTORS):
        part = slice(begin, begin + _PASS_VECTORS)
        values: Floats = (bits[part].astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # NaN
            largest = np.maximum(values.max(axis=1), -values.min(axis=1))
            scale: Floats = np.maximum(largest / _LEVELS, _TINY)
        lost = ~np.isfinite(scale)
        if lost.any():
            scale[lost] = np.nan
            values[lost] = 0
        levels = values / np.where(lost, 1, scale)[:, None]
        coded[part, :head_dim] = np.rint(levels, out=levels)
        coded[part, head_dim:] = scale[:, None].view(np.int8)


def decode_int8(payload: Buffer, head_dim: int) -> memoryview:
    """Invert ``encode_int8``; values are rounded to the nearest bf16."""
    coded: npt.NDArray[np.int8] = np.frombuffer(payload, np.int8)
    coded = coded.reshape(-1, head_dim + SCALE_BYTES)
    plain = np.empty((len(coded), head_dim), np.uint16)
    for begin in range(0, len(coded), _PASS_VECTORS):
        part = slice(begin, begin + _PASS_VECTORS)
        scale: Floats = np.ascontiguousarray(coded[part, head_dim:]).view(np.float32)
        bits: npt.NDArray[np.uint32] = (coded[part, :head_dim] * scale).view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
        plain[part] = bits >> 16
    return plain.reshape(-1).view(np.uint8).data
