"""Selection of the tokens that the next step computes. Pure: no clock, no I/O, no torch.

One queue, ordered by (priority, ticket), holds everything that needs blocks: sequences to compute
here and reservations for KV from other workers. The head waits until it fits, and nothing overtakes
it. Two workers that follow the same tickets therefore cannot deadlock.

A step contains running decodes, then running prompt chunks, then admissions, within a token budget.
When running sequences need blocks, the request with the latest ticket is preempted; its blocks stay
findable in the cache. It is queued again with all its tokens, and only the next token is sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.core.batch_state import BatchState
from baton.engine.core.blocks import BlockPool
from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.core.reservations import Reservation, ReservationState
from baton.engine.core.rows import decode_row, prompt_row
from baton.engine.core.sequence import EngineRequest, Kind, TokenSequence
from baton.engine.core.speculative.acceptance import accepted_run
from baton.engine.core.tiers.tiers import KvTiers
from baton.types import events as ev
from baton.types.errors import BatonError, CancelledError_, InvalidRequestError, UnavailableError
from baton.types.params import SampledToken, finish_reason
from baton.types.prompt_outputs import PromptOutputs


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Batch limits of one engine."""

    max_batch_requests: int = 32
    max_step_tokens: int = 512


class Scheduler:
    """Scheduler of all requests of one engine."""

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        eos_token_ids: tuple[int, ...],
        tiers: KvTiers | None = None,
    ) -> None:
        self.batch = BatchState(pool, tiers)
        self.config = config
        self.max_step_tokens = config.max_step_tokens  # lowered if steps take too long
        self._eos = frozenset(eos_token_ids)
        self._requests: dict[str, EngineRequest] = {}

    def submit(self, request: EngineRequest, now_ns: int) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: The id is in use, or the request exceeds the pool.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        no_answer = request.kind in (Kind.PREFILL, Kind.HELD) or request.spec.pooling
        answer = 0 if no_answer else request.spec.params.max_tokens
        need = self.batch.pool.blocks_for(len(request.prompt) + answer)
        if not request.prompt or need > self.batch.pool.total:
            raise InvalidRequestError(
                f"prompt of {len(request.prompt)} tokens and response of {answer} need {need} KV "
                f"blocks; this worker has {self.batch.pool.total} (raise kv_blocks_per_worker)"
            )
        request.check_emitted()
        request.submitted_ns = now_ns
        if request.kind is Kind.HELD and not self.batch.queue.fetch(request):
            self._hold_cached(request, now_ns)
            return
        self._requests[request.request_id] = request
        if request.kind is Kind.HELD:
            return
        if request.kind is Kind.REMOTE:
            self.batch.queue.add_reservation(self.batch.reservations.new(request))
        elif request.spec.emitted:
            self._resume(request, request.spec.emitted)
        else:
            self.batch.queue.add(self.batch.new_prompt(request))

    def _hold_cached(self, request: EngineRequest, now_ns: int) -> None:
        blocks = self.batch.hold_cached(request).blocks
        size = self.batch.pool.block_tokens
        self._requests[request.request_id] = request
        request.prompt_done_ns = now_ns
        self._note_admission(request, len(blocks), now_ns, blocks)
        if len(blocks) > request.spec.skip_blocks:
            self.batch.events.append(request.published_prefix(len(blocks), size))
        self.batch.events.append(request.prompt_done([]))

    def bind(self, request_id: str, generation: int) -> None:
        """Allocate the pages of a reservation (``Bound`` follows); ignore stale generations."""
        reservations = self.batch.reservations
        reservation = reservations.find(request_id, generation, ReservationState.RESERVED)
        if reservation is not None and not reservations.bind(reservation):
            self.batch.revoke(reservation)  # its request waits again

    def commit(
        self, request_id: str, generation: int, first: Sequence[int | None], now_ns: int
    ) -> bool:
        """Start decoding after all KV of the prompt has arrived; False for a stale generation.

        ``first`` has the first token of each choice, or None for a choice that has ended.
        """
        reservation = self.batch.reservations.find(request_id, generation, ReservationState.BOUND)
        if reservation is None:
            return False
        request = reservation.request
        self.batch.reservations.take(request_id)
        request.prompt_done_ns = now_ns
        blocks = reservation.blocks
        self.batch.pool.note_written(reservation.pages)
        source = self.batch.new_sequence(request, 0, list(request.prompt))
        source.blocks = blocks
        source.computed = len(request.prompt)
        self.batch.register_hashes(source)
        if request.spec.emitted:
            self.batch.pool.release(blocks)  # findable by their hashes
            self._resume(request, request.spec.emitted)
            return True
        for choice, token in enumerate(first):
            if token is not None and choice in request.live_choices:
                self.batch.fork(source, choice, token)
            else:
                request.live_choices.discard(choice)
        self.batch.pool.release(blocks)
        self._end_if_done(request)
        return True

    def compute_locally(self, request_id: str, first: Sequence[int | None] | None) -> None:
        """Abandon the KV transfer of a REMOTE request and compute its prompt here.

        ``first`` contains first tokens that the client may have received; they are not sampled
        again. The caller has stopped writing to the request's pages.
        """
        reservation = self.batch.reservations.take(request_id)
        if reservation is None:
            return
        self.batch.queue.drop(reservation)
        request = reservation.request
        request.kind = Kind.FULL
        if request.spec.emitted:
            self._resume(request, request.spec.emitted)
        elif first is None:
            self.batch.queue.add(self.batch.new_prompt(request))
        else:
            self._resume(request, [None if token is None else (token,) for token in first])

    def _resume(self, request: EngineRequest, emitted: Sequence[Sequence[int] | None]) -> None:
        """Queue responses that have begun, as if they had been preempted.

        ``emitted`` has the tokens of each choice, or None for a choice that has ended.
        """
        for choice, tokens in enumerate(emitted):
            if tokens is not None and choice in request.live_choices:
                self.batch.queue.add(self.batch.resumed_sequence(request, choice, tokens))
            else:
                request.live_choices.discard(choice)
        self._end_if_done(request)

    def drained(self, request_id: str, generation: int) -> None:
        """Free the revoked pages of ``generation`` after their writer has stopped."""
        self.batch.reservations.drained(request_id, generation)

    def release(self, request_id: str) -> None:
        """Return the blocks of a PREFILL request to the cache after its KV was pulled."""
        self._end(request_id, None)

    def cancel(self, request_id: str, choices: Sequence[int] = (), reason: str = "") -> None:
        """End a request, or only some of its choices; unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if not choices:
            self._end(request_id, CancelledError_(reason or "cancelled"))
            return
        for sequence in self.batch.sequences_of(request_id):
            if sequence.choice in choices and sequence.generated:
                self.batch.remove(sequence)
        request.live_choices.difference_update(choices)
        self._end_if_done(request)

    def withdraw(self, request_id: str) -> None:
        """End a prompt that another worker decodes, unless it has begun."""
        request = self._requests.get(request_id)
        if request is not None and request.kind is Kind.PREFILL and not request.admitted_ns:
            self._end(request_id, UnavailableError("withdrawn: this worker has changed its role"))

    def fail(self, request_id: str, error: BatonError) -> None:
        """End a request with an error."""
        self._end(request_id, error)

    def plan(self, now_ns: int) -> StepPlan:
        """Choose the rows of the next step and allocate their blocks."""
        for request in self.batch.queue.fetched():
            try:
                self._hold_cached(request, now_ns)
            except BatonError as error:
                self._end(request.request_id, error)
        rows: list[PlanRow] = []
        copies: list[tuple[int, int]] = []
        batch = self.batch
        pool = batch.pool
        pool.pins.now_ns = now_ns
        block_tokens = pool.block_tokens
        batch.spare.take_back()
        batch.running.sort(key=lambda sequence: sequence.request.order)
        for sequence in list(batch.running):
            if not sequence.running or not sequence.decodes:
                continue
            if batch.make_writable(sequence, copies):
                rows.append(decode_row(sequence, block_tokens))
        budget = max(self.max_step_tokens - len(rows), block_tokens)
        for sequence in batch.running:
            if budget > 0 and not sequence.decodes:
                rows.append(prompt_row(sequence, budget, block_tokens))
                budget -= rows[-1].cost_tokens
        while budget > 0 and (admitted := self._admit(now_ns)) is not None:
            rows.append(prompt_row(admitted, budget, block_tokens))
            budget -= rows[-1].cost_tokens
        self._admit(now_ns, sequences=False)  # reservations take no part of the budget
        written = pool.take_written() if rows else ()
        return StepPlan(tuple(rows), tuple(copies), written)

    def apply(self, plan: StepPlan, results: list[list[SampledToken]], now_ns: int) -> None:
        """Record the tokens that a step computed and sampled.

        A row that decodes may have one token for each of several equal steps
        (``BatchState.equal_steps``).
        """
        by_id = self.batch.running_by_id()
        for row, sampled in zip(plan.rows, results, strict=True):
            sequence = by_id.get(row.sequence_id)
            if sequence is None:
                continue  # its request ended within this step
            if row.num_draft_tokens:
                self._take_run(sequence, row, accepted_run(sequence, row, sampled, self._eos))
                continue
            if len(sampled) > len(row.samples):
                self._take_run(sequence, row, sampled)
                continue
            sequence.computed = row.start + len(row.tokens)
            self.batch.register_hashes(sequence)
            if row.prompt_outputs is not None and sequence.computed == len(sequence.tokens):
                self._collect(sequence, row.prompt_outputs, now_ns)
            if not row.samples:
                continue
            request = sequence.request
            if not request.prompt_done_ns:
                request.prompt_done_ns = now_ns
            if request.kind is Kind.PREFILL:
                self._hold(sequence, sampled)
                continue
            branches = [sequence]
            if len(sampled) > 1:
                rest = zip(row.samples[1:], sampled[1:], strict=True)
                branches += [self.batch.fork(sequence, s.choice, token.token) for s, token in rest]
            sequence.tokens.append(sampled[0].token)
            for branch, token in zip(branches, sampled, strict=True):
                self._emit(branch, [token])
            self._end_if_done(request)
        self.batch.spare.take_back()

    def _admit(self, now_ns: int, *, sequences: bool = True) -> TokenSequence | None:
        """Grant reservations up to the next sequence, and admit that if ``sequences``."""
        batch = self.batch
        queue = batch.queue
        while queue.items:
            if len(batch.running) + batch.reservations.granted >= self.config.max_batch_requests:
                return None
            item = queue.first_ready(batch.awaits_prompt)
            if item is None or not (sequences or isinstance(item, Reservation)):
                return None
            taken = (
                batch.reservations.grant(item)
                if isinstance(item, Reservation)
                else self._admit_sequence(item, now_ns)
            )
            if not taken:
                return None
            queue.items.remove(item)
            if isinstance(item, Reservation):
                self._note_admission(item.request, len(item.pinned), now_ns)
            else:
                return item
        return None

    def _admit_sequence(self, sequence: TokenSequence, now_ns: int) -> bool:
        request = sequence.request
        pool = self.batch.pool
        matched: list[int] = []
        if request.spec.cacheable and sequence.prompt_outputs is None:
            matched = self.batch.matching(sequence)
        pool.pin(matched)
        need = pool.blocks_for(len(sequence.tokens)) - len(matched)
        pages: list[int] | None = None
        if need <= self.batch.reservations.available_blocks and not self.batch.pins_too_much(
            request, need
        ):
            pages = pool.allocate(need, matched[-1] if matched else None)
        if pages is None:
            pool.release(matched)
            return False
        sequence.blocks = matched + pages
        sequence.computed = len(matched) * pool.block_tokens
        sequence.registered_blocks = len(matched)
        self.batch.run(sequence)
        self._note_admission(request, len(matched), now_ns, sequence.blocks)
        if request.kind is Kind.PREFILL and len(matched) > request.spec.skip_blocks:
            self.batch.events.append(request.published_prefix(len(matched), pool.block_tokens))
        return True

    def _note_admission(
        self, request: EngineRequest, matched_blocks: int, now_ns: int, blocks: Sequence[int] = ()
    ) -> None:
        if request.admitted_ns:
            return
        request.admitted_ns = now_ns
        cached_tokens = matched_blocks * self.batch.pool.block_tokens
        # at most the prompt: a resumed sequence matches more
        request.cached_tokens = min(cached_tokens, len(request.prompt))
        self.batch.events.append(
            ev.Admitted(
                request_id=request.request_id,
                cached_tokens=request.cached_tokens,
                queue_ns=now_ns - request.submitted_ns,
                blocks=tuple(blocks) if request.kind in (Kind.PREFILL, Kind.HELD) else (),
            )
        )

    def _collect(self, sequence: TokenSequence, prompt_outputs: PromptOutputs, now_ns: int) -> None:
        """Report the outputs of a computed prompt; a pooled request ends with them."""
        request = sequence.request
        sequence.prompt_outputs = None
        scores = prompt_outputs.scores()
        vector = prompt_outputs.vector()
        self.batch.events.append(ev.PromptOutputsReady(request.request_id, scores, vector))
        if not request.spec.pooling:
            return
        request.prompt_done_ns = now_ns
        if request.kind is Kind.PREFILL:
            self._hold(sequence, [])
        else:
            self._end(request.request_id, None)

    def _hold(self, sequence: TokenSequence, sampled: list[SampledToken]) -> None:
        self.batch.hold(sequence)
        self.batch.events.append(sequence.request.prompt_done(sampled))

    def _take_run(self, sequence: TokenSequence, row: PlanRow, run: list[SampledToken]) -> None:
        sequence.tokens += [token.token for token in run]
        sequence.computed = row.start + len(run)
        self.batch.register_hashes(sequence)
        self._emit(sequence, run)
        self._end_if_done(sequence.request)

    def _emit(self, sequence: TokenSequence, run: list[SampledToken]) -> None:
        """Report the sequence's newest tokens; only the last of them may end it."""
        request = sequence.request
        generated = sequence.generated
        reason, stop = finish_reason(request.spec.params, self._eos, run[-1].token, generated)
        self.batch.events.append(
            ev.Tokens(
                request_id=request.request_id,
                choice=sequence.choice,
                index=generated - len(run),
                tokens=tuple(run if stop is None else run[:-1]),
                finish_reason=reason,
                stop_token=stop,
            )
        )
        if reason:
            self.batch.remove(sequence)
            request.live_choices.discard(sequence.choice)

    def _end_if_done(self, request: EngineRequest) -> None:
        if not request.live_choices:
            self._end(request.request_id, None)

    def _end(self, request_id: str, error: BatonError | None) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.batch.queue.fetching.pop(request_id, None)
        for sequence in self.batch.sequences_of(request_id):
            self.batch.remove(sequence)
        reservation = self.batch.reservations.take(request_id)
        if reservation is not None:
            self.batch.queue.drop(reservation)
        done_ns = request.prompt_done_ns
        admitted_ns = request.admitted_ns
        self.batch.events.append(
            ev.Ended(
                request_id=request_id,
                error_code=error.code if error else "",
                error_message=error.message if error else "",
                queue_ns=max(admitted_ns - request.submitted_ns, 0),
                prefill_ns=max(done_ns - admitted_ns, 0),
                preemptions=request.preemptions,
                cached_tokens=request.cached_tokens,
                computed_tokens=len(request.prompt) - request.cached_tokens if done_ns else 0,
                tier_tokens=request.tier_tokens,
                input_ns=request.input_ns,
                output_ns=request.output_ns,
            )
        )
