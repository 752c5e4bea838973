"""Streams of KV events in Redis; each has the events of a part of the incarnations.

A stream keeps the last ``KEEP_S`` by Redis' own clock, at any rate: a reader that is away for less
misses nothing. A stream above ``STREAM_BYTES``, checked once a second, keeps less, and late readers
read a snapshot.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.registry.types import HASH_BYTES, INCARNATION_BYTES, EventBatch, split_hashes

STREAMS = 8
"""A worker that fills its stream shortens the past of an eighth of the others. Readers name all
streams in each read, which takes some 20 µs longer than one, ten times a second."""

KEEP_S = 30.0
STREAM_BYTES = 16 << 20

BOUND = """
local used = redis.pcall('MEMORY', 'USAGE', KEYS[5])
local entries = redis.call('XLEN', KEYS[5])
if type(used) ~= 'number' then used = entries * 33000 end
local most = tonumber(ARGV[4])
if used > most then
  redis.call('XTRIM', KEYS[5], 'MAXLEN', '~', math.floor(entries * most / used))
end
"""
"""Part of a script: KEYS[5] is a stream, ARGV[4] its size limit in bytes. Without permission for
MEMORY USAGE, the size is estimated from the largest entry."""


class EventStreams:
    """Keys and commands of the streams; ``stem`` is the common start of the keys."""

    def __init__(self, stem: bytes) -> None:
        self._keys = [b"%b:%d" % (stem, number) for number in range(STREAMS)]
        self._ahead_ms: int | None = None  # Redis' clock minus our monotonic clock

    def key(self, incarnation: bytes) -> bytes:
        """Return the key of the stream for an incarnation's events."""
        return self._keys[incarnation[0] % STREAMS]

    def append(self, incarnation: bytes, *fields: Any) -> tuple[Any, ...]:
        """Return the command that adds an entry and drops those that are too old."""
        bound: tuple[Any, ...] = ()
        if self._ahead_ms is not None:
            oldest_ms = _monotonic_ms() + self._ahead_ms - int(KEEP_S * 1000)
            bound = ("MINID", "~", max(oldest_ms, 0))
        return ("XADD", self.key(incarnation), *bound, "*", "i", incarnation, *fields)

    def appended(self, entry_id: bytes) -> None:
        """Process the id of an added entry: it contains Redis' time."""
        self._ahead_ms = stream_order(entry_id)[0] - _monotonic_ms()

    def beginning(self) -> dict[bytes, bytes]:
        """Return the position before the first entry of each stream."""
        return dict.fromkeys(self._keys, b"0-0")

    def tops(self) -> list[tuple[Any, ...]]:
        """Return the commands that read the newest entry of each stream."""
        return [("XREVRANGE", key, "+", "-", "COUNT", 1) for key in self._keys]

    def top_positions(self, answers: Sequence[Any]) -> dict[bytes, bytes]:
        """Return the positions in the replies to ``tops``; ``0-0`` for an empty stream."""
        newest = zip(self._keys, answers, strict=True)
        return {key: bytes(entries[0][0]) if entries else b"0-0" for key, entries in newest}

    def read(
        self, positions: Mapping[bytes, bytes], count: int, wait_s: float = 0.0
    ) -> tuple[Any, ...]:
        """Return the command that reads up to ``count`` entries of each stream after a position.

        If there are none, it waits for one, for up to ``wait_s``.
        """
        wait = ("BLOCK", max(int(wait_s * 1000), 1)) if wait_s > 0 else ()
        return ("XREAD", "COUNT", count, *wait, "STREAMS", *positions, *positions.values())


def stream_order(entry_id: bytes) -> tuple[int, int]:
    """Return the sort key of a stream entry: milliseconds, and a number within."""
    milliseconds, _, counter = entry_id.partition(b"-")
    return int(milliseconds), int(counter or 0)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


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
