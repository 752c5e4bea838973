"""Redis format of the entries in the streams of KV events."""

import contextlib
from collections.abc import Sequence

import msgspec

from baton.registry.types import HASH_BYTES, INCARNATION_BYTES, EventBatch, split_hashes


class StreamMark(msgspec.Struct, frozen=True):
    """Stream entry without hashes: ``snapshot`` or ``forget``."""

    incarnation: bytes
    sequence: int
    kind: str


StreamEntry = EventBatch | StreamMark


def parse_entry(fields: dict[bytes, bytes]) -> StreamEntry | None:
    """Parse a stream entry; None for an entry of another version."""
    kind = fields.get(b"k")
    try:
        incarnation = fields[b"i"]
        sequence = int(fields[b"n"])
        if len(incarnation) != INCARNATION_BYTES:
            return None
        if kind == b"b":
            return EventBatch(
                incarnation=incarnation,
                sequence=sequence,
                stored=_split(fields[b"s"]),
                removed=_split(fields[b"r"]),
            )
    except (KeyError, ValueError):
        return None  # another version: the gap in the sequence is noticed later
    kinds = {b"s": "snapshot", b"f": "forget"}
    return StreamMark(incarnation, sequence, kinds[kind]) if kind in kinds else None


def _split(packed: bytes) -> tuple[bytes, ...]:
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are not hashes of {HASH_BYTES} bytes each")
    return tuple(split_hashes(packed))


def parse_mark(mark: bytes | None) -> tuple[int, int] | None:
    """Return sequence and checksum of a set; None without a readable mark."""
    sequence, _, checksum = (mark or b"").partition(b" ")
    return (int(sequence), int(checksum)) if sequence.isdigit() and checksum.isdigit() else None


def with_log(packed: bytes, log: Sequence[bytes]) -> bytes:
    """Apply a log of batches to a worker's set of hashes.

    Unreadable batches are skipped; the checksum reveals them.
    """
    if not log:
        return packed
    hashes = dict.fromkeys(split_hashes(packed))
    for raw in log:
        with contextlib.suppress(msgspec.DecodeError):
            stored, removed = msgspec.msgpack.decode(raw, type=tuple[bytes, bytes])
            for block_hash in split_hashes(removed):
                hashes.pop(block_hash, None)
            hashes |= dict.fromkeys(split_hashes(stored))
    return b"".join(hashes)
