"""Frames as a sender makes them, for tests that play the network themselves."""

from collections.abc import Sequence

from batonpb import prefill_pb2 as pb

from kvtransfer import chunk
from kvtransfer.kv_slice import KvSlice
from kvtransfer.lent_pages import LentFrame, page_digest

Claim = tuple[str, int, int, bytes]  # request, attempt, generation, life of the sender


def _header(claim: Claim, kv_slice: KvSlice) -> pb.ChunkHeader:
    request_id, attempt, generation, incarnation = claim
    return pb.ChunkHeader(
        request_id=request_id,
        attempt=attempt,
        generation=generation,
        source_incarnation=incarnation,
        kv_slice=kv_slice.to_wire(),
    )


def byte_frame(
    view: chunk.PoolView, blocks: Sequence[int], kv_slice: KvSlice, claim: Claim, flip: bool
) -> chunk.ByteFrame:
    """A copy of the slice, with one bit wrong if ``flip``."""
    payload = view.read(blocks, kv_slice)
    header = _header(claim, kv_slice)
    header.digests = chunk.digests(payload, kv_slice, view.geometry, chunk.binding(*claim))
    header.payload_bytes = len(payload)
    if flip:
        payload = bytes([payload[0] ^ 1]) + payload[1:]
    return chunk.ByteFrame(chunk.encode(header, payload))


def lent_frame(
    view: chunk.PoolView, blocks: Sequence[int], kv_slice: KvSlice, claim: Claim, flip: bool
) -> LentFrame:
    """The slice where it lies; with ``flip`` its digest does not fit."""
    pages = blocks[kv_slice.block_begin : kv_slice.block_begin + kv_slice.block_count]
    digest = page_digest(view, pages, kv_slice, chunk.binding(*claim))
    header = _header(claim, kv_slice)
    header.digests = bytes([digest[0] ^ 1]) + digest[1:] if flip else digest
    header.pages.extend(pages)
    return LentFrame(header, view)
