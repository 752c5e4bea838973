"""The streams of KV events: each has those of a part of the incarnations.

A stream keeps what came in the last ``KEEP_S``, whatever the rate, by Redis' own clock: whoever was
away for less has missed nothing. Above ``STREAM_BYTES``, which is looked at once a second, it keeps
less: then a snapshot is read.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

STREAMS = 8
"""A worker that fills its stream costs an eighth of the others their past. Readers name them all in
each read, which takes them some 20 µs longer than one, ten times a second."""

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
"""Part of a script: KEYS[5] is a stream, ARGV[4] its bytes. Who may not ask for them is told the
most that its entries can have."""


class EventStreams:
    """Their keys and commands.

    Args:
        stem: Of the keys.
    """

    def __init__(self, stem: bytes) -> None:
        self._keys = [b"%b:%d" % (stem, number) for number in range(STREAMS)]
        self._ahead_ms: int | None = None  # Redis' clock, of our monotonic one
        # Workers of the version before have one stream for all, and bound it themselves.
        self._read = [*self._keys, stem]

    def key(self, incarnation: bytes) -> bytes:
        """The stream of an incarnation's events."""
        return self._keys[incarnation[0] % STREAMS]

    def append(self, incarnation: bytes, *fields: Any) -> tuple[Any, ...]:
        """The command that adds an entry, and drops those that are too old."""
        bound: tuple[Any, ...] = ()
        if self._ahead_ms is not None:
            oldest_ms = _monotonic_ms() + self._ahead_ms - int(KEEP_S * 1000)
            bound = ("MINID", "~", max(oldest_ms, 0))
        return ("XADD", self.key(incarnation), *bound, "*", "i", incarnation, *fields)

    def appended(self, entry_id: bytes) -> None:
        """Redis' answer to that: the number of the entry is its time."""
        self._ahead_ms = stream_order(entry_id)[0] - _monotonic_ms()

    def beginning(self) -> dict[bytes, bytes]:
        """Positions before the first entry of each."""
        return dict.fromkeys(self._read, b"0-0")

    def tops(self) -> list[tuple[Any, ...]]:
        """The commands that ask for the newest entry of each."""
        return [("XREVRANGE", key, "+", "-", "COUNT", 1) for key in self._read]

    def top_positions(self, answers: Sequence[Any]) -> dict[bytes, bytes]:
        """What they answered; ``0-0`` where there is no entry."""
        found = zip(self._read, answers, strict=True)
        return {key: bytes(entries[0][0]) if entries else b"0-0" for key, entries in found}

    def read(
        self, positions: Mapping[bytes, bytes], count: int, wait_s: float = 0.0
    ) -> tuple[Any, ...]:
        """The command that reads up to ``count`` entries of each that come after a position.

        Where there are none, it waits for one.
        """
        wait = ("BLOCK", max(int(wait_s * 1000), 1)) if wait_s > 0 else ()
        return ("XREAD", "COUNT", count, *wait, "STREAMS", *positions, *positions.values())


def stream_order(entry_id: bytes) -> tuple[int, int]:
    """What entries of a stream are sorted by: milliseconds, and a number among them."""
    milliseconds, _, counter = entry_id.partition(b"-")
    return int(milliseconds), int(counter or 0)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
