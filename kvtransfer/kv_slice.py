"""Addresses of KV, and the cutting of rectangles into frames.

A slice is a rectangle: layers x heads x blocks of one kv group, given by global layer ids, global
head numbers and positions in the prompt, never by order of arrival.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from batonpb import prefill_pb2 as pb

from baton.types.geometry import KvGeometry

FRAME_BYTES = 1 << 20
MOST_FRAME_BYTES = 64 << 20  # limit: the receiver allocates a whole frame at once
HEADER_ROOM_BYTES = 64 << 10
_PACKED = struct.Struct("<8I")


class KvSlice(NamedTuple):
    """A rectangle of KV; ``valid_tokens`` counts from the first token of ``block_begin``."""

    layer_begin: int
    layer_count: int
    head_begin: int
    head_count: int
    block_begin: int
    block_count: int
    valid_tokens: int
    kv_group: int = 0

    def packed(self) -> bytes:
        """Return canonical bytes, for digests."""
        return _PACKED.pack(self.kv_group, *self[:-1])

    def payload_bytes(self, geometry: KvGeometry) -> int:
        """Return the bytes on the wire: only valid tokens travel."""
        per_token = self.layer_count * 2 * self.head_count * geometry.head_bytes
        return per_token * self.valid_tokens

    def fits(self, geometry: KvGeometry, first_head: int = 0) -> bool:
        """Return whether the slice lies inside the model, and its tokens match its blocks."""
        tokens = geometry.block_tokens
        return (
            self.kv_group == 0
            and self.layer_count > 0
            and self.head_count > 0
            and self.block_count > 0
            and self.layer_begin + self.layer_count <= geometry.num_layers
            and self.head_begin >= first_head
            and self.head_begin + self.head_count <= first_head + geometry.num_kv_heads
            and (self.block_count - 1) * tokens < self.valid_tokens <= self.block_count * tokens
        )

    def pages(self, table: Sequence[int]) -> Sequence[int]:
        """Return the pages of its blocks; ``table`` has those of all blocks of the prompt."""
        return table[self.block_begin : self.block_begin + self.block_count]

    def to_wire(self) -> pb.KvSlice:
        """Return the protobuf message."""
        return pb.KvSlice(**self._asdict())

    @classmethod
    def from_wire(cls, message: pb.KvSlice | pb.Published) -> "KvSlice":
        """Read a protobuf message (unchecked: see ``fits``)."""
        return cls(
            message.layer_begin,
            message.layer_count,
            message.head_begin,
            message.head_count,
            message.block_begin,
            message.block_count,
            message.valid_tokens,
            message.kv_group,
        )

    def to_published(self, num_kv_heads: int) -> pb.Published:
        """Return the message with which prefill announces it; it omits heads if it has all."""
        message = pb.Published(**self._asdict())
        if self.head_count >= num_kv_heads:
            message.head_begin = message.head_count = 0
        return message

    @classmethod
    def from_published(cls, message: pb.Published, num_kv_heads: int) -> "KvSlice":
        """Read an announcement for a model with so many heads (unchecked: see ``fits``)."""
        kv_slice = cls.from_wire(message)
        return kv_slice if kv_slice.head_count else kv_slice._replace(head_count=num_kv_heads)


def cut(
    kv_slice: KvSlice, geometry: KvGeometry, frame_bytes: int = FRAME_BYTES
) -> Iterator[KvSlice]:
    """Cut a rectangle along its blocks so that each piece fits one frame.

    A single block whose layers do not fit is cut along its layers too.
    """
    room = frame_bytes - HEADER_ROOM_BYTES
    per_layer = 2 * kv_slice.head_count * geometry.head_bytes * geometry.block_tokens
    layers = max(1, min(kv_slice.layer_count, room // per_layer))
    blocks = max(1, room // (per_layer * layers))
    if layers >= kv_slice.layer_count and blocks >= kv_slice.block_count:
        yield kv_slice
        return
    pieces = -(-kv_slice.block_count // blocks)
    blocks = -(
        -kv_slice.block_count // pieces
    )  # equal pieces: a small frame costs like a large one
    for layer in range(0, kv_slice.layer_count, layers):
        band = kv_slice._replace(
            layer_begin=kv_slice.layer_begin + layer,
            layer_count=min(layers, kv_slice.layer_count - layer),
        )
        for block in range(0, kv_slice.block_count, blocks):
            count = min(blocks, kv_slice.block_count - block)
            valid = min(
                kv_slice.valid_tokens - block * geometry.block_tokens, count * geometry.block_tokens
            )
            yield band._replace(
                block_begin=kv_slice.block_begin + block,
                block_count=count,
                valid_tokens=valid,
            )


def by_part(kv_slice: KvSlice, parts: Sequence[range]) -> Iterator[KvSlice]:
    """Cut a slice along ``parts`` (in order), so that the heads of each piece lie together."""
    end = kv_slice.head_begin + kv_slice.head_count
    for part in parts:
        begin = max(part.start, kv_slice.head_begin)
        stop = min(part.stop, end)
        if begin < stop:
            yield kv_slice._replace(head_begin=begin, head_count=stop - begin)
