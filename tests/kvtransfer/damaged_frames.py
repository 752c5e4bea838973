"""Deliberate damage to frames before they leave the prefill worker.

``"flip:3"`` damages every third frame, ``"flip:3:1"`` every third one of the frames whose first
head is number 1.
"""

from dataclasses import dataclass, field

from batonpb import prefill_pb2 as pb

from kvtransfer import chunk
from kvtransfer.kv_slice import KvSlice
from kvtransfer.pool_source import PoolSource, Room

KINDS = ("flip", "swap", "replay", "incarnation", "torn")


@dataclass(slots=True)
class FrameTamperer:
    """Damages every ``every``-th frame.

    flip: one bit of the payload; swap: the payload of the frame before; replay: header and payload
    of the frame before; incarnation: another incarnation in the header; torn: half of the payload.

    Lent pages have no payload: there the list of pages is damaged, or, for flip, their digest.
    """

    kind: str
    every: int
    head: int | None = None
    count: int = 0
    damaged: int = 0
    _previous: tuple[pb.ChunkHeader, bytes] | None = field(default=None)

    @classmethod
    def parse(cls, text: str) -> "FrameTamperer":
        """Read ``"kind:every"`` or ``"kind:every:head"``."""
        kind, every, *head = text.split(":")
        if kind not in KINDS:
            raise ValueError(f"unknown fault {kind!r}; known kinds: {', '.join(KINDS)}")
        return cls(kind, int(every), int(head[0]) if head else None)

    def apply(self, header: pb.ChunkHeader, payload: bytes) -> tuple[pb.ChunkHeader, bytes]:
        """Return the frame as it will be sent."""
        previous = self._take_turn(header, payload)
        if previous is None:
            return header, payload
        match self.kind:
            case "flip":
                return header, _flipped(payload)
            case "swap":
                return _changed(header, payload_bytes=len(previous[1])), previous[1]
            case "replay":
                return previous
            case "incarnation":
                return _changed(header, source_incarnation=b"\0" * 16), payload
            case _:
                half = payload[: len(payload) // 2]
                return _changed(header, payload_bytes=len(half)), half

    def apply_to_loan(self, header: pb.ChunkHeader) -> pb.ChunkHeader:
        """Return the header as it will be sent."""
        previous = self._take_turn(header, b"")
        if previous is None:
            return header
        match self.kind:
            case "flip":
                return _changed(header, digests=_flipped(header.digests))
            case "swap":
                return _with_pages(header, list(previous[0].pages))
            case "replay":
                return previous[0]
            case "incarnation":
                return _changed(header, source_incarnation=b"\0" * 16)
            case _:
                return _with_pages(header, list(header.pages)[: len(header.pages) // 2])

    def _take_turn(
        self, header: pb.ChunkHeader, payload: bytes
    ) -> tuple[pb.ChunkHeader, bytes] | None:
        """Return the previous frame if this one is to be damaged, else None."""
        if self.head is not None and header.kv_slice.head_begin != self.head:
            return None
        self.count += 1
        previous = self._previous
        self._previous = (header, payload)
        if self.count % self.every or (previous is None and self.kind in ("swap", "replay")):
            return None
        self.damaged += 1
        return previous or (header, payload)


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _changed(header: pb.ChunkHeader, **fields: object) -> pb.ChunkHeader:
    changed = pb.ChunkHeader()
    changed.CopyFrom(header)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _with_pages(header: pb.ChunkHeader, pages: list[int]) -> pb.ChunkHeader:
    changed = _changed(header)
    changed.pages[:] = pages
    return changed


class DamagingSource(PoolSource):
    """Source whose frames and loans are damaged on their way out."""

    def __init__(self, damage: str, *source_of: object, **more: object) -> None:
        super().__init__(*source_of, **more)
        self._tamperer = FrameTamperer.parse(damage)

    async def _frame(self, request: pb.PullRequest, kv_slice: KvSlice, room: Room) -> int:
        whole = bytearray()

        async def keep(size_bytes: int) -> memoryview:
            whole.extend(bytes(size_bytes))
            return memoryview(whole)

        await super()._frame(request, kv_slice, keep)
        header, payload = chunk.decode(bytes(whole))
        if not header.HasField("error"):
            header, payload = self._tamperer.apply(header, bytes(payload))
        frame = chunk.encode(header, payload)
        (await room(len(frame)))[:] = frame
        return len(frame)

    def _lent(self, *loan: object) -> pb.ChunkHeader:
        return self._tamperer.apply_to_loan(super()._lent(*loan))
