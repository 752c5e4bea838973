"""Damage on purpose: what a test does to frames before they leave prefill.

Switched on by ``WorkerSettings.fault_injection`` only, as ``"flip:3"``: every third frame.
"""

from dataclasses import dataclass, field

from batonpb import prefill_pb2 as pb

KINDS = ("flip", "swap", "replay", "incarnation", "torn")


@dataclass(slots=True)
class FrameTamperer:
    """Damages every ``every``-th frame.

    flip: one bit of the payload; swap: the payload of the frame before; replay: header and payload
    of the frame before; incarnation: another life's header; torn: half of the payload.
    """

    kind: str
    every: int
    count: int = 0
    damaged: int = 0
    _previous: tuple[pb.ChunkHeader, bytes] | None = field(default=None)

    @classmethod
    def parse(cls, text: str) -> "FrameTamperer | None":
        """From ``"kind:every"``; None for "".

        Raises:
            ValueError: The kind is unknown.
        """
        if not text:
            return None
        kind, _, every = text.partition(":")
        if kind not in KINDS:
            raise ValueError(f"unknown fault {kind!r}; known: {', '.join(KINDS)}")
        return cls(kind, int(every or 1))

    def apply(self, header: pb.ChunkHeader, payload: bytes) -> tuple[pb.ChunkHeader, bytes]:
        """The frame as it will be sent."""
        self.count += 1
        previous, self._previous = self._previous, (header, payload)
        if self.count % self.every or (previous is None and self.kind in ("swap", "replay")):
            return header, payload
        self.damaged += 1
        match self.kind:
            case "flip":
                middle = len(payload) // 2
                flipped = bytes([payload[middle] ^ 1])
                return header, payload[:middle] + flipped + payload[middle + 1 :]
            case "swap" if previous:
                return _with_size(header, previous[1]), previous[1]
            case "replay" if previous:
                return previous
            case "incarnation":
                other = pb.ChunkHeader()
                other.CopyFrom(header)
                other.source_incarnation = b"\0" * 16
                return other, payload
            case _:
                half = payload[: len(payload) // 2]
                return _with_size(header, half), half


def _with_size(header: pb.ChunkHeader, payload: bytes) -> pb.ChunkHeader:
    changed = pb.ChunkHeader()
    changed.CopyFrom(header)
    changed.payload_bytes = len(payload)
    return changed
