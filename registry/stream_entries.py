"""Entries of the stream of KV events, as Redis holds them."""

from collections.abc import Iterable

import msgspec

from registry.types import EventBatch

_HASH_BYTES = 16


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
        incarnation, sequence = fields[b"i"], int(fields[b"n"])
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
    return tuple(_chunks(packed))


def _chunks(packed: bytes) -> Iterable[bytes]:
    for begin in range(0, len(packed), _HASH_BYTES):
        yield packed[begin : begin + _HASH_BYTES]
