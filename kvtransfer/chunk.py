"""KV bytes between a pool and the wire, and the digests that bind bytes to their slice.

Wire order is (block, head, layer, K|V, token, dim), so the bytes of one (block, head) are
contiguous whatever the split over ranks on either side. One digest covers each such run. The
digest's seed covers the request, the reservation, the sender's incarnation and the slice, so intact
bytes that belong elsewhere fail just like damaged ones.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
from batonpb import prefill_pb2 as pb
from batonpb.common_pb2 import INT8, PLAIN, ChunkEncoding
from google.protobuf.message import DecodeError

from baton.types.geometry import KvGeometry
from kvtransfer.int8_chunks import decode_int8, encode_int8, wire_geometry
from kvtransfer.kv_slice import KvSlice
from kvtransfer.native.moves import digests_bytes, native_pool

_LAYERS = struct.Struct("<III")
_LEAF = struct.Struct("<III")
_LENGTH = struct.Struct("<I")

Words = npt.NDArray[np.uint64] | npt.NDArray[np.uint32]


class ChunkError(ValueError):
    """A frame does not match the request for it.

    Args:
        cause: "torn", "encoding", "size", "claim", "place" or "digest", for metrics.
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class GoneError(Exception):
    """The peer does not hold these blocks (any more)."""


def binding(request_id: str, attempt: int, generation: int, source_incarnation: bytes) -> bytes:
    """Return what all digests of one KV transfer are bound to, besides the slice."""
    return b"%s|%d|%d|%s" % (request_id.encode(), attempt, generation, source_incarnation)


class PoolView:
    """A KV pool as bytes ``[layer, k|v, block, token, head, dim bytes]``.

    Args:
        geometry: Geometry of this memory. A rank's own pool counts only its heads.
        first_head: Number in the model of the pool's first head.
    """

    def __init__(
        self, pool: memoryview | bytearray, geometry: KvGeometry, first_head: int = 0
    ) -> None:
        size = geometry.head_bytes
        # 8-byte elements move faster than 4-byte ones; a vector with its scale is a multiple of 4.
        flat: Words = (
            np.frombuffer(pool, dtype=np.uint32) if size % 8 else np.frombuffer(pool, np.uint64)
        )
        self._data = flat.reshape(*geometry.shape[:-1], size // flat.itemsize)
        self.geometry = geometry
        self.native = native_pool(self._data, geometry, first_head)
        self._first_head = first_head
        self.parts: tuple[range, ...] = (range(first_head, first_head + geometry.num_kv_heads),)

    def holding(self, kv_slice: KvSlice) -> "tuple[PoolView, ...]":
        """Return the pools with these heads; this is the only one."""
        return (self,)

    def copy_out(
        self,
        table: Sequence[int],
        kv_slice: KvSlice,
        bound: bytes,
        into: memoryview,
        encoding: ChunkEncoding = PLAIN,
    ) -> bytes:
        """Copy ``kv_slice`` in wire order into a buffer of its size, and return its ``digests``."""
        if encoding == INT8:
            plain = memoryview(bytearray(kv_slice.payload_bytes(self.geometry)))
            self.copy_out(table, kv_slice, bound, plain)
            encode_int8(plain, self.geometry.head_dim, into)
            return digests(into, kv_slice, wire_geometry(self.geometry), bound)
        if self.native is not None:
            pages = kv_slice.pages(table)
            return self.native.gather(pages, kv_slice, _seed(kv_slice, bound), into)
        into[:] = self.read(table, kv_slice)
        return digests(into, kv_slice, self.geometry, bound)

    def place(
        self,
        table: Sequence[int],
        kv_slice: KvSlice,
        bound: bytes,
        payload: memoryview | bytes,
        expected: bytes,
        encoding: ChunkEncoding = PLAIN,
    ) -> bool:
        """Scatter wire bytes into the pages of ``table``; return False if digests differ."""
        if encoding == INT8:
            if digests(payload, kv_slice, wire_geometry(self.geometry), bound) != expected:
                return False
            self.write(table, kv_slice, decode_int8(payload, self.geometry.head_dim))
            return True
        if self.native is not None:
            pages = kv_slice.pages(table)
            return self.native.scatter(pages, kv_slice, _seed(kv_slice, bound), payload, expected)
        if digests(payload, kv_slice, self.geometry, bound) != expected:
            return False
        self.write(table, kv_slice, payload)
        return True

    def read(self, table: Sequence[int], kv_slice: KvSlice) -> bytes:
        """Return ``kv_slice`` in wire order; ``table`` maps the prompt's blocks to pages."""
        pages = kv_slice.pages(table)
        region = self._region(pages, kv_slice)  # [layer, kv, block, token, head, dim]
        wire = region.transpose(2, 4, 0, 1, 3, 5)
        full, tail = divmod(kv_slice.valid_tokens, self.geometry.block_tokens)
        parts = [np.ascontiguousarray(wire[:full]).tobytes()] if full else []
        if tail:
            parts.append(np.ascontiguousarray(wire[full:, ..., :tail, :]).tobytes())
        return b"".join(parts)

    def write(self, table: Sequence[int], kv_slice: KvSlice, payload: memoryview | bytes) -> None:
        """Scatter verified wire bytes into the pages of ``table``."""
        pages = kv_slice.pages(table)
        tokens = self.geometry.block_tokens
        dim = self._data.shape[-1]
        data = np.frombuffer(payload, dtype=self._data.dtype)
        full, tail = divmod(kv_slice.valid_tokens, tokens)
        inner = (kv_slice.head_count, kv_slice.layer_count, 2)
        split = full * int(np.prod(inner)) * tokens * dim
        heads = self._heads(kv_slice)
        layers = slice(kv_slice.layer_begin, kv_slice.layer_begin + kv_slice.layer_count)
        whole = data[:split].reshape(full, *inner, tokens, dim)
        for index in range(full):
            self._data[layers, :, pages[index], :, heads] = whole[index].transpose(1, 2, 3, 0, 4)
        if tail:
            rest = data[split:].reshape(*inner, tail, dim)
            self._data[layers, :, pages[full], :tail, heads] = rest.transpose(1, 2, 3, 0, 4)

    def row(self, layer: int, kv: int, kv_slice: KvSlice) -> Words:
        """Return one layer's K (``kv`` 0) or V of all pages: ``[block, token, head, words]``."""
        return self._data[layer, kv, :, :, self._heads(kv_slice)]

    def _heads(self, kv_slice: KvSlice) -> slice:
        begin = kv_slice.head_begin - self._first_head
        return slice(begin, begin + kv_slice.head_count)

    def _region(self, pages: Sequence[int], kv_slice: KvSlice) -> Words:
        layers = slice(kv_slice.layer_begin, kv_slice.layer_begin + kv_slice.layer_count)
        heads = self._heads(kv_slice)
        first = pages[0]
        count = len(pages)
        if list(pages) == list(range(first, first + count)):  # consecutive pages need no gather
            return self._data[layers, :, first : first + count, :, heads]
        return self._data[layers][:, :, np.asarray(pages)][:, :, :, :, heads]


def digests(
    payload: memoryview | bytes, kv_slice: KvSlice, geometry: KvGeometry, bound: bytes
) -> bytes:
    """Return one xxh3-64 per (block, head), little-endian, in wire order.

    The key covers KV transfer, layers, block, head and valid tokens, but not how the rest was
    split. So any two tensor-parallel widths agree on the digest of a (block, head).
    """
    view = memoryview(payload)
    seed = _seed(kv_slice, bound)
    per_token = kv_slice.layer_count * 2 * geometry.head_bytes
    leaves = []
    begin = 0
    for block in range(kv_slice.block_count):
        valid = min(geometry.block_tokens, kv_slice.valid_tokens - block * geometry.block_tokens)
        size = per_token * valid
        for head in range(kv_slice.head_count):
            leaf = _LEAF.pack(kv_slice.block_begin + block, kv_slice.head_begin + head, valid)
            key = xxhash.xxh3_64_intdigest(leaf, seed)
            leaves.append(xxhash.xxh3_64_intdigest(view[begin : begin + size], key))
            begin += size
    return struct.pack(f"<{len(leaves)}Q", *leaves)


def _seed(kv_slice: KvSlice, bound: bytes) -> int:
    layers = _LAYERS.pack(kv_slice.kv_group, kv_slice.layer_begin, kv_slice.layer_count)
    return int(xxhash.xxh3_64_intdigest(bound + layers))


def payload_bytes(kv_slice: KvSlice, geometry: KvGeometry, encoding: ChunkEncoding = PLAIN) -> int:
    """Return the size of a slice on the wire."""
    return kv_slice.payload_bytes(wire_geometry(geometry) if encoding == INT8 else geometry)


def make_room(header: pb.ChunkHeader, kv_slice: KvSlice, geometry: KvGeometry) -> int:
    """Return the bytes in front of a frame's payload; its digests may be filled in afterwards."""
    header.payload_bytes = payload_bytes(kv_slice, geometry, header.encoding)
    header.digests = bytes(digests_bytes(kv_slice))
    return int(_LENGTH.size + header.ByteSize())


def put_header(header: pb.ChunkHeader, frame: memoryview, room_bytes: int) -> None:
    """Write the header into the bytes that ``make_room`` left in front of the payload."""
    head = header.SerializeToString()
    frame[:room_bytes] = _LENGTH.pack(room_bytes - _LENGTH.size) + head


def encode(header: pb.ChunkHeader, payload: bytes) -> bytes:
    """Return one frame: header length, header, raw payload."""
    head = header.SerializeToString()
    return b"".join((_LENGTH.pack(len(head)), head, payload))


def decode(frame: bytes | memoryview) -> tuple[pb.ChunkHeader, memoryview]:
    """Return header and payload (a view into ``frame``).

    Raises:
        ChunkError: The frame is torn.
    """
    if len(frame) < _LENGTH.size:
        raise ChunkError(f"frame of {len(frame)} bytes has no header", "torn")
    (length,) = _LENGTH.unpack_from(frame)
    if _LENGTH.size + length > len(frame):
        raise ChunkError(f"header of {length} bytes in a frame of {len(frame)} bytes", "torn")
    payload = memoryview(frame)[_LENGTH.size + length :]
    header = pb.ChunkHeader()
    try:
        header.ParseFromString(bytes(frame[_LENGTH.size : _LENGTH.size + length]))
    except DecodeError as error:
        raise ChunkError(f"unreadable chunk header: {error}", "torn") from error
    if not header.HasField("error") and header.payload_bytes != len(payload):
        promised = header.payload_bytes
        raise ChunkError(f"payload of {len(payload)} bytes instead of {promised}", "torn")
    return header, payload


def check_binding(header: pb.ChunkHeader, expected: KvSlice, bound: bytes) -> None:
    """Check that a header belongs to the requested slice of this KV transfer."""
    shown = binding(header.request_id, header.attempt, header.generation, header.source_incarnation)
    if shown != bound:
        raise ChunkError("the frame belongs to another KV transfer or another incarnation", "claim")
    kv_slice = KvSlice.from_wire(header.kv_slice)
    if kv_slice != expected:
        raise ChunkError(f"requested {expected}, got {kv_slice}", "place")


@dataclass(frozen=True, slots=True)
class ByteFrame:
    """A frame that ``encode`` made; see ``transport.Frame``.

    Args:
        encoding: The requested encoding of its payload.
    """

    frame: bytes | memoryview
    encoding: ChunkEncoding = PLAIN

    def store(self, pool: PoolView, blocks: Sequence[int], kv_slice: KvSlice, bound: bytes) -> None:
        """Verify the frame, then scatter its payload."""
        header, payload = decode(self.frame)
        if header.HasField("error"):
            raise GoneError(header.error.message)
        if header.encoding != self.encoding:
            asked = ChunkEncoding.Name(self.encoding)
            came = ChunkEncoding.Name(header.encoding)
            raise ChunkError(f"requested encoding {asked}, got {came}", "encoding")
        wanted = payload_bytes(kv_slice, pool.geometry, self.encoding)
        if len(payload) != wanted:
            text = f"payload of {len(payload)} bytes instead of {wanted}: {kv_slice}"
            raise ChunkError(text, "size")
        check_binding(header, kv_slice, bound)
        if not pool.place(blocks, kv_slice, bound, payload, header.digests, self.encoding):
            raise ChunkError(f"digest mismatch at {kv_slice}", "digest")


def manifest_digest(kv_slices: Sequence[KvSlice]) -> int:
    """Return a digest over all published rectangles, in order."""
    return int(xxhash.xxh3_64_intdigest(b"".join(kv_slice.packed() for kv_slice in kv_slices)))
