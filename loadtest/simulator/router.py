"""Simulated router: the real queue, index, bookings and placement, without an event loop.

It does on the clock what ``router.routing.requests.gateway`` does on frames and timers, with the
same machines and policies: ``Admission``, ``Tickets``, ``Placer``, ``LoadBook``,
``recovery_policy``.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from batonpb.common_pb2 import WorkerStatus

from baton.registry.types import Role
from baton.types import events as ev
from baton.types.errors import BatonError, QueueFullError, SloUnreachableError, UnavailableError
from baton.types.slo import Slo
from loadtest.simulator.attempt import Attempt, AttemptWorkers
from loadtest.simulator.index_feed import IndexFeed
from loadtest.simulator.network import CONTROL_NS, Network
from loadtest.simulator.policies import POLICIES, Chosen, PolicyPlacement
from loadtest.simulator.prefix_pull import PrefixSource
from loadtest.simulator.records import Record
from loadtest.simulator.setup import Setup
from loadtest.simulator.table import SimulatedTable
from loadtest.simulator.worker import SimulatedWorker, WorkerListener
from router.request import GenerationRequest
from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import Waiting
from router.routing.admission.slo_gate import GateRequest, SloDecision, SloGate
from router.routing.peers.work_counter import WorkCounter
from router.routing.placement.placer import Placer, Quote
from router.routing.placement.prefill_replacement import replace_prefill
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.requests.recovery_policy import after_prefill_failure, after_worker_death
from router.routing.requests.sibling_admitter import SiblingAdmitter
from router.routing.requests.tickets import Tickets
from router.routing.workers.slot import WorkerSlot

_LATE_NS = 100_000_000  # between two questions for the lane of late requests
_REGRET_PERIOD = 16  # requests: reading all queues is slow
_RETURN_S = 1.0  # after ``Retry-After``, within which a client comes again


class SimulatedRouter(WorkerListener):
    """Router of a simulation; without a policy it uses the fleet's own placement."""

    def __init__(self, setup: Setup, table: SimulatedTable, network: Network) -> None:
        clock = network.clock
        settings = setup.router()
        self._tries = setup.tries
        self._returns = random.Random(f"{setup.seed}/returns")
        self.records: dict[str, Record] = {}
        self.deaths = 0
        self.ended = 0
        self.on_ended: Callable[[Record], None] = lambda _: None
        self.work = WorkCounter()
        self._settings = settings
        self._table = table
        self._clock = clock
        draw = random.Random(f"{setup.seed}/router")
        index = PrefixIndex()
        self._feed = IndexFeed(index)
        self._admission = Admission(settings.max_queued_requests)
        self._tickets = Tickets(mark=0)
        self._gate = SloGate(settings.window_requests, settings.max_queued_requests)
        self._late: dict[str, Waiting] = {}
        self._late_due = False
        self._placer = Placer(
            settings,
            table,
            index,
            clock_ns=lambda: clock.now_ns,
            random_source=draw,
            hashes_of=self._hashes_of,
        )
        self._book = self._placer.book
        self._siblings = SiblingAdmitter(
            self._placer,
            self._admission,
            self._judge_or_admit,
            begins=lambda *_: None,
            later=lambda s, look: clock.after(round(s * 1e9), look),
        )
        policy = POLICIES.get(setup.policy)
        self._policy = policy and PolicyPlacement(policy, index, self._book, draw)
        self._attempt_of = partial(
            Attempt,
            block_tokens=setup.block_tokens,
            kv_bytes_per_token=setup.timing.kv_bytes_per_token,
            network=network,
            listener=self,
        )
        self._attempts: dict[str, Attempt] = {}
        self._placed = 0

    def _hashes_of(self, request: GenerationRequest, slots: Sequence[WorkerSlot]) -> list[bytes]:
        return self.records[request.request_id].hashes

    def submit(self, record: Record) -> None:
        """Process the arrival of a request."""
        self.records[record.id] = record
        request = record.request
        now_ns = self._clock.now_ns
        self.work.arrived(record.id, record.prompt_tokens)
        try:
            self._placer.check_served(request)
            cost_tokens = self._placer.cost_tokens(request, record.prompt_tokens)
            entry = Waiting.of(request, cost_tokens)
            loser = self._admission.offer(entry, now_ns, expected_s=self._placer.answer_s)
        except QueueFullError as error:
            self._turn_away(record, error)
            return
        except UnavailableError as error:
            self._end(record, error.code)
            return
        if loser is not None:
            expected_s = self._placer.answer_s
            refusal = self._admission.refusal(loser.tenant, now_ns, expected_s=expected_s)
            self._turn_away(self.records[loser.request_id], refusal)
        self._pump()

    def _turn_away(self, record: Record, error: QueueFullError) -> None:
        """Answer 429: the client comes again after ``Retry-After``, until its last try."""
        if record.tries >= self._tries:
            self._end(record, error.code)
            return
        self.work.ended(record.id, served=False)
        record.tries += 1
        record.retry_after_s = record.retry_after_s or error.retry_after_s
        after_s = error.retry_after_s + self._returns.random() * _RETURN_S
        self._clock.after(round(after_s * 1e9), partial(self._come_again, record))

    def _come_again(self, record: Record) -> None:
        record.request = replace(record.request, arrived_ns=self._clock.now_ns)
        record.again_ns = record.again_ns or self._clock.now_ns
        self.submit(record)

    def _pump(self) -> None:
        window = len(self._table.usable) * self._settings.window_requests
        while (entry := self._admission.pop(window)) is not None:
            record = self.records[entry.request_id]
            self._siblings.admit(record, record.request, entry)

    def _judge_or_admit(self, record: Record, entry: Waiting, quote: Quote | None) -> None:
        slo = record.request.slo
        if slo is not None and self._policy is None:
            self._judge(record, entry, slo)
        else:
            self._admit(record, entry, quote)

    def _admit(self, record: Record, entry: Waiting, quote: Quote | None = None) -> None:
        record.admitted = True
        record.ticket = self._tickets.draw()
        uncached_tokens = self._place(record, quote=quote)
        if uncached_tokens is not None:
            cost_tokens = self._placer.cost_tokens(record.request, uncached_tokens)
            self._admission.charge(entry, cost_tokens)

    def _judge(self, record: Record, entry: Waiting, slo: Slo, *, late: bool = False) -> bool:
        """Place a request if it will be on time; return whether it was. ``late``: it waits."""
        quote = self._quote(record)
        if quote is None:
            return False
        now_ns = self._clock.now_ns
        chosen = quote.placement.chosen
        answer_tokens = self._placer.answer_tokens
        prediction = self._gate.predict(chosen, record.prompt_tokens, answer_tokens)
        workers = self._computing
        waited_s = (now_ns - record.request.arrived_ns) / 1e9
        asked = GateRequest(record.id, slo, waited_s, caller=record.id)
        verdict = self._gate.judge(asked, prediction, workers=workers, now_ns=now_ns)
        if verdict is SloDecision.PLACE:
            if self._late.pop(record.id, None) is not None:
                self._admission.resume(entry)
            record.predicted_step_s = prediction.step_s
            self._admit(record, entry, quote)
            return True
        if not late:
            self._admission.withdraw(entry)
            self._late[record.id] = entry
            self._ask_late_soon()
        if verdict is SloDecision.REFUSE:
            self._refuse(record, self._gate.retry_after_s(prediction, workers, now_ns, record.id))
        return False

    @property
    def _computing(self) -> int:
        return len(self._table.of_role("prefill")) or len(self._table.usable)

    def _quote(self, record: Record) -> Quote | None:
        try:
            return self._placer.quote(record.request)
        except UnavailableError as error:
            self._end(record, error.code)
            return None

    def _refuse(self, record: Record, retry_after_s: float) -> None:
        self._gate.leave(self._late.pop(record.id).request_id)
        self._turn_away(record, SloUnreachableError("late", retry_after_s=retry_after_s))

    def _ask_late_soon(self) -> None:
        if not self._late_due:
            self._late_due = True
            self._clock.after(_LATE_NS, self._ask_late)

    def _ask_late(self) -> None:
        self._late_due = False
        now_ns = self._clock.now_ns
        for record_id in self._gate.expired(now_ns):
            retry_after_s = self._gate.expire(record_id, self._computing, now_ns)
            self._refuse(self.records[record_id], retry_after_s)
        for record_id in self._gate.next():
            record = self.records[record_id]
            if (slo := record.request.slo) is not None:
                self._judge(record, self._late[record_id], slo, late=True)
        if self._late:
            self._ask_late_soon()

    def _place(self, record: Record, avoid: bytes = b"", quote: Quote | None = None) -> int | None:
        """Place and send a request; return the prompt tokens to compute, None if it failed."""
        try:
            chosen = self._choose(record, avoid, quote)
        except UnavailableError as error:
            self._end(record, error.code)
            return None
        self.work.placed(record.id, chosen.uncached_tokens)
        record.attempt += 1
        record.placed_ns = record.placed_ns or self._clock.now_ns
        record.prefill_id = chosen.prefill_id
        record.decode_id = chosen.decode_id
        prefill_id = chosen.prefill_id
        worker_of = self._table.worker
        prefill = worker_of(prefill_id) if prefill_id is not None else None
        prefix = [
            PrefixSource(worker_of(source.worker_id), source.blocks) for source in chosen.prefix
        ]
        workers = AttemptWorkers(worker_of(chosen.decode_id), prefill, prefix)
        attempt = self._attempt_of(record, workers)
        self._attempts[record.id] = attempt
        self._clock.after(CONTROL_NS, attempt.start)
        return chosen.uncached_tokens

    def _choose(self, record: Record, avoid: bytes, quote: Quote | None = None) -> Chosen:
        number = self._placed
        self._placed += 1
        if self._policy is None:
            placement = self._placer.place(record.request, avoid, quote)
            terms = placement.chosen.terms
            record.predicted_first_s = terms.first_token_s
            chosen = Chosen(
                placement.prefill_id,
                placement.decode_id,
                placement.chosen.uncached_tokens,
                placement.prefix,
            )
        else:
            slots = self._placer.eligible(record.request, avoid)
            chosen = self._policy.place(record, slots, number, self._clock.now_ns)
        if number % _REGRET_PERIOD == 0:
            record.regret_s = self._regret_s(record, chosen.prefill_id or chosen.decode_id)
        return chosen

    def _regret_s(self, record: Record, chosen_id: str) -> float:
        """Return the time that the best worker would save for this prompt, by the true queues."""
        slot = self._table.get(chosen_id)
        if slot is None:
            return 0.0
        seconds = {
            slot.worker_id: self._table.worker(slot.worker_id).first_token_s(
                record.hashes, record.prompt_tokens
            )
            for slot in self._table.of_role(slot.role)
        }
        return seconds[chosen_id] - min(seconds.values())

    def on_started(self, record: Record, worker_id: str, cached_tokens: int) -> None:
        """Record the start of a prompt on a worker."""
        if not record.started_ns:
            record.started_ns = self._clock.now_ns
            record.computed_on = worker_id
            record.cached_tokens = cached_tokens

    def on_tokens(self, record: Record, first_ns: int, last_ns: int, count: int) -> None:
        """Record tokens of a response."""
        if record.computed_attempt != record.attempt:
            record.computed_attempt = record.attempt
            self._placer.computed(record.id, first_ns)
        if not record.tokens and record.predicted_first_s:
            first_s = (first_ns - record.placed_ns) / 1e9
            self._gate.learn_wait(record.predicted_first_s, first_s, record.prompt_tokens)
        self.work.generated(record.id, count)
        record.on_tokens(first_ns, last_ns, count)

    def on_end(self, record: Record, attempt: Attempt, error: str) -> None:
        """End a request with its current attempt."""
        if self._attempts.get(record.id) is attempt:
            self._end(record, error)

    def _end(self, record: Record, error: str) -> None:
        now_ns = self._clock.now_ns
        record.error = error
        record.ended_ns = now_ns
        record.ends += 1
        self.ended += 1
        record.wants_prefill = False
        self._attempts.pop(record.id, None)
        self._siblings.leave(record.id)
        self._placer.release(record.id, now_ns)
        self.work.ended(record.id, served=not error)
        if record.admitted:
            record.admitted = False
            self._admission.release(1, now_ns)
        if not error and record.tokens > 2:
            step_s = (record.last_ns - record.second_ns) / 1e9 / (record.tokens - 2)
            self._gate.learn_step(record.predicted_step_s, step_s, record.tokens)
        if not error:
            self._placer.learn(record.request, record.tokens)
        self.on_ended(record)
        self._pump()

    def on_live(self, worker: SimulatedWorker, role: Role) -> None:
        """Process the start of a worker, and place requests that wait for it."""
        self._table.note_live(worker, role)
        self._place_waiting()

    def on_turned(self, worker_id: str, role: Role) -> None:
        """Place by a worker's other role; prompts that it has not begun go to others."""
        self._table.change_role(worker_id, role)
        if role == "decode" and self._table.is_live(worker_id):
            self._take_back_prompts(worker_id)
        self._place_waiting()

    def on_leaving(self, worker_id: str) -> None:
        """Place nothing more on a worker; prompts that it has not begun go to others."""
        self._table.leave(worker_id)
        self._take_back_prompts(worker_id)

    def _take_back_prompts(self, worker_id: str) -> None:
        worker = self._table.worker(worker_id)
        for record_id, attempt in list(self._attempts.items()):
            record = self.records[record_id]
            if attempt.prefill is worker and not record.started_ns:
                attempt.leave_prefill()
                self._replace_prefill(record)

    def uses(self, worker: SimulatedWorker) -> bool:
        """Return whether a request runs at a worker, or is handed over by it."""
        return any(worker in (run.prefill, run.decode) for run in self._attempts.values())

    def on_left(self, worker: SimulatedWorker) -> None:
        """Forget a worker that has left, and its cache."""
        self._table.note_dead(worker)
        self._forget(worker)

    def _forget(self, worker: SimulatedWorker) -> None:
        self._feed.forget(worker.incarnation)
        self._book.forget(worker.worker_id)

    def _place_waiting(self) -> None:
        for record in self.records.values():
            if record.wants_prefill:
                self._replace_prefill(record)
        self._pump()

    def on_status(self, worker: SimulatedWorker, status: WorkerStatus) -> None:
        """Update the load report of a worker."""
        link = self._table.link(worker)
        if link is not None:
            link.status = status
            self._book.reported(worker.worker_id, self._clock.now_ns - status.load_age_ns)

    def on_cache_changed(self, worker: SimulatedWorker, change: ev.CacheChanged) -> None:
        """Apply cache changes of a worker to the prefix index."""
        self._feed.apply(worker.incarnation, change)

    def on_dead(self, worker: SimulatedWorker) -> None:
        """Process the death of a worker: its requests are placed again, or end."""
        self.deaths += 1
        self._table.note_dead(worker)
        self._forget(worker)
        for record_id, attempt in list(self._attempts.items()):
            record = self.records[record_id]
            if attempt.decode is worker:
                self._move(record, attempt, worker)
            elif attempt.prefill is worker:
                attempt.prefill_died(worker)

    def _move(self, record: Record, attempt: Attempt, worker: SimulatedWorker) -> None:
        attempt.decode_died()
        reason = f"{worker.worker_id} died"
        error: BatonError | None = after_worker_death(
            record, dead=worker.incarnation, reason=reason, died=True
        )
        if error is not None:
            self._end(record, error.code)
            return
        self._attempts.pop(record.id, None)
        self._placer.release(record.id)
        record.started_ns = 0
        self._place(record, worker.incarnation)

    def on_peer_needed(self, record: Record, attempt: Attempt, *, died: bool) -> None:
        """Find another worker for the prompt."""
        failed = attempt.prefill.incarnation if attempt.prefill is not None else b""
        repair = after_prefill_failure(
            record,
            failed=failed,
            peer_died=died,
            others=[slot.incarnation for slot in self._table.of_role("prefill")],
            may_wait=True,
        )
        match repair.action:
            case "replace":
                self._replace_prefill(record)
            case "local":
                self._book.take_back(record.prefill_id, record.id)
                self._placer.computing.end(record.id)
                self._clock.after(CONTROL_NS, attempt.compute_locally)
            case "wait":
                record.wants_prefill = True
            case "refuse":
                attempt.cancel()
                self._end(record, repair.refusal.code if repair.refusal else "transfer_failed")

    def _replace_prefill(self, record: Record) -> None:
        """Choose the least loaded prefill worker that has not failed this request, if any."""
        slots = self._table.of_role("prefill")
        attempt = self._attempts.get(record.id)
        fit = [slot for slot in slots if attempt and slot.incarnation not in record.failed_prefills]
        best = replace_prefill(self._placer, record.request, record.prefill_id, fit)
        if attempt is None or best is None:
            record.wants_prefill = attempt is not None
            return
        record.wants_prefill = False
        record.started_ns = 0
        record.prefill_id = best.worker_id
        worker = self._table.worker(best.worker_id)
        self._clock.after(CONTROL_NS, partial(attempt.replace_prefill, worker))
