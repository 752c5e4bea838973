"""Credit for receiving KV, over all hand-offs and prefix pulls of a worker. Sans-IO.

Two things are given out. Bytes in flight: what was asked for and is not stored yet. And, while
answers are being written, CPU time of the shell: receiving takes it from the engine's step, which
waits for its slowest thread. So receiving may take a part of one core, ``cpu_share``. What it took
is measured: the process's time while something was in flight, less what the process takes of that
time anyway. What a peer's bytes cost, and so the rate in bytes, follows. Time that was not used is
saved up for a while, so that a hand-off that comes alone is not held back; and none is held back
for longer than `MOST_HELD_NS`, so that streams have their pace in a burst, and a worker that has to
receive more than the pace all the time receives it.

Who is next is decided frame by frame, by self-clocked fair queueing: each hand-off gets as many
bytes as the others, a small one does not wait behind a large one, and nobody waits for ever. What
an event costs does not grow with the hand-offs that wait.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

IN_FLIGHT_BYTES = 64 << 20  # the window of one hand-off, in frames of 4 MiB
SAVED_UP_NS = 2_000_000_000  # of time in which nothing was received; and the most debt
MOST_HELD_NS = 5_000_000_000  # of one hand-off, by the pace
_ASSUMED_BYTES_PER_CPU_S = 400e6  # from a peer that nothing came from yet
_REMEMBERED_BYTES = 64 << 20  # of a peer, for what they cost
_MOST_TIMES_DEARER = 4  # than expected; more is the work of others
_REMEMBERED_NS = 1_000_000_000  # without receiving, for what else the process does
_NEVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Grant:
    """The first ``frames`` of a claim may be asked for."""

    claim: int
    frames: int


@dataclass(slots=True)
class _Claim:
    owner: str
    peer: str
    frame_bytes: tuple[int, ...]
    tag: int  # of its next frame: the lowest goes first
    urgent_ns: int  # from when on the pace does not hold it
    frames: int = 0  # granted
    in_flight_bytes: int = 0

    @property
    def last_tag(self) -> int:
        """What follows it goes behind it."""
        return self.tag + sum(self.frame_bytes[self.frames + 1 :])


class _Lowest:
    """Claims by a rank, the lowest first, equals by age."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # some were taken out, or have another rank by now

    def put(self, number: int, rank: int) -> None:
        """Add a claim, or give it another rank."""
        self._ranks[number] = rank
        if len(self._heap) > 2 * len(self._ranks) + 16:
            self._heap = [(rank, number) for number, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, number))

    def move(self, number: int, rank: int) -> None:
        """Give a claim another rank, if it is there."""
        if number in self._ranks:
            self.put(number, rank)

    def take_out(self, number: int) -> None:
        """If it is there."""
        self._ranks.pop(number, None)

    def first(self) -> tuple[int, int] | None:
        """Rank and number of the first."""
        while self._heap and self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


@dataclass(slots=True)
class _Ratio:
    """``taken`` for each ``given``; older ones fade as more than ``remembered`` is given."""

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
    """Of time in which something was in flight, or nothing was."""

    began_ns: int
    began_cpu_ns: int
    peer: str = ""  # "": none, or several
    bytes: int = 0
    expected_ns: float = 0.0  # of CPU time, for what was granted
    charged_ns: float = 0.0  # of them: streams were running


class ReceiveCredit:
    """See the module. Times are passed in.

    Args:
        cpu_share: Of one core, for receiving while answers are written; 0: no limit.
        in_flight_bytes: Asked for and not stored. A larger frame goes alone.
        now_ns: The time.
        cpu_ns: CPU time that the process has taken.
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
        self._waiting: dict[int, _Claim] = {}
        self._flying: dict[int, _Claim] = {}
        self._of_owner: dict[str, set[int]] = {}  # waiting and flying
        self._by_tag = _Lowest()  # all that wait
        self._patient = _Lowest()  # of them those that the pace holds, by when it lets them go
        self._urgent = _Lowest()  # and the others, by tag
        self._tag = 0  # of the frame that was granted last
        self._claims = 0
        self._costs: dict[str, _Ratio] = {}  # CPU ns of a byte from a peer
        self._else = _Ratio(0.0, 0.0, _REMEMBERED_NS)  # CPU ns that all else takes of a ns
        self._period = _Period(now_ns, cpu_ns)

    # ---------------------------------------------------------------- events

    def ask(
        self, owner: str, peer: str, frame_bytes: Sequence[int], urgent_ns: int = _NEVER_NS
    ) -> int:
        """A hand-off wants frames of these sizes, in this order; the claim's number.

        From ``urgent_ns`` on it is not held back by the pace.
        """
        self._claims += 1
        number = self._claims
        own = self._of_owner.setdefault(owner, set())
        before = [self._waiting[one].last_tag for one in own if one in self._waiting]
        tag = max([self._tag, *before]) + frame_bytes[0]
        self._waiting[number] = _Claim(owner, peer, tuple(frame_bytes), tag, urgent_ns)
        own.add(number)
        self._by_tag.put(number, tag)
        self._patient.put(number, urgent_ns)
        return number

    def waits(self, owner: str) -> bool:
        """Whether a hand-off wants frames that it may not ask for yet."""
        return any(number in self._waiting for number in self._of_owner.get(owner, ()))

    def decoding(self, *, on: bool, now_ns: int) -> None:
        """Whether answers are being written."""
        self._save_up(now_ns)
        self._decoding = on

    def give_back(self, claim: int, received_bytes: int, now_ns: int, cpu_ns: int) -> None:
        """Nothing of a grant is on its way any more; so much of it came."""
        ended = self._waiting.get(claim) or self._flying.get(claim)
        if ended is None:
            return
        own = self._of_owner[ended.owner]
        own.remove(claim)
        if not own:
            del self._of_owner[ended.owner]
        self._wait_no_more(claim)
        flown = self._flying.pop(claim, None)
        if flown is None:
            return
        self.in_flight_bytes -= flown.in_flight_bytes
        self._period.bytes += received_bytes
        if not self._flying:
            self._end_period(now_ns, cpu_ns)

    def drop(self, owner: str, now_ns: int, cpu_ns: int) -> list[int]:
        """A hand-off is over: all that it has is free at once; its claims that still waited."""
        own = self._of_owner.pop(owner, set())
        waited = sorted(number for number in own if number in self._waiting)
        for number in waited:
            self._wait_no_more(number)
        flying = [number for number in own if number in self._flying]
        for number in flying:
            self.in_flight_bytes -= self._flying.pop(number).in_flight_bytes
            self._period.peer = ""  # bytes came that nobody counts
        if flying and not self._flying:
            self._end_period(now_ns, cpu_ns)
        return waited

    # ---------------------------------------------------------------- what follows from them

    def grants(self, now_ns: int, cpu_ns: int) -> list[Grant]:
        """Who may ask for what now. To be asked for after each event, and when it is `due_ns`."""
        self._save_up(now_ns)
        granted: dict[int, _Claim] = {}
        while (number := self._next(now_ns)) is not None:
            claim = self._waiting[number]
            size_bytes = claim.frame_bytes[claim.frames]
            if self.in_flight_bytes and self.in_flight_bytes + size_bytes > self._limit_bytes:
                break
            if not self.in_flight_bytes:
                self._begin_period(claim.peer, now_ns, cpu_ns)
            self._grant(claim, size_bytes)
            granted[number] = claim
            if claim.frames == len(claim.frame_bytes):
                self._wait_no_more(number)
            else:
                claim.tag += claim.frame_bytes[claim.frames]
                self._by_tag.put(number, claim.tag)
                self._urgent.move(number, claim.tag)
        for number, claim in granted.items():
            self._wait_no_more(number)  # the rest is asked for anew
            self._flying[number] = claim
        return [Grant(number, claim.frames) for number, claim in granted.items()]

    def due_ns(self, now_ns: int) -> int | None:
        """When the next frame may go, if it is CPU time that it waits for."""
        if not self._out_of_time or self._next(now_ns) is not None:
            return None
        patient = self._patient.first()
        if patient is None:
            return None
        urgent_ns, _ = patient
        return min(urgent_ns, now_ns + round(1 - self._saved_cpu_ns / self._cpu_share))

    def bytes_per_s(self, peer: str) -> float:
        """The rate at which a peer's KV is taken while answers are written; 0: no limit."""
        return self._cpu_share / self._cost(peer).value * 1e9

    # ---------------------------------------------------------------- inside

    def _next(self, now_ns: int) -> int | None:
        """Whose frame is the next one, if it need not wait for CPU time."""
        first = self._by_tag.first()
        if self._out_of_time:
            while (patient := self._patient.first()) is not None and patient[0] <= now_ns:
                _, number = patient
                self._patient.take_out(number)
                self._urgent.put(number, self._waiting[number].tag)
            first = self._urgent.first()
        return None if first is None else first[1]

    def _wait_no_more(self, number: int) -> None:
        self._waiting.pop(number, None)
        for queue in (self._by_tag, self._patient, self._urgent):
            queue.take_out(number)

    @property
    def _paced(self) -> bool:
        return self._decoding and self._cpu_share > 0

    @property
    def _out_of_time(self) -> bool:
        return self._paced and self._saved_cpu_ns <= 0

    def _grant(self, claim: _Claim, size_bytes: int) -> None:
        if self._period.peer != claim.peer:
            self._period.peer = ""
        self._tag = claim.tag
        claim.frames += 1
        claim.in_flight_bytes += size_bytes
        self.in_flight_bytes += size_bytes
        expected_ns = size_bytes * self._cost(claim.peer).value
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
        """Until now nothing was in flight: that says what all else takes."""
        idle = self._period
        self._else.add(cpu_ns - idle.began_cpu_ns, now_ns - idle.began_ns)
        self._period = _Period(now_ns, cpu_ns, peer)

    def _end_period(self, now_ns: int, cpu_ns: int) -> None:
        """Nothing is in flight any more: what it took is charged instead of what was expected."""
        busy = self._period
        self._period = _Period(now_ns, cpu_ns)
        anyway_ns = self._else.value * (now_ns - busy.began_ns)
        took_ns = max(0.0, cpu_ns - busy.began_cpu_ns - anyway_ns)
        if busy.peer and busy.bytes and took_ns:
            self._cost(busy.peer).add(took_ns, busy.bytes)
        if busy.expected_ns:
            dearer = min(took_ns / busy.expected_ns, _MOST_TIMES_DEARER) - 1
            self._saved_cpu_ns -= busy.charged_ns * dearer

    def _cost(self, peer: str) -> _Ratio:
        if peer not in self._costs:
            assumed_ns = 1e9 / _ASSUMED_BYTES_PER_CPU_S
            self._costs[peer] = _Ratio(assumed_ns, 1.0, _REMEMBERED_BYTES)
        return self._costs[peer]
