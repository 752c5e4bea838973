"""The sending side of every transport: slices of KV transfers, copied out of the pool or lent.

``kvtransfer.sender.HandoffSender`` decides what may be read, and how long the pages are held.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from batonpb import common_pb2
from batonpb import prefill_pb2 as pb

from baton.types.errors import PullRefusedError
from baton.wire.codecs import error_to_wire
from kvtransfer import chunk
from kvtransfer.kv_slice import MOST_FRAME_BYTES, KvSlice
from kvtransfer.lent_pages import page_digest
from kvtransfer.rank_pools import RankPools
from kvtransfer.sender import Action, HandoffSender, SenderState

Key = tuple[str, int, int, bytes]
"""Identity of a KV transfer: request, attempt, generation and the reader's incarnation."""


def key_of(request: pb.PullRequest) -> Key:
    """Return the key of a pull; each engine counts generations from 1, so it names the reader."""
    return (request.request_id, request.attempt, request.generation, request.reader_incarnation)


Room = Callable[[int], Awaitable[memoryview]]
"""Returns memory of that size for one frame, so that its bytes are copied only once. A second call
before the frame was taken replaces the first."""

T = TypeVar("T")

_GONE = common_pb2.Error(
    code="gone",
    message="this worker does not hold the requested blocks (any more)",
    retryable=True,
)


@dataclass(frozen=True, slots=True)
class HeldKv:
    """KV of one transfer."""

    machine: HandoffSender
    perform: Callable[[list[Action]], None]


@dataclass(frozen=True, slots=True)
class PageLoan:
    """Pages that another process reads; it calls ``end`` once, when it has read them."""

    chunks: Sequence[pb.ChunkHeader]  # for each requested slice its pages and digest, or an error
    end: Callable[[], None]


class PoolSource:
    """The sending side's source of a worker's KV.

    Args:
        pool: Pool of this worker, or the pools of its ranks.
        incarnation: This worker's incarnation; requests for another one get the error "gone".
        find: Returns the KV of a key, or None.
        note_sent: Called with payload bytes that are sent or lent.
        refusal: Returns why a reader may not have what it requests; "" if it may.
        encodings: Encodings that frames may have besides PLAIN. Requests for others get PLAIN.
    """

    def __init__(
        self,
        pool: RankPools,
        incarnation: bytes,
        find: Callable[[Key], HeldKv | None],
        note_sent: Callable[[int], None] = lambda _: None,
        refusal: Callable[[pb.PullRequest], str] = lambda _: "",
        encodings: Collection[common_pb2.ChunkEncoding] = (),
    ) -> None:
        self._pool = pool
        self._incarnation = incarnation
        self._find = find
        self._note_sent = note_sent
        self._refusal = refusal
        self._encodings = encodings

    async def frames(self, request: pb.PullRequest, room: Room) -> AsyncIterator[int]:
        """Yield the sizes of the requested slices' frames (``kvtransfer.chunk``), in that order.

        Each frame is in the room that was requested last.
        """
        refusal = self._refusal(request)
        for message in request.kv_slices:
            kv_slice = KvSlice.from_wire(message)
            if refusal:
                yield await self._write_error(request, kv_slice, _refused(refusal), room)
            else:
                yield await self._frame(request, kv_slice, room)

    def may_attach(self, request: pb.PullRequest) -> bool:
        """Return whether a reader may map the pool for this pull."""
        return not self._refusal(request)

    async def lend(self, request: pb.PullRequest) -> PageLoan:
        """Lend pages of the requested slices, as far as they may be read."""
        asked = [KvSlice.from_wire(message) for message in request.kv_slices]
        if refusal := self._refusal(request):
            error = _refused(refusal)
            return PageLoan([self._header(request, s, error) for s in asked], lambda: None)
        held = self._held(request)
        readable = [s for s in asked if held is not None and held.machine.may_read(s)]
        if held is None or not readable:
            return PageLoan([self._header(request, s, _GONE) for s in asked], lambda: None)
        bound = self._bound(request)
        blocks = held.machine.blocks
        digests = await _while_open(held, lambda: self._digests(blocks, readable, bound))
        lent = dict(zip(readable, digests or [], strict=False))
        chunks = [
            self._lent(request, kv_slice, blocks, lent[kv_slice])
            if kv_slice in lent
            else self._header(request, kv_slice, _GONE)
            for kv_slice in asked
        ]
        held.machine.lend(len(lent))
        return PageLoan(chunks, lambda: held.perform(held.machine.loan_ended(len(lent))))

    async def _frame(self, request: pb.PullRequest, kv_slice: KvSlice, room: Room) -> int:
        held = self._held(request)
        if held is None or not held.machine.may_read(kv_slice):
            return await self._write_error(request, kv_slice, _GONE, room)
        header = self._header(request, kv_slice)
        encoding = request.encoding if request.encoding in self._encodings else common_pb2.PLAIN
        header.encoding = encoding
        room_bytes = chunk.make_room(header, kv_slice, self._pool.geometry)
        size_bytes = room_bytes + header.payload_bytes
        if size_bytes > MOST_FRAME_BYTES:
            why = f"frame of {size_bytes} bytes requested, limit {MOST_FRAME_BYTES}: request less"
            too_large = common_pb2.Error(code="invalid_request", message=why)
            return await self._write_error(request, kv_slice, too_large, room)
        frame = await room(size_bytes)
        payload = frame[room_bytes:]
        bound = self._bound(request)
        if not held.machine.may_read(kv_slice):  # waiting for the room may have taken long
            return await self._write_error(request, kv_slice, _GONE, room)
        blocks = held.machine.blocks
        digests = await _while_open(
            held, lambda: self._copy(blocks, kv_slice, bound, payload, encoding)
        )
        if digests is None:  # revoked while reading: the bytes may be another request's
            return await self._write_error(request, kv_slice, _GONE, room)
        header.digests = digests
        self._note_sent(len(payload))
        chunk.put_header(header, frame, room_bytes)
        return size_bytes

    def _held(self, request: pb.PullRequest) -> HeldKv | None:
        if request.source_incarnation != self._incarnation:
            return None
        return self._find(key_of(request))

    def _bound(self, request: pb.PullRequest) -> bytes:
        key = (request.request_id, request.attempt, request.generation)
        return chunk.binding(*key, self._incarnation)

    def _copy(
        self,
        blocks: Sequence[int],
        kv_slice: KvSlice,
        bound: bytes,
        payload: memoryview,
        encoding: common_pb2.ChunkEncoding,
    ) -> bytes:
        """Write the payload and return its digests; runs in a thread."""
        return self._pool.holding(kv_slice)[0].copy_out(blocks, kv_slice, bound, payload, encoding)

    def _digests(
        self, blocks: Sequence[int], kv_slices: Sequence[KvSlice], bound: bytes
    ) -> list[bytes]:
        """Return one digest for each slice; runs in a thread."""
        return [page_digest(self._pool.holding(s)[0], s.pages(blocks), s, bound) for s in kv_slices]

    def _lent(
        self, request: pb.PullRequest, kv_slice: KvSlice, blocks: Sequence[int], digest: bytes
    ) -> pb.ChunkHeader:
        header = self._header(request, kv_slice)
        header.pages.extend(kv_slice.pages(blocks))
        header.digests = digest
        self._note_sent(kv_slice.payload_bytes(self._pool.geometry))
        return header

    async def _write_error(
        self, request: pb.PullRequest, kv_slice: KvSlice, error: common_pb2.Error, room: Room
    ) -> int:
        """Write a frame with an error into ``room``, and return its size."""
        frame = chunk.encode(self._header(request, kv_slice, error), b"")
        (await room(len(frame)))[:] = frame
        return len(frame)

    def _header(
        self, request: pb.PullRequest, kv_slice: KvSlice, error: common_pb2.Error | None = None
    ) -> pb.ChunkHeader:
        return pb.ChunkHeader(
            request_id=request.request_id,
            attempt=request.attempt,
            generation=request.generation,
            source_incarnation=self._incarnation,
            kv_slice=kv_slice.to_wire(),
            error=error,
        )


def _refused(refusal: str) -> common_pb2.Error:
    text = f"the capability to pull KV of this request is {refusal}"
    return error_to_wire(PullRefusedError(text))


async def _while_open(held: HeldKv, read: Callable[[], T]) -> T | None:
    """Read in a thread; return None if the KV transfer ended meanwhile."""
    held.machine.read_begins()
    try:
        result = await asyncio.to_thread(read)
    finally:
        still_open = held.machine.state is SenderState.OPEN
        held.perform(held.machine.read_ended())
    return result if still_open else None
