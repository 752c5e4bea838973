"""Credit for receiving KV, over all hand-offs and prefix pulls of a worker. Sans-IO.

Two things are limited. Bytes in flight: requested and not stored yet. And, while responses are
being generated, CPU time of the shell: receiving takes it from the engine's step, which waits for
its slowest thread. So receiving may take a share of one core, ``cpu_share``. Its cost is measured:
CPU time of the process while something is in flight, less what the process uses without receiving.
This gives the cost per byte of a peer, and so the rate in bytes. Unused time is saved for a while,
so that a single hand-off is not held back. None is held back for longer than `MOST_HELD_NS`: bursts
are paced, and a worker that must permanently receive more than the pace still receives it.

Self-clocked fair queueing picks the next frame: each hand-off gets the same bandwidth, a small one
does not wait behind a large one, and none starves. The cost of an event does not grow with the
number of waiting hand-offs.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

IN_FLIGHT_BYTES = 64 << 20  # the window of one hand-off, in frames of 4 MiB
SAVED_UP_NS = 2_000_000_000  # of idle time that is credited; also the largest debt
MOST_HELD_NS = 5_000_000_000  # longest delay of one hand-off by the pace
_ASSUMED_BYTES_PER_CPU_S = 400e6  # from a peer without measurement
_REMEMBERED_BYTES = 64 << 20  # of a peer, for the cost per byte
_MAX_COST_FACTOR = 4  # over the expected cost; more is caused by other work
_REMEMBERED_NS = 1_000_000_000  # of time without receiving, for the base load
_NEVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class CreditGrant:
    """Permission to request the first ``frames`` frames of a demand; 0 if the hand-off is over."""

    demand: int
    frames: int


@dataclass(slots=True)
class _Demand:
    owner: str
    peer: str
    frame_bytes: tuple[int, ...]
    tag: int  # of its next frame: the lowest goes first
    frames: int = 0  # granted
    in_flight_bytes: int = 0

    @property
    def last_tag(self) -> int:
        return self.tag + sum(self.frame_bytes[self.frames + 1 :])


class _Lowest:
    """Queue of demands by rank, lowest first, equal ranks by age."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # with stale entries

    def put(self, number: int, rank: int) -> None:
        self._ranks[number] = rank
        if len(self._heap) > 2 * len(self._ranks) + 16:
            self._heap = [(rank, number) for number, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, number))

    def move(self, number: int, rank: int) -> None:
        if number in self._ranks:
            self.put(number, rank)

    def discard(self, number: int) -> None:
        self._ranks.pop(number, None)

    def first(self) -> tuple[int, int] | None:
        while self._heap and self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


@dataclass(slots=True)
class _Ratio:
    """``taken`` per ``given``; older values fade as more than ``remembered`` is given."""

    taken: float
    given: float
    remembered: float

    def add(self, taken: float, given: float) -> None:
        kept = max(0.0, 1 - given / self.remembered)
        self.taken = self.taken * kept + taken
        self.given = self.given * kept + given

    @property
    def value(self) -> float:
        return self.taken / self.given if self.given else 0.0


@dataclass(slots=True)
class _Period:
    began_ns: int
    began_cpu_ns: int
    peer: str = ""  # "": none, or several
    bytes: int = 0
    expected_ns: float = 0.0  # CPU time of what was granted
    charged_ns: float = 0.0  # part of it that was granted during decoding


class ReceiveCredit:
    """Credit for received bytes and CPU time. Times are passed in.

    Args:
        cpu_share: Share of one core for receiving while responses are generated; 0 for no limit.
        in_flight_bytes: Limit of bytes requested and not stored. A larger frame goes alone.
        cpu_ns: CPU time that the process has used.
    """

    def __init__(
        self,
        cpu_share: float,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        now_ns: int = 0,
        cpu_ns: int = 0,
    ) -> None:
        self.in_flight_bytes = 0
        self._cpu_share = cpu_share
        self._limit_bytes = in_flight_bytes
        self._decoding = False
        self._saved_cpu_ns = self._most_saved_cpu_ns = cpu_share * SAVED_UP_NS
        self._saved_at_ns = now_ns
        self._waiting: dict[int, _Demand] = {}
        self._flying: dict[int, _Demand] = {}
        self._of_owner: dict[str, set[int]] = {}  # waiting and flying
        self._by_tag = _Lowest()  # all that wait
        self._patient = _Lowest()  # of them those that the pace delays, by the end of the delay
        self._urgent = _Lowest()  # and the others, by tag
        self._tag = 0  # of the frame that was granted last
        self._demands = 0
        self._costs: dict[str, _Ratio] = {}  # CPU ns per byte from a peer
        self._base_load = _Ratio(0.0, 0.0, _REMEMBERED_NS)  # CPU ns per ns without receiving
        self._period = _Period(now_ns, cpu_ns)

    def ask(
        self, owner: str, peer: str, frame_bytes: Sequence[int], urgent_ns: int = _NEVER_NS
    ) -> int:
        """Queue a demand of a hand-off for frames of these sizes, in order; return its number.

        From ``urgent_ns`` on the pace does not delay it.
        """
        self._demands += 1
        number = self._demands
        own = self._of_owner.setdefault(owner, set())
        before = [self._waiting[number].last_tag for number in own if number in self._waiting]
        tag = max([self._tag, *before]) + frame_bytes[0]
        self._waiting[number] = _Demand(owner, peer, tuple(frame_bytes), tag)
        own.add(number)
        self._by_tag.put(number, tag)
        self._patient.put(number, urgent_ns)
        return number

    def waits(self, owner: str) -> bool:
        """Return whether a hand-off waits for credit."""
        return any(number in self._waiting for number in self._of_owner.get(owner, ()))

    def decoding(self, *, on: bool, now_ns: int) -> None:
        """Note whether responses are being generated."""
        self._save_up(now_ns)
        self._decoding = on

    def give_back(self, demand: int, received_bytes: int, now_ns: int, cpu_ns: int) -> None:
        """End a demand, of which nothing is in flight any more."""
        ended = self._waiting.get(demand) or self._flying.get(demand)
        if ended is None:
            return
        own = self._of_owner[ended.owner]
        own.remove(demand)
        if not own:
            del self._of_owner[ended.owner]
        self._stop_waiting(demand)
        flown = self._flying.pop(demand, None)
        if flown is None:
            return
        self.in_flight_bytes -= flown.in_flight_bytes
        self._period.bytes += received_bytes
        if not self._flying:
            self._end_period(now_ns, cpu_ns)

    def drop(self, owner: str, now_ns: int, cpu_ns: int) -> list[int]:
        """End all demands of a hand-off, and return those that still waited."""
        own = self._of_owner.pop(owner, set())
        waited = sorted(number for number in own if number in self._waiting)
        for number in waited:
            self._stop_waiting(number)
        flying = [number for number in own if number in self._flying]
        for number in flying:
            self.in_flight_bytes -= self._flying.pop(number).in_flight_bytes
            self._period.peer = ""  # some received bytes are not counted
        if flying and not self._flying:
            self._end_period(now_ns, cpu_ns)
        return waited

    def grants(self, now_ns: int, cpu_ns: int) -> list[CreditGrant]:
        """Return the demands that may start now. Call it after each event, and at `due_ns`."""
        self._save_up(now_ns)
        granted: dict[int, _Demand] = {}
        while (number := self._next(now_ns)) is not None:
            demand = self._waiting[number]
            size_bytes = demand.frame_bytes[demand.frames]
            if self.in_flight_bytes and self.in_flight_bytes + size_bytes > self._limit_bytes:
                break
            if not self.in_flight_bytes:
                self._begin_period(demand.peer, now_ns, cpu_ns)
            self._grant(demand, size_bytes)
            granted[number] = demand
            if demand.frames == len(demand.frame_bytes):
                self._stop_waiting(number)
            else:
                demand.tag += demand.frame_bytes[demand.frames]
                self._by_tag.put(number, demand.tag)
                self._urgent.move(number, demand.tag)
        for number, demand in granted.items():
            self._stop_waiting(number)  # the owner demands the rest anew
            self._flying[number] = demand
        return [CreditGrant(number, demand.frames) for number, demand in granted.items()]

    def due_ns(self, now_ns: int) -> int | None:
        """Return when the next frame may go, if it waits for CPU time only."""
        if not self._out_of_time or self._next(now_ns) is not None:
            return None
        patient = self._patient.first()
        if patient is None:
            return None
        urgent_ns, _ = patient
        return min(urgent_ns, now_ns + round(1 - self._saved_cpu_ns / self._cpu_share))

    def _next(self, now_ns: int) -> int | None:
        """Return the demand of the next frame, if it need not wait for CPU time."""
        first = self._by_tag.first()
        if self._out_of_time:
            while (patient := self._patient.first()) is not None and patient[0] <= now_ns:
                _, number = patient
                self._patient.discard(number)
                self._urgent.put(number, self._waiting[number].tag)
            first = self._urgent.first()
        return None if first is None else first[1]

    def _stop_waiting(self, number: int) -> None:
        self._waiting.pop(number, None)
        for queue in (self._by_tag, self._patient, self._urgent):
            queue.discard(number)

    @property
    def _paced(self) -> bool:
        return self._decoding and self._cpu_share > 0

    @property
    def _out_of_time(self) -> bool:
        return self._paced and self._saved_cpu_ns <= 0

    def _grant(self, demand: _Demand, size_bytes: int) -> None:
        if self._period.peer != demand.peer:
            self._period.peer = ""
        self._tag = demand.tag
        demand.frames += 1
        demand.in_flight_bytes += size_bytes
        self.in_flight_bytes += size_bytes
        expected_ns = size_bytes * self._cost(demand.peer).value
        self._period.expected_ns += expected_ns
        if self._paced:
            self._saved_cpu_ns -= expected_ns
            self._period.charged_ns += expected_ns

    def _save_up(self, now_ns: int) -> None:
        saved_cpu_ns = max(self._saved_cpu_ns, -self._most_saved_cpu_ns)
        saved_cpu_ns += self._cpu_share * (now_ns - self._saved_at_ns)
        self._saved_cpu_ns = min(saved_cpu_ns, self._most_saved_cpu_ns)
        self._saved_at_ns = now_ns

    def _begin_period(self, peer: str, now_ns: int, cpu_ns: int) -> None:
        """End an idle period, which measures the base load."""
        idle = self._period
        self._base_load.add(cpu_ns - idle.began_cpu_ns, now_ns - idle.began_ns)
        self._period = _Period(now_ns, cpu_ns, peer)

    def _end_period(self, now_ns: int, cpu_ns: int) -> None:
        """End a busy period: charge the measured cost instead of the expected one."""
        busy = self._period
        self._period = _Period(now_ns, cpu_ns)
        base_ns = self._base_load.value * (now_ns - busy.began_ns)
        took_ns = max(0.0, cpu_ns - busy.began_cpu_ns - base_ns)
        if busy.peer and busy.bytes and took_ns:
            self._cost(busy.peer).add(took_ns, busy.bytes)
        if busy.expected_ns:
            excess = min(took_ns / busy.expected_ns, _MAX_COST_FACTOR) - 1
            self._saved_cpu_ns -= busy.charged_ns * excess

    def _cost(self, peer: str) -> _Ratio:
        if peer not in self._costs:
            assumed_ns = 1e9 / _ASSUMED_BYTES_PER_CPU_S
            self._costs[peer] = _Ratio(assumed_ns, 1.0, _REMEMBERED_BYTES)
        return self._costs[peer]
