"""Waiting, running and held sequences of one engine, and their blocks.

queue ──admission──▶ running ──▶ ended         reservations: capacity for KV that arrives
  ▲                   │    └───▶ held          held: finished prompts that other workers pull
  └────preempted──────┘
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from baton.engine.core.blocks import BlockPool
from baton.engine.core.plan import StepPlan
from baton.engine.core.reservations import Reservation, Reservations, ReservationState
from baton.engine.core.sequence import EngineRequest, Kind, TokenSequence
from baton.engine.core.speculative.acceptance import SpareBlocks
from baton.engine.core.tiers.tiers import KvTiers
from baton.engine.core.waiting import WaitingQueue
from baton.types import events as ev
from baton.types.errors import UnavailableError
from baton.types.geometry import context_tokens

_LEAST_SHARED_BLOCKS = 8  # fewer are computed again: a wait takes at least a step


class BatchState:
    """Sequences and reservations of one engine with their blocks; ``Scheduler`` decides over them.

    Attributes:
        queue: Sequences and reservations that wait for blocks.
        held: Finished prompts of PREFILL and HELD requests by request id, until they are released.
        tiers: KV tiers below the pool.
    """

    def __init__(self, pool: BlockPool, tiers: KvTiers | None = None) -> None:
        self.pool = pool
        self.tiers = tiers or KvTiers(pool, ())
        self.reservations = Reservations(pool)
        self.spare = SpareBlocks(pool, self.reservations)
        self.events = self.reservations.events
        self.preemptions = 0
        self.queue = WaitingQueue(pool, self.reservations, self.tiers)
        self.running: list[TokenSequence] = []
        self.held: dict[str, TokenSequence] = {}
        self._next_sequence_id = 0

    def running_by_id(self) -> dict[int, TokenSequence]:
        """Return the running sequences by id."""
        return {sequence.sequence_id: sequence for sequence in self.running}

    def take_events(self) -> list[ev.Event]:
        """Return and clear the events since the last call."""
        taken = list(self.events)
        self.events.clear()
        return taken

    def count_decodes(self) -> int:
        """Return the number of running sequences that decode."""
        return sum(sequence.decodes for sequence in self.running)

    def equal_steps(self, plan: StepPlan) -> int:
        """Return how many steps ``plan`` stays the next one, unless a command arrives.

        In these steps every row adds one token within its last block, and no row reaches its limit
        before the last step. Virtual time can take them at once (``EngineCore.apply``).
        """
        running = self.running_by_id()
        if plan.copies or len(plan.rows) != len(running):
            return 1
        steps: list[int] = []
        for row in plan.rows:
            sequence = running[row.sequence_id]
            if not sequence.decodes or row.num_draft_tokens:
                return 1
            limit = sequence.request.spec.params.max_tokens - sequence.generated
            room = self.pool.block_tokens - sequence.computed % self.pool.block_tokens
            steps.append(min(limit, room))
        return max(min(steps, default=1), 1)

    def has_work(self) -> bool:
        """Return whether any request may yield rows, now or after blocks are restored."""
        return bool(self.running or self.queue.has_work)

    def load(self) -> ev.StepDone:
        """Return the current load, without the figures of a step."""
        running = {sequence.request.request_id for sequence in self.running} | self.held.keys()
        running |= {
            reservation.request.request_id
            for reservation in self.reservations
            if reservation.state is not ReservationState.WAITING
        }
        waiting = {item.request.request_id for item in self.queue.items} - running
        queued_tokens = queued_context = answering = answering_context = 0
        coming_context = sum(reservation.tokens for reservation in self.reservations)
        for item in [*self.running, *self.queue.items]:
            if not isinstance(item, TokenSequence):
                continue
            end = len(item.tokens)
            if item.decodes:
                answering += 1
                answering_context += end
            else:
                begin = item.computed if item.running else item.found_tokens
                queued_tokens += end - begin
                queued_context += context_tokens(begin, end)
                coming_context += end
        return ev.StepDone(
            running=len(running),
            waiting=len(waiting),
            answering=answering,
            answering_context=answering_context,
            coming_context=coming_context,
            queued_prompt_tokens=queued_tokens,
            queued_prompt_context=queued_context,
        )

    def sequences_of(self, request_id: str) -> list[TokenSequence]:
        """Return the request's running, waiting and held sequences."""
        waiting = [item for item in self.queue.items if isinstance(item, TokenSequence)]
        held = [self.held[request_id]] if request_id in self.held else []
        sequences = [*self.running, *waiting, *held]
        return [sequence for sequence in sequences if sequence.request.request_id == request_id]

    def check_integrity(self) -> None:
        """Recount blocks and references; raise ``RuntimeError`` at a wrong count."""
        tables: list[Sequence[int]] = [sequence.blocks for sequence in self.running]
        tables += [sequence.blocks for sequence in self.held.values()]
        tables += [reservation.blocks for reservation in self.reservations]
        tables += self.tiers.tables()
        self.pool.check_integrity(tables, self.reservations.draining())
        self.tiers.check_integrity()
        for item in self.queue.items:
            if isinstance(item, TokenSequence) and item.blocks:
                raise RuntimeError(f"waiting sequence {item.sequence_id} holds blocks")

    def new_sequence(self, request: EngineRequest, choice: int, tokens: list[int]) -> TokenSequence:
        """Return a sequence without blocks that reuses the prompt's known hashes."""
        self._next_sequence_id += 1
        return TokenSequence(
            sequence_id=self._next_sequence_id,
            request=request,
            choice=choice,
            tokens=tokens,
            block_hashes=list(request.block_hashes),
        )

    def new_prompt(self, request: EngineRequest) -> TokenSequence:
        """Return a sequence that computes the request's prompt."""
        sequence = self.new_sequence(request, 0, list(request.prompt))
        sequence.prompt_outputs = request.new_prompt_outputs()
        self._count_cached(sequence)
        return sequence

    def resumed_sequence(
        self, request: EngineRequest, choice: int, emitted: Sequence[int]
    ) -> TokenSequence:
        """Return a sequence that continues behind emitted tokens, without KV so far."""
        sequence = self.new_sequence(request, choice, [*request.prompt, *emitted])
        self._count_cached(sequence)
        return sequence

    def _count_cached(self, sequence: TokenSequence) -> None:
        """Note first tokens that are cached, or that prompts before it will have computed."""
        queued = [item for item in self.queue.items if isinstance(item, TokenSequence)]
        before = [item for item in queued if item.request.order <= sequence.request.order]
        blocks = _shared_blocks(sequence, [*self.running, *before], self.pool)[1]
        sequence.found_tokens = blocks * self.pool.block_tokens

    def matching(self, sequence: TokenSequence) -> list[int]:
        """Return cached blocks of the first tokens; the last token is always computed."""
        count = len(sequence.tokens) - 1
        return self.pool.match(sequence.full_hashes(count, self.pool.block_tokens))

    def awaits_prompt(self, sequence: TokenSequence) -> bool:
        """Return whether a running prompt computes the next blocks that a sequence lacks."""
        prompts = [running for running in self.running if not running.decodes]
        cached, shared = _shared_blocks(sequence, prompts, self.pool) if prompts else (0, 0)
        return shared > cached

    def fork(self, source: TokenSequence, choice: int, token: int) -> TokenSequence:
        """Start a choice that shares all blocks of ``source`` until it writes."""
        branch = self.new_sequence(source.request, choice, [*source.tokens, token])
        branch.blocks = list(source.blocks)
        branch.computed = source.computed
        branch.block_hashes = list(source.block_hashes)
        branch.registered_blocks = source.registered_blocks
        self.pool.pin(branch.blocks)
        self.run(branch)
        return branch

    def run(self, sequence: TokenSequence) -> None:
        """Add a sequence that has its blocks to the batch."""
        sequence.running = True
        self.running.append(sequence)

    def hold(self, sequence: TokenSequence) -> None:
        """Take a finished prompt out of the batch and keep its blocks for readers."""
        self.running.remove(sequence)
        sequence.running = False
        self.held[sequence.request.request_id] = sequence

    def hold_cached(self, request: EngineRequest) -> TokenSequence:
        """Hold the cached blocks of a complete prompt, or raise ``UnavailableError``."""
        sequence = self.new_sequence(request, 0, request.prompt)
        tokens = len(request.prompt)
        blocks = self.pool.match(sequence.full_hashes(tokens, self.pool.block_tokens))
        if len(blocks) * self.pool.block_tokens != tokens:
            count = self.pool.blocks_for(tokens)
            raise UnavailableError(f"only {len(blocks)} of {count} blocks are cached here")
        if self.pins_too_much(request, 0, blocks):
            raise UnavailableError("half of this worker's blocks are held for other workers")
        self.pool.pin(blocks)
        sequence.blocks = blocks
        sequence.computed = tokens
        sequence.registered_blocks = len(blocks)
        self.held[request.request_id] = sequence
        return sequence

    def pins_too_much(self, request: EngineRequest, need: int, blocks: Sequence[int] = ()) -> bool:
        """Return whether held prompts would pin more than half of the pool.

        ``need`` further blocks, and those of the cached ``blocks`` that no held prompt has, would
        be pinned.
        """
        if request.kind not in (Kind.PREFILL, Kind.HELD) or not self.held:
            return False
        pinned = set(blocks).union(*(sequence.blocks for sequence in self.held.values()))
        return len(pinned) + need > self.pool.total // 2

    def remove(self, sequence: TokenSequence) -> None:
        """End a sequence in any state."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.queue.items:
            self.queue.items.remove(sequence)
        else:
            self.held.pop(sequence.request.request_id, None)
        self.vacate(sequence)

    def register_hashes(self, sequence: TokenSequence) -> None:
        """Register the hashes of full blocks, so that other requests can share them."""
        if not sequence.request.spec.cacheable:
            return
        full_blocks = sequence.computed // self.pool.block_tokens
        if full_blocks > sequence.registered_blocks:
            hashes = sequence.full_hashes(sequence.computed, self.pool.block_tokens)
            owner = sequence.request.spec.cache_owner
            for index in range(sequence.registered_blocks, full_blocks):
                self.pool.set_hash(sequence.blocks[index], hashes[index], owner)
            sequence.registered_blocks = full_blocks

    def make_writable(self, sequence: TokenSequence, copies: list[tuple[int, int]]) -> bool:
        """Give the sequence its own block for the next token; False if it was preempted.

        A shared block is replaced, and (source, target) is appended to ``copies``.
        """
        index = sequence.computed // self.pool.block_tokens
        if index < len(sequence.blocks) and not self.pool.shared(sequence.blocks[index]):
            return True
        if not self._make_room(sequence):
            return False
        after = sequence.blocks[index - 1] if index else None
        (page,) = self.pool.allocate(1, after) or (None,)
        if page is None:
            self.preempt(sequence)
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
        """Preempt later requests, finally ``sequence``, until one block is available."""
        while self.reservations.available_blocks < 1:
            victims: list[TokenSequence | Reservation] = [
                running for running in self.running if running.request.kind is not Kind.PREFILL
            ]
            victims += self.reservations.in_state(ReservationState.RESERVED)
            victim = max(victims, key=lambda v: (v.request.order, isinstance(v, TokenSequence)))
            if isinstance(victim, Reservation):
                self.revoke(victim)
                continue
            if victim is sequence or victim.request.order <= sequence.request.order:
                self._revoke_lowest_bound(sequence)
                self.preempt(sequence)
                return False
            self.preempt(victim)
        return True

    def _revoke_lowest_bound(self, sequence: TokenSequence) -> None:
        bound = self.reservations.in_state(ReservationState.BOUND)
        lower = [other for other in bound if other.request.order > sequence.request.order]
        if lower:
            self.revoke(max(lower, key=lambda reservation: reservation.request.order))

    def preempt(self, sequence: TokenSequence) -> None:
        """Take a running sequence's blocks and queue it again."""
        self.preemptions += 1
        sequence.request.preemptions += 1
        self.running.remove(sequence)
        self.vacate(sequence)
        self.queue.add(sequence)

    def revoke(self, reservation: Reservation) -> None:
        """Take a reservation's capacity and queue a new one for its request."""
        self.reservations.revoke(reservation)
        self.preemptions += 1
        self.queue.add(self.reservations.new(reservation.request))

    def vacate(self, sequence: TokenSequence) -> None:
        """Return the sequence's blocks to the cache."""
        spec = sequence.request.spec
        if spec.retention is not None:
            computed = sequence.blocks[: sequence.registered_blocks]
            self.pool.keep(computed, spec.tenant, spec.retention)
        self.pool.release(sequence.blocks)
        sequence.found_tokens = sequence.registered_blocks * self.pool.block_tokens
        sequence.blocks = []
        sequence.computed = 0
        sequence.registered_blocks = 0
        sequence.asked_tiers = False
        if sequence.prompt_outputs is not None:
            sequence.prompt_outputs = sequence.request.new_prompt_outputs()
        sequence.running = False


def _shared_blocks(
    sequence: TokenSequence, others: Iterable[TokenSequence], pool: BlockPool
) -> tuple[int, int]:
    """Return how many first blocks of a sequence are cached, and are when others are computed."""
    if not sequence.request.spec.cacheable or sequence.prompt_outputs is not None:
        return 0, 0
    hashes = sequence.full_hashes(len(sequence.tokens) - 1, pool.block_tokens)
    cached = len(pool.match(hashes))
    known = [
        other.full_hashes(len(other.tokens), pool.block_tokens)
        for other in others
        if other.request.spec.cacheable
    ]
    shared = max((equal_blocks(hashes, of_other) for of_other in known), default=0)
    return cached, shared if shared >= cached + _LEAST_SHARED_BLOCKS else cached


def equal_blocks(hashes: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Return the number of equal leading blocks: a hash covers all blocks before it."""
    both = range(min(len(hashes), len(others)))
    return bisect_left(both, 1, key=lambda index: hashes[index] != others[index])
