"""Who holds blocks and who waits for them, and how blocks are gained and lost.

queue ──admission──▶ running ──▶ ended         reservations: capacity for KV that arrives
  ▲                   │    └───▶ held          held: finished prompts that others read
  └────preempted──────┘
"""

import bisect
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from baton.engine.core.blocks import BlockPool
from baton.engine.core.plan import StepPlan
from baton.engine.core.reservations import Reservation, Reservations, ReservationState
from baton.engine.core.sequence import EngineRequest, Kind, TokenSequence
from baton.engine.core.speculative.acceptance import SpareBlocks
from baton.engine.core.tiers.tiers import KvTiers
from baton.types import events as ev
from baton.types.errors import UnavailableError
from baton.types.geometry import context_tokens

_MOST_BRINGS = 4  # requests in the queue whose blocks come back from tiers at once


class Load(NamedTuple):
    """Requests that run and that wait; prompt tokens to be computed, and those before each."""

    running: int
    waiting: int
    queued_tokens: int
    queued_context: int


class BatchState:
    """The sequences and reservations of one engine and their blocks; ``Scheduler`` decides.

    Args:
        pool: All blocks.

    Attributes:
        queue: What waits for blocks, in order.
        running: Sequences of the batch.
        held: Finished prompts of PREFILL and HELD requests by request id, until they are released.
        fetching: HELD requests whose blocks are on their way from a tier.
        overtaking: Reservations that wait for nothing but that.
        tiers: Where blocks go that the pool has no room for.
    """

    def __init__(self, pool: BlockPool, tiers: KvTiers | None = None) -> None:
        self.pool = pool
        self.tiers = tiers or KvTiers(pool, ())
        self.reservations = Reservations(pool)
        self.spare = SpareBlocks(pool, self.reservations)
        self.events = self.reservations.events
        self.preemptions = 0
        self.queue: list[TokenSequence | Reservation] = []
        self.running: list[TokenSequence] = []
        self.held: dict[str, TokenSequence] = {}
        self.fetching: dict[str, EngineRequest] = {}
        self.overtaking: list[Reservation] = []
        self._next_sequence_id = 0

    # ---------------------------------------------------------------- reading

    def running_by_id(self) -> dict[int, TokenSequence]:
        """Running sequences by id."""
        return {sequence.sequence_id: sequence for sequence in self.running}

    def take_events(self) -> list[ev.Event]:
        """What has happened since the last call."""
        taken = list(self.events)
        self.events.clear()
        return taken

    def count_decodes(self) -> int:
        """How many answers the next step writes, beside what it computes of prompts."""
        return sum(sequence.decodes for sequence in self.running)

    def equal_steps(self, plan: StepPlan) -> int:
        """For how many steps ``plan`` stays the next one, while nobody says anything to the engine.

        In these steps every row writes one more token into a block that it has, and none reaches
        its limit before the last. So virtual time can take them at once (``EngineCore.apply``).

        Returns:
            At least 1.
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
        """Whether anything is left that may yield rows, now or after blocks come back."""
        return bool(self.running or self.queue or self.fetching or self.overtaking)

    def load(self) -> Load:
        """What runs, what waits, and what is still to be computed."""
        running = {sequence.request.request_id for sequence in self.running} | self.held.keys()
        running |= {
            reservation.request.request_id
            for reservation in self.reservations
            if reservation.state is not ReservationState.WAITING
        }
        waiting = {item.request.request_id for item in self.queue} - running
        queued_tokens = queued_context = 0
        for item in [*self.running, *self.queue]:
            if isinstance(item, TokenSequence) and not item.decodes:
                begin = max(item.computed, item.found_tokens)
                end = len(item.tokens)
                queued_tokens += end - begin
                queued_context += context_tokens(begin, end)
        return Load(len(running), len(waiting), queued_tokens, queued_context)

    def answering(self) -> int:
        """Sequences that write answers."""
        return sum(sequence.decodes for sequence in self.running)

    def available_blocks(self) -> int:
        """Blocks that can be taken now: neither in use nor promised."""
        return self.pool.available() - self.reservations.reserved_blocks

    def sequences_of(self, request_id: str) -> list[TokenSequence]:
        """The request's sequences, running, waiting and held."""
        waiting = [item for item in self.queue if isinstance(item, TokenSequence)]
        held = [self.held[request_id]] if request_id in self.held else []
        sequences = [*self.running, *waiting, *held]
        return [sequence for sequence in sequences if sequence.request.request_id == request_id]

    def check_integrity(self) -> None:
        """Recount blocks and references; see ``BlockPool.check_integrity``.

        Raises:
            RuntimeError: Something is counted wrongly, held twice, or held by nobody.
        """
        tables: list[Sequence[int]] = [sequence.blocks for sequence in self.running]
        tables += [sequence.blocks for sequence in self.held.values()]
        tables += [reservation.blocks for reservation in self.reservations]
        tables += self.tiers.tables()
        self.pool.check_integrity(tables, self.reservations.draining())
        self.tiers.check_integrity()
        for item in self.queue:
            if isinstance(item, TokenSequence) and item.blocks:
                raise RuntimeError(f"waiting sequence {item.sequence_id} holds blocks")

    # ---------------------------------------------------------------- sequences come and go

    def new_sequence(self, request: EngineRequest, choice: int, tokens: list[int]) -> TokenSequence:
        """A sequence without blocks; what is known of the prompt's hashes is not computed again."""
        self._next_sequence_id += 1
        return TokenSequence(
            sequence_id=self._next_sequence_id,
            request=request,
            choice=choice,
            tokens=tokens,
            block_hashes=list(request.block_hashes),
        )

    def new_prompt(self, request: EngineRequest) -> TokenSequence:
        """The sequence that computes the request's prompt."""
        sequence = self.new_sequence(request, 0, list(request.prompt))
        sequence.prompt_outputs = request.new_prompt_outputs()
        self._find(sequence)
        return sequence

    def new_answer(
        self, request: EngineRequest, choice: int, emitted: Sequence[int]
    ) -> TokenSequence:
        """The sequence that goes on behind tokens that were emitted, of which no KV is here."""
        sequence = self.new_sequence(request, choice, [*request.prompt, *emitted])
        self._find(sequence)
        return sequence

    def _find(self, sequence: TokenSequence) -> None:
        """Count what is cached of a sequence that is about to wait."""
        if sequence.request.spec.cacheable and sequence.prompt_outputs is None:
            sequence.found_tokens = len(self.matching(sequence)) * self.pool.block_tokens

    def matching(self, sequence: TokenSequence) -> list[int]:
        """Blocks that hold the sequence's first tokens; its last token is always computed."""
        count = len(sequence.tokens) - 1
        return self.pool.match(sequence.full_hashes(count, self.pool.block_tokens))

    def fork(self, source: TokenSequence, choice: int, token: int) -> TokenSequence:
        """A new running choice that shares every block of ``source`` until it writes."""
        branch = self.new_sequence(source.request, choice, [*source.tokens, token])
        branch.blocks = list(source.blocks)
        branch.computed = source.computed
        branch.block_hashes = list(source.block_hashes)
        branch.registered_blocks = source.registered_blocks
        self.pool.pin(branch.blocks)
        self.run(branch)
        return branch

    def enqueue(self, item: TokenSequence | Reservation) -> None:
        """Let a sequence or a reservation wait for blocks, in its request's place."""
        bisect.insort(self.queue, item, key=lambda waiting: waiting.request.order)

    def await_kv(self, reservation: Reservation) -> None:
        """Let a reservation wait for blocks, in its request's place.

        One for nothing but KV, which no answer follows, overtakes those that wait for steps, as
        long as it takes no more than half of the blocks that are left.
        """
        need = self.pool.blocks_for(len(reservation.request.prompt) + 1)
        overtakes = not reservation.request.live_choices and 2 * need <= self.available_blocks()
        if overtakes and self._comes_back(reservation):
            self.overtaking.append(reservation)
        elif not (overtakes and self.reservations.grant(reservation)):
            self.enqueue(reservation)

    def run(self, sequence: TokenSequence) -> None:
        """Put a sequence that has its blocks into the batch."""
        sequence.running = True
        self.running.append(sequence)

    def hold(self, sequence: TokenSequence) -> None:
        """Take a finished prompt out of the batch and keep its blocks for who reads them."""
        self.running.remove(sequence)
        sequence.running = False
        self.held[sequence.request.request_id] = sequence

    def hold_cached(self, request: EngineRequest) -> TokenSequence:
        """Keep the blocks of a prompt that are all in the cache, for who reads them.

        Raises:
            UnavailableError: They are not, or too much is held already.
        """
        sequence = self.new_sequence(request, 0, request.prompt)
        tokens = len(request.prompt)
        blocks = self.pool.match(sequence.full_hashes(tokens, self.pool.block_tokens))
        if len(blocks) * self.pool.block_tokens != tokens:
            count = self.pool.blocks_for(tokens)
            raise UnavailableError(f"{len(blocks)} of {count} blocks are in this worker's cache")
        if self.pins_too_much(request, len(blocks)):
            raise UnavailableError("half of this worker's blocks are held for others already")
        self.pool.pin(blocks)
        sequence.blocks = blocks
        sequence.computed = tokens
        sequence.registered_blocks = len(blocks)
        self.held[request.request_id] = sequence
        return sequence

    def fetch(self, request: EngineRequest) -> bool:
        """Begin to bring back from a tier what a HELD request asks for; False: nothing comes."""
        tokens = len(request.prompt)
        hashes = self.new_sequence(request, 0, request.prompt).full_hashes(
            tokens, self.pool.block_tokens
        )
        self._bring(request.request_id, hashes, request, always=True)
        if not self.tiers.brings(request.request_id):
            return False
        self.fetching[request.request_id] = request
        return True

    def fetched(self) -> list[EngineRequest]:
        """HELD requests that wait for no tier any more; reservations that do not go on."""
        came = [waiting for waiting in self.overtaking if not self.tiers.brings(waiting)]
        for reservation in came:
            self.overtaking.remove(reservation)
            self.await_kv(reservation)
        ready = [name for name in self.fetching if not self.tiers.brings(name)]
        return [self.fetching.pop(name) for name in ready]

    def first_ready(self) -> TokenSequence | Reservation | None:
        """What is to be admitted next: those whose blocks come back from a tier are gone by."""
        first = self.queue[:_MOST_BRINGS]
        return next((item for item in first if not self._comes_back(item)), None)

    def _comes_back(self, item: TokenSequence | Reservation) -> bool:
        """Whether leading blocks of what waits first are on their way from a tier.

        They are asked for once, when there is room for them: what then is not in the pool is
        computed, or comes from elsewhere.
        """
        request = item.request
        if not item.asked_tiers and request.spec.cacheable:
            if isinstance(item, Reservation):
                hashes = self.reservations.hashes(request)
            elif item.prompt_outputs is None:
                hashes = item.full_hashes(len(item.tokens) - 1, self.pool.block_tokens)
            else:
                hashes = []
            item.asked_tiers = self._bring(item, hashes, request)
        return self.tiers.brings(item)

    def _bring(
        self, key: Hashable, hashes: list[bytes], request: EngineRequest, *, always: bool = False
    ) -> bool:
        promised = self.reservations.reserved_blocks
        return self.tiers.bring(key, hashes, promised, request.tier_tokens, always=always)

    def pins_too_much(self, request: EngineRequest, need: int) -> bool:
        """Pins of finished prompts above half the pool make new prompts wait."""
        if request.kind not in (Kind.PREFILL, Kind.HELD) or not self.held:
            return False
        pinned = sum(len(sequence.blocks) for sequence in self.held.values())
        return pinned + need > self.pool.total // 2

    def remove(self, sequence: TokenSequence) -> None:
        """End a sequence, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.queue:
            self.queue.remove(sequence)
        else:
            self.held.pop(sequence.request.request_id, None)
        self.vacate(sequence)

    # ---------------------------------------------------------------- blocks are gained and lost

    def register_hashes(self, sequence: TokenSequence) -> None:
        """Tell the pool the hashes of blocks that have become full, so that others may share."""
        if not sequence.request.spec.cacheable:
            return
        full_blocks = sequence.computed // self.pool.block_tokens
        if full_blocks > sequence.registered_blocks:
            hashes = sequence.full_hashes(sequence.computed, self.pool.block_tokens)
            for index in range(sequence.registered_blocks, full_blocks):
                self.pool.set_hash(sequence.blocks[index], hashes[index])
            sequence.registered_blocks = full_blocks

    def make_writable(self, sequence: TokenSequence, copies: list[tuple[int, int]]) -> bool:
        """Give the sequence a block of its own for its next token; False if it was preempted.

        ``copies`` gets (source, target) when the block was shared.
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
        """Preempt lower tickets until one block is available, in the end ``sequence`` itself."""
        while self.available_blocks() < 1:
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
        """Take a running sequence's blocks away; it comes back through the queue."""
        self.preemptions += 1
        sequence.request.preemptions += 1
        self.running.remove(sequence)
        self.vacate(sequence)
        self.enqueue(sequence)

    def revoke(self, reservation: Reservation) -> None:
        """Take a reservation's capacity away; a new one of its request joins the queue."""
        self.reservations.revoke(reservation)
        self.preemptions += 1
        self.enqueue(self.reservations.new(reservation.request))

    def drop(self, reservation: Reservation) -> None:
        """Give back what a reservation holds; nobody writes into its pages any more."""
        if reservation in self.queue:
            self.queue.remove(reservation)
        if reservation in self.overtaking:
            self.overtaking.remove(reservation)
        self.reservations.drop(reservation)

    def vacate(self, sequence: TokenSequence) -> None:
        """Give the sequence's blocks back to the cache."""
        self.pool.release(sequence.blocks)
        sequence.found_tokens = sequence.registered_blocks * self.pool.block_tokens
        sequence.blocks = []
        sequence.computed = 0
        sequence.registered_blocks = 0
        sequence.asked_tiers = False
        if sequence.prompt_outputs is not None:
            sequence.prompt_outputs = sequence.request.new_prompt_outputs()
        sequence.running = False
