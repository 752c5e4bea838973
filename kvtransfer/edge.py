"""The link from one prefill worker to this decode worker: its bandwidth, and the transport to use.

The first transport that both ends have is used, unless another one was measured to be clearly
faster. A transport that fails is suspended, twice as long each time, and then tried again. During
that time, and for the rest of the pull that failed, the fallback is used.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

FALLBACK = "grpc"
"""Transport that reaches every peer, is never suspended, and is used if another one fails."""

_ASSUMED_BYTES_PER_S = 200e6  # of an edge without measurements, for a pull's timeout
_SAMPLES = 9
_LEAST_SAMPLE_BYTES = 1 << 16  # smaller pulls measure latency rather than bandwidth
_CLEARLY_FASTER = 1.25
_FRAME_S = 1.0  # longest time of a frame on the wire
_LEAST_FRAME_BYTES = 1 << 18
_TRY_AGAIN_PULLS = 32  # a transport that was measured to be slower is tried once in so many pulls
FIRST_COOL_DOWN_NS = 5_000_000_000
MAX_COOL_DOWN_NS = 80_000_000_000
_INT8_CODED_BYTES_PER_S = 200e6  # plain KV per second, encoded at one end and decoded at the other
_INT8_ENCODED_BYTES_PER_S = 300e6  # at the sender, the slower end


def int8_pays(plain_bytes: int, int8_bytes: int, bytes_per_s: float, frame_bytes: int) -> bool:
    """Return whether a pull finishes sooner in int8.

    A frame is encoded while others are on the wire. So only one frame's coding adds to the time,
    unless the sender encodes more slowly than the wire transfers.
    """
    moved_s = max(int8_bytes / bytes_per_s, plain_bytes / _INT8_ENCODED_BYTES_PER_S)
    one_frame_s = min(frame_bytes, plain_bytes) / _INT8_CODED_BYTES_PER_S
    return moved_s + one_frame_s < plain_bytes / bytes_per_s


class EdgeRate:
    """Bandwidth from one prefill worker to this worker, estimated from recent KV transfers.

    The estimate is the rate of the median byte of the last pulls: half of the bytes arrived at this
    rate or faster. A small pull measures latency instead, and a pull that waited for another one
    measures nothing. An edge that is wrongly taken for slow would be avoided and never corrected.
    """

    def __init__(self) -> None:
        self._pulls: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)  # bytes/s, bytes
        self.bytes_per_s = _ASSUMED_BYTES_PER_S  # until the first measurement

    @property
    def measured(self) -> bool:
        """True once there is a measurement."""
        return bool(self._pulls)

    def note(self, payload_bytes: int, seconds: float) -> None:
        """Record the size and duration of one pull."""
        if payload_bytes >= _LEAST_SAMPLE_BYTES and seconds > 0:
            self._add(payload_bytes / seconds, payload_bytes)

    def note_late(self, asked_bytes: int, less_than_bytes: int, seconds: float) -> None:
        """Record a pull of ``asked_bytes`` that brought less than so many bytes in its timeout."""
        bytes_per_s = less_than_bytes / seconds
        if bytes_per_s < self.bytes_per_s:  # otherwise it is no bound on the wire
            self._add(bytes_per_s, asked_bytes)

    def _add(self, bytes_per_s: float, weight_bytes: int) -> None:
        self._pulls.append((bytes_per_s, weight_bytes))
        self.bytes_per_s = _median_byte(self._pulls)


def _median_byte(pulls: Iterable[tuple[float, int]]) -> float:
    fastest_first = sorted(pulls, reverse=True)
    half_bytes = sum(payload_bytes for _, payload_bytes in fastest_first) / 2
    came_bytes = accumulate(payload_bytes for _, payload_bytes in fastest_first)
    middle = next(i for i, so_far_bytes in enumerate(came_bytes) if so_far_bytes >= half_bytes)
    return fastest_first[middle][0]


@dataclass(slots=True)
class _Way:
    """Measurements and pause of one transport."""

    rate: EdgeRate  # of plain pulls
    int8_rate: EdgeRate  # of KV before encoding, not of the wire
    int8_pulls: int = 0
    cool_until_ns: int = 0
    cool_down_ns: int = FIRST_COOL_DOWN_NS  # for the next failure


class Edge:
    """Link from one prefill worker to this worker. The time is passed in."""

    def __init__(self) -> None:
        self._ways: dict[str, _Way] = {}
        self._last = self.rate(FALLBACK)  # of the transport that was measured last
        self._passed_over = 0  # how often the first of the list was

    @property
    def measured(self) -> bool:
        """True once there is a measurement."""
        return self._last.measured

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the transport that was measured last, or the assumed one."""
        return self._last.bytes_per_s

    def frame_bytes(self, name: str, best_bytes: int) -> int:
        """Return the frame size of a transport, so small that no frame occupies the wire long."""
        rate = self.rate(name)
        if not rate.measured:
            return best_bytes
        return min(best_bytes, max(round(_FRAME_S * rate.bytes_per_s), _LEAST_FRAME_BYTES))

    def rate(self, name: str) -> EdgeRate:
        """Return the bandwidth of one transport, for plain pulls."""
        return self._way(name).rate

    def ways(self, usable: Sequence[str], now_ns: int) -> list[str]:
        """Return the transport to pull by, then the fallback, of ``usable`` ones (best first)."""
        warm = [
            name for name in usable if name == FALLBACK or now_ns >= self._way(name).cool_until_ns
        ]
        if not warm:
            return []
        best = warm[0]
        for name in warm[1:]:
            rate = self.rate(name)
            best_rate = self.rate(best)
            both = rate.measured and best_rate.measured
            if both and rate.bytes_per_s > _CLEARLY_FASTER * best_rate.bytes_per_s:
                best = name
        if best != warm[0]:
            self._passed_over += 1
            if not self._passed_over % _TRY_AGAIN_PULLS:
                best = warm[0]
        return [best, *(name for name in warm if name == FALLBACK != best)]

    def asks_int8(
        self, name: str, plain_bytes: int, int8_bytes: int, best_frame_bytes: int
    ) -> bool:
        """Return whether a pull should request int8, where both ends have it.

        Only plain pulls measure the wire, so the first one is plain, and each 32nd.
        """
        way = self._way(name)
        frame_bytes = self.frame_bytes(name, best_frame_bytes)
        if not way.rate.measured:
            return False
        if not int8_pays(plain_bytes, int8_bytes, way.rate.bytes_per_s, frame_bytes):
            return False
        way.int8_pulls += 1
        return bool(way.int8_pulls % _TRY_AGAIN_PULLS)

    def note(self, name: str, plain_bytes: int, seconds: float, *, int8: bool = False) -> None:
        """Record a complete pull of so much KV."""
        way = self._way(name)
        way.cool_down_ns = FIRST_COOL_DOWN_NS
        rate = way.int8_rate if int8 else way.rate
        rate.note(plain_bytes, seconds)
        if rate.measured or not int8:
            self._last = rate

    def note_late(self, name: str, asked_bytes: int, less_than_bytes: int, seconds: float) -> None:
        """Record a pull that timed out; its sizes are in bytes on the wire.

        Without this, a link on which every pull times out would never be found to be slow.
        """
        rate = self.rate(name)
        rate.note_late(asked_bytes, less_than_bytes, seconds)
        if rate.measured:
            self._last = rate

    def failed(self, name: str, now_ns: int) -> None:
        """Suspend a transport after a failed pull."""
        way = self._way(name)
        if name == FALLBACK or now_ns < way.cool_until_ns:
            return  # pulls that fail together count once
        way.cool_until_ns = now_ns + way.cool_down_ns
        way.cool_down_ns = min(2 * way.cool_down_ns, MAX_COOL_DOWN_NS)

    def begin_life(self) -> None:
        """Lift all suspensions: another incarnation of the worker was met."""
        for way in self._ways.values():
            way.cool_until_ns = 0
            way.cool_down_ns = FIRST_COOL_DOWN_NS

    def _way(self, name: str) -> _Way:
        return self._ways.setdefault(name, _Way(EdgeRate(), EdgeRate()))
