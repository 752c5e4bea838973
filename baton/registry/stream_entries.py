"""Entries of the stream of KV events, as Redis holds them."""

import contextlib
from collections.abc import Sequence

import msgspec

from baton.registry.types import HASH_BYTES, INCARNATION_BYTES, EventBatch, split_hashes


class StreamMark(msgspec.Struct, frozen=True):
    """An entry of the stream that carries no hashes: ``snapshot`` or ``forget``."""

    incarnation: bytes
    sequence: int
    kind: str


StreamEntry = EventBatch | StreamMark


def parse_entry(fields: dict[bytes, bytes]) -> StreamEntry | None:
    """What an entry says; None if it is of another version."""
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
                cleared=fields[b"c"] == b"1",
            )
    except (KeyError, ValueError):
        return None  # from another version: the sequence will show a hole
    kinds = {b"s": "snapshot", b"f": "forget"}
    return StreamMark(incarnation, sequence, kinds[kind]) if kind in kinds else None


def _split(packed: bytes) -> tuple[bytes, ...]:
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are no hashes of {HASH_BYTES} each")
    return tuple(split_hashes(packed))


def parse_mark(mark: bytes | None) -> tuple[int, int] | None:
    """Sequence and checksum of a set; None if there is no mark, or one of another version."""
    sequence, _, checksum = (mark or b"").partition(b" ")
    return (int(sequence), int(checksum)) if sequence.isdigit() and checksum.isdigit() else None


def with_log(packed: bytes, log: Sequence[bytes]) -> bytes:
    """A worker's set of hashes, and the batches that changed it since, as one set.

    What cannot be read is left out: the checksum tells.
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
