"""Who holds blocks and who waits for them, and how blocks are gained and lost.

queue ──admission──▶ running ──▶ ended         claims: capacity for KV that arrives
  ▲                   │    └───▶ held          held: finished prompts that others read
  └────preempted──────┘
"""

import bisect
from collections.abc import Sequence

from engine.core import events as ev
from engine.core.blocks import BlockPool
from engine.core.geometry import BLOCK_TOKENS
from engine.core.reservations import Reservation, Reservations, ReservationState
from engine.core.sequence import EngineRequest, Kind, TokenSequence
from engine.core.speculative.acceptance import SpareBlocks


class BatchState:
    """The sequences and claims of one engine and their blocks; ``Scheduler`` decides over them.

    Args:
        pool: Of all blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.reservations = Reservations(pool)
        self.spare = SpareBlocks(pool, self.reservations)
        self.events = self.reservations.events
        self.preemptions = 0
        self._queue: list[TokenSequence | Reservation] = []
        self._running: list[TokenSequence] = []
        self._held: dict[str, TokenSequence] = {}  # PREFILL done, waiting for release
        self._next_sequence_id = 0

    # ---------------------------------------------------------------- reading

    def running(self) -> dict[int, TokenSequence]:
        """Running sequences by id."""
        return {sequence.sequence_id: sequence for sequence in self._running}

    def take_events(self) -> list[ev.Event]:
        """What has happened since the last call."""
        taken = list(self.events)
        self.events.clear()
        return taken

    def has_running(self) -> bool:
        """Whether ``plan`` will yield rows without any further command."""
        return bool(self._running)

    def has_decodes(self) -> bool:
        """Whether the next step writes answers, beside what it computes of prompts."""
        return any(self._decodes(sequence) for sequence in self._running)

    def has_work(self) -> bool:
        """Whether anything is left that may yield rows, now or after blocks come back."""
        return bool(self._running or self._queue)

    def load(self) -> tuple[int, int, int]:
        """(running requests, waiting requests, prompt tokens still to be computed)."""
        running = {s.request.request_id for s in self._running} | self._held.keys()
        running |= {
            c.request.request_id
            for c in self.reservations
            if c.state is not ReservationState.WANTED
        }
        waiting = {item.request.request_id for item in self._queue} - running
        todo = sum(
            len(item.tokens) - item.computed
            for item in [*self._running, *self._queue]
            if isinstance(item, TokenSequence) and not self._decodes(item)
        )
        return len(running), len(waiting), todo

    def check_integrity(self) -> None:
        """Recount blocks and references; see ``BlockPool.check_integrity``.

        Raises:
            RuntimeError: Something is counted wrongly, held twice, or held by nobody.
        """
        holders: list[Sequence[int]] = [s.blocks for s in self._running]
        holders += [s.blocks for s in self._held.values()]
        holders += [reservation.blocks for reservation in self.reservations]
        self.pool.check_integrity(holders, self.reservations.draining())
        for item in self._queue:
            if isinstance(item, TokenSequence) and item.blocks:
                raise RuntimeError(f"waiting sequence {item.sequence_id} holds blocks")

    # ---------------------------------------------------------------- inside

    def _new_sequence(
        self, request: EngineRequest, choice: int, tokens: list[int]
    ) -> TokenSequence:
        self._next_sequence_id += 1
        return TokenSequence(self._next_sequence_id, request, choice, tokens)

    def _new_prompt(self, request: EngineRequest) -> TokenSequence:
        sequence = self._new_sequence(request, 0, list(request.prompt))
        sequence.prompt_outputs = request.new_prompt_outputs()
        return sequence

    def _enqueue(self, item: TokenSequence | Reservation) -> None:
        bisect.insort(self._queue, item, key=lambda waiting: waiting.request.order)

    def _decodes(self, sequence: TokenSequence) -> bool:
        return sequence.computed == len(sequence.tokens) - 1 and sequence.generated > 0

    def _make_writable(self, sequence: TokenSequence, copies: list[tuple[int, int]]) -> bool:
        """Give the sequence a block of its own for its next token; False if it was preempted."""
        index = sequence.computed // BLOCK_TOKENS
        if index < len(sequence.blocks) and not self.pool.shared(sequence.blocks[index]):
            return True
        if not self._make_room(sequence):
            return False
        after = sequence.blocks[index - 1] if index else None
        (page,) = self.pool.allocate(1, after) or (None,)
        if page is None:
            self._preempt(sequence)
            return False
        if index < len(sequence.blocks):
            shared = sequence.blocks[index]
            copies.append((shared, page))
            sequence.blocks[index] = page
            self.pool.release([shared])
        else:
            sequence.blocks.append(page)
        return True

    def _make_room(self, sequence: TokenSequence) -> bool:
        """Preempt lower tickets until one block is available, in the end the asker itself."""
        while self.pool.available() - self.reservations.reserved_blocks < 1:
            victims: list[TokenSequence | Reservation] = [
                s for s in self._running if s.request.kind is not Kind.PREFILL
            ]
            victims += [c for c in self.reservations if c.state is ReservationState.RESERVED]
            victim = max(victims, key=lambda v: (v.request.order, isinstance(v, TokenSequence)))
            if isinstance(victim, Reservation):
                self._revoke(victim)
                continue
            if victim is sequence or victim.request.order <= sequence.request.order:
                self._revoke_lowest_bound(sequence)
                self._preempt(sequence)
                return False
            self._preempt(victim)
        return True

    def _revoke_lowest_bound(self, sequence: TokenSequence) -> None:
        bound = [c for c in self.reservations if c.state is ReservationState.BOUND]
        lower = [c for c in bound if c.request.order > sequence.request.order]
        if lower:
            self._revoke(max(lower, key=lambda reservation: reservation.request.order))

    def _preempt(self, sequence: TokenSequence) -> None:
        self.preemptions += 1
        sequence.request.preemptions += 1
        self._running.remove(sequence)
        self._vacate(sequence)
        self._enqueue(sequence)

    def _revoke(self, reservation: Reservation) -> None:
        self.reservations.revoke(reservation)
        self.preemptions += 1
        self._enqueue(self.reservations.new(reservation.request))

    def _drop(self, reservation: Reservation) -> None:
        if reservation in self._queue:
            self._queue.remove(reservation)
        self.reservations.drop(reservation)

    def _vacate(self, sequence: TokenSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.named = [], 0, 0
        if sequence.prompt_outputs is not None:
            sequence.prompt_outputs = sequence.request.new_prompt_outputs()
        sequence.running = False

    def _fork(self, source: TokenSequence, choice: int, token: int) -> TokenSequence:
        """A new choice that shares every block of ``source`` until it writes."""
        branch = self._new_sequence(source.request, choice, [*source.tokens, token])
        branch.blocks, branch.computed = list(source.blocks), source.computed
        branch.names, branch.named = list(source.names), source.named
        self.pool.pin(branch.blocks)
        return branch

    def _name_blocks(self, sequence: TokenSequence) -> None:
        if not sequence.request.cacheable:
            return
        full = sequence.computed // BLOCK_TOKENS
        if full > sequence.named:
            names = sequence.full_hashes(sequence.computed)
            for index in range(sequence.named, full):
                self.pool.name(sequence.blocks[index], names[index])
            sequence.named = full

    def _sequences_of(self, request_id: str) -> list[TokenSequence]:
        waiting = [item for item in self._queue if isinstance(item, TokenSequence)]
        held = [self._held[request_id]] if request_id in self._held else []
        everywhere = [*self._running, *waiting, *held]
        return [s for s in everywhere if s.request.request_id == request_id]

    def _remove(self, sequence: TokenSequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._queue:
            self._queue.remove(sequence)
        else:
            self._held.pop(sequence.request.request_id, None)
        self._vacate(sequence)
