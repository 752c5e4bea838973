"""Pages that a decode worker reserves for a prompt whose KV is pulled from another worker.

    WAITING ──granted at its ticket──▶ RESERVED ──first publication──▶ BOUND ──commit──▶ sequence
       ▲                                  │                              │
       └────────── revoked, new generation ─────────────(pages drain)────┘

A generation numbers one reservation and is never reused in this incarnation. It distinguishes a
late chunk for an old reservation from one for the new.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.engine.core.blocks import BlockPool
from baton.engine.core.sequence import EngineRequest, TokenSequence
from baton.types import events as ev


class ReservationState(enum.Enum):
    """State of a reservation."""

    WAITING = "waiting"
    RESERVED = "reserved"
    BOUND = "bound"


@dataclass(slots=True, eq=False)
class Reservation:
    """Reservation of one REMOTE request."""

    request: EngineRequest
    generation: int
    state: ReservationState = ReservationState.WAITING
    pinned: list[int] = field(default_factory=list)  # cached prefix, which is not transferred
    need_blocks: int = 0  # promised, not yet allocated (RESERVED)
    pages: list[int] = field(default_factory=list)  # allocated for incoming KV (BOUND)
    asked_tiers: bool = False  # see ``TokenSequence.asked_tiers``

    @property
    def blocks(self) -> list[int]:
        """Block table: pinned prefix, then pages."""
        return self.pinned + self.pages

    @property
    def tokens(self) -> int:
        """Tokens of the sequences that will decode after the transfer."""
        return len(self.request.prompt) * self.request.spec.params.n


class Reservations:
    """All reservations of one engine, and the pages of revoked ones that still drain."""

    def __init__(self, pool: BlockPool) -> None:
        self.events: list[ev.Event] = []
        self._pool = pool
        self._by_request: dict[str, Reservation] = {}
        self._draining: dict[tuple[str, int], list[int]] = {}
        self._next_generation = 1

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._by_request.values())

    def new(self, request: EngineRequest) -> Reservation:
        """Create a reservation with a new generation; it replaces the request's former one."""
        reservation = Reservation(request, self._next_generation)
        self._next_generation += 1
        self._by_request[request.request_id] = reservation
        return reservation

    def in_state(self, state: ReservationState) -> list[Reservation]:
        """Return the reservations in one state."""
        return [reservation for reservation in self if reservation.state is state]

    def find(self, request_id: str, generation: int, state: ReservationState) -> Reservation | None:
        """Return the reservation if generation and state match, else None."""
        reservation = self._by_request.get(request_id)
        if (
            reservation is None
            or reservation.generation != generation
            or reservation.state is not state
        ):
            return None
        return reservation

    def take(self, request_id: str) -> Reservation | None:
        """Remove and return the request's reservation; the caller owns its blocks."""
        return self._by_request.pop(request_id, None)

    @property
    def granted(self) -> int:
        """Number of reservations with capacity whose requests will run."""
        return sum(
            reservation.state is not ReservationState.WAITING
            for reservation in self
            if reservation.request.live_choices
        )

    @property
    def reserved_blocks(self) -> int:
        """Number of blocks promised and not yet allocated."""
        return sum(r.need_blocks for r in self.in_state(ReservationState.RESERVED))

    @property
    def available_blocks(self) -> int:
        """Number of blocks that are neither in use nor promised."""
        return self._pool.available() - self.reserved_blocks

    def grant(self, reservation: Reservation) -> bool:
        """Promise blocks and pin the cached prefix; False if they do not fit."""
        request = reservation.request
        pinned = self._pool.match(self.hashes(request)) if request.spec.cacheable else []
        self._pool.pin(pinned)
        need = self._pool.blocks_for(len(request.prompt) + 1) - len(pinned)
        if need > self.available_blocks:
            self._pool.release(pinned)
            return False
        reservation.pinned = pinned
        reservation.need_blocks = need
        reservation.state = ReservationState.RESERVED
        self.events.append(ev.Reserved(request.request_id, reservation.generation, len(pinned)))
        return True

    def hashes(self, request: EngineRequest) -> list[bytes]:
        """Return hashes of the prompt's full blocks; they are stored in the request."""
        sequence = TokenSequence(
            sequence_id=0,
            request=request,
            choice=0,
            tokens=request.prompt,
            block_hashes=request.block_hashes,
        )
        return sequence.full_hashes(len(request.prompt), self._pool.block_tokens)

    def bind(self, reservation: Reservation) -> bool:
        """Allocate the promised pages; False if running sequences took them."""
        after = reservation.pinned[-1] if reservation.pinned else None
        pages = self._pool.allocate(reservation.need_blocks, after)
        if pages is None:
            return False
        reservation.pages = pages
        reservation.need_blocks = 0
        reservation.state = ReservationState.BOUND
        bound = ev.Bound(
            reservation.request.request_id, reservation.generation, tuple(reservation.blocks)
        )
        self.events.append(bound)
        return True

    def revoke(self, reservation: Reservation) -> None:
        """Take the capacity back; pages with a possible writer are quarantined."""
        self.events.append(ev.Revoked(reservation.request.request_id, reservation.generation))
        if reservation.pages:
            self._pool.quarantine(reservation.pages)
            self._draining[reservation.request.request_id, reservation.generation] = (
                reservation.pages
            )
            reservation.pages = []
        self.drop(reservation)
        reservation.request.preemptions += 1

    def drop(self, reservation: Reservation) -> None:
        """Release the blocks, to which no writer writes any more."""
        self._pool.release(reservation.blocks)
        reservation.pinned = []
        reservation.pages = []
        reservation.need_blocks = 0

    def drained(self, request_id: str, generation: int) -> None:
        """Free the revoked pages of ``generation`` after their writer has stopped."""
        self._pool.absolve(self._draining.pop((request_id, generation), ()))

    def draining(self) -> list[int]:
        """Return the pages of revoked reservations: the content of the quarantine."""
        return [page for pages in self._draining.values() for page in pages]

    @property
    def oldest_draining(self) -> int:
        """Generation of the draining reservation revoked first; 0 for none."""
        return next((generation for _, generation in self._draining), 0)
