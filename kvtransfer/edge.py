"""What a decode worker knows of the way from one prefill worker: how fast, by which transport.

The first transport that both ends have is taken, unless another one was measured to be clearly
faster. One that fails is left alone for a while, twice as long each time, and then tried again;
meanwhile, and within the pull that failed, the fallback does.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

_ASSUMED_BYTES_PER_S = 200e6  # of an edge that was not measured yet, for a pull's budget
_SAMPLES = 9
_LEAST_SAMPLE_BYTES = 1 << 16  # smaller ones say more about latency than about bandwidth
_CLEARLY_FASTER = 1.25
_FRAME_S = 1.0  # on the wire, at most
_LEAST_FRAME_BYTES = 1 << 18
_TRY_AGAIN_PULLS = 32  # so often a transport that was measured to be slower may show itself
FIRST_COOL_DOWN_NS = 5_000_000_000
MAX_COOL_DOWN_NS = 80_000_000_000
_INT8_CODED_BYTES_PER_S = 200e6  # of plain KV, to int8 at one end and back at the other
_INT8_ENCODED_BYTES_PER_S = 300e6  # at the sender, the slower end


def int8_pays(plain_bytes: int, int8_bytes: int, bytes_per_s: float, frame_bytes: int) -> bool:
    """Whether a pull is over sooner in int8.

    A frame is coded while others are on the wire. So coding is seen of one frame only, unless the
    sender is slower with it than the wire.

    Args:
        plain_bytes: Of the pull, as it is.
        int8_bytes: Of the same pull in int8.
        bytes_per_s: Of the wire.
        frame_bytes: Of one frame, as it is, at most.
    """
    moved_s = max(int8_bytes / bytes_per_s, plain_bytes / _INT8_ENCODED_BYTES_PER_S)
    one_frame_s = min(frame_bytes, plain_bytes) / _INT8_CODED_BYTES_PER_S
    return moved_s + one_frame_s < plain_bytes / bytes_per_s


class EdgeRate:
    """Bandwidth from one prefill worker to here, fitted to hand-offs.

    The median byte of the last pulls: half of the bytes came at this rate or faster. A small pull
    tells of latency, and one that waited for the wire behind another's tells of nothing; an edge
    that is believed slow is avoided, so that nobody would learn better.
    """

    def __init__(self) -> None:
        self._pulls: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)  # bytes/s, bytes
        self._bytes_per_s = _ASSUMED_BYTES_PER_S

    @property
    def measured(self) -> bool:
        """Whether a hand-off said anything yet."""
        return bool(self._pulls)

    @property
    def bytes_per_s(self) -> float:
        """As measured, or what is assumed until then."""
        return self._bytes_per_s

    def note(self, payload_bytes: int, seconds: float) -> None:
        """One pull moved that much in that time."""
        if payload_bytes >= _LEAST_SAMPLE_BYTES and seconds > 0:
            self._add(payload_bytes / seconds, payload_bytes)

    def note_late(self, asked_bytes: int, less_than_bytes: int, seconds: float) -> None:
        """One pull outlasted its budget: of what it asked for, less than that much came."""
        bytes_per_s = less_than_bytes / seconds
        if bytes_per_s < self._bytes_per_s:  # else it says nothing of the wire
            self._add(bytes_per_s, asked_bytes)

    def _add(self, bytes_per_s: float, weight_bytes: int) -> None:
        self._pulls.append((bytes_per_s, weight_bytes))
        self._bytes_per_s = _median_byte(self._pulls)


def _median_byte(pulls: Iterable[tuple[float, int]]) -> float:
    fastest_first = sorted(pulls, reverse=True)
    half_bytes = sum(payload_bytes for _, payload_bytes in fastest_first) / 2
    came_bytes = accumulate(payload_bytes for _, payload_bytes in fastest_first)
    middle = next(i for i, so_far_bytes in enumerate(came_bytes) if so_far_bytes >= half_bytes)
    return fastest_first[middle][0]


@dataclass(slots=True)
class _Way:
    """One transport."""

    rate: EdgeRate  # of plain pulls
    int8_rate: EdgeRate  # of KV, not of the wire
    int8_pulls: int = 0
    cool_until_ns: int = 0
    cool_down_ns: int = FIRST_COOL_DOWN_NS  # the next time that it fails


class Edge:
    """One prefill worker to this worker. Time is passed in.

    Args:
        fallback: The transport that is never left alone.
    """

    def __init__(self, fallback: str = "grpc") -> None:
        self._fallback = fallback
        self._ways: dict[str, _Way] = {}
        self._last = self.rate(fallback)  # of what moved something
        self._passed_over = 0  # how often the first of the list was

    @property
    def measured(self) -> bool:
        """Whether a hand-off said anything yet."""
        return self._last.measured

    @property
    def bytes_per_s(self) -> float:
        """As measured by the transport that moved something last, or what is assumed."""
        return self._last.bytes_per_s

    def frame_bytes(self, name: str, best_bytes: int) -> int:
        """Size of frames by one transport: none takes the wire long, or nothing comes in time.

        Args:
            name: Of the transport.
            best_bytes: With which it is fastest.
        """
        rate = self.rate(name)
        if not rate.measured:
            return best_bytes
        return min(best_bytes, max(round(_FRAME_S * rate.bytes_per_s), _LEAST_FRAME_BYTES))

    def rate(self, name: str) -> EdgeRate:
        """Bandwidth by one transport, of plain pulls."""
        return self._way(name).rate

    def ways(self, usable: Sequence[str], now_ns: int) -> list[str]:
        """The transport to pull by, and the fallback behind it.

        Args:
            usable: Those that both ends have, best first.
            now_ns: The time.
        """
        warm = [
            name
            for name in usable
            if name == self._fallback or now_ns >= self._way(name).cool_until_ns
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
        return [best, *(name for name in warm if name == self._fallback != best)]

    def asks_int8(
        self, name: str, plain_bytes: int, int8_bytes: int, best_frame_bytes: int
    ) -> bool:
        """Whether a pull is to ask for int8, where both ends have it.

        Only plain pulls tell how fast the wire is, so the first one is plain, and each 32nd.
        """
        way = self._way(name)
        frame_bytes = self.frame_bytes(name, best_frame_bytes)
        sizes = (plain_bytes, int8_bytes)
        if not way.rate.measured or not int8_pays(*sizes, way.rate.bytes_per_s, frame_bytes):
            return False
        way.int8_pulls += 1
        return bool(way.int8_pulls % _TRY_AGAIN_PULLS)

    def note(self, name: str, plain_bytes: int, seconds: float, *, int8: bool = False) -> None:
        """A whole pull of so much KV went well."""
        way = self._way(name)
        way.cool_down_ns = FIRST_COOL_DOWN_NS
        rate = way.int8_rate if int8 else way.rate
        rate.note(plain_bytes, seconds)
        if rate.measured or not int8:
            self._last = rate

    def note_late(self, name: str, asked_bytes: int, less_than_bytes: int, seconds: float) -> None:
        """A pull outlasted its budget: its link is no faster than this, in bytes on the wire.

        Without it a link on which every pull is late would never be known to be slow.
        """
        rate = self.rate(name)
        rate.note_late(asked_bytes, less_than_bytes, seconds)
        if rate.measured:
            self._last = rate

    def failed(self, name: str, now_ns: int) -> None:
        """A pull went wrong: leave this transport alone for a while."""
        way = self._way(name)
        if name == self._fallback or now_ns < way.cool_until_ns:
            return  # pulls that fail together count once
        way.cool_until_ns = now_ns + way.cool_down_ns
        way.cool_down_ns = min(2 * way.cool_down_ns, MAX_COOL_DOWN_NS)

    def begin_life(self) -> None:
        """Another life of the worker was met: what its last one could not do it may."""
        for way in self._ways.values():
            way.cool_until_ns = 0
            way.cool_down_ns = FIRST_COOL_DOWN_NS

    def _way(self, name: str) -> _Way:
        return self._ways.setdefault(name, _Way(EdgeRate(), EdgeRate()))
