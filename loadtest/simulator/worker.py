"""Simulated worker: the real engine core, stepped by the virtual clock instead of a process.

A step in which all rows generate repeats unchanged until something happens. Such steps are
simulated at once. When a command arrives, they are cut short at the end of the current step, so
that every command meets the same state as in real time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from batonpb.common_pb2 import EdgeRate as EdgeRateMessage
from batonpb.common_pb2 import WorkerIdentity, WorkerStatus

from baton.engine.core.core import EngineCore, Publication
from baton.engine.core.model_runner import GrammarStore, RunnerCapabilities
from baton.engine.core.plan import SampleSpec, StepPlan
from baton.engine.core.scheduler import Scheduler, SchedulerConfig
from baton.engine.core.sequence import EngineRequest, TokenSequence
from baton.engine.core.tiers.places import TierPlaces
from baton.engine.core.tiers.tiers import POOL, Copied, TierCopy
from baton.engine.emulated import EmulatedAdapters
from baton.engine.emulated_timing import WorkerTiming
from baton.engine.process.step_rates import StepRates
from baton.registry.types import TIERS
from baton.types import events as ev
from baton.types.errors import BatonError
from baton.types.geometry import KvGeometry
from baton.types.params import SampledToken
from baton.wire.worker_status import engine_status
from kvtransfer.edge import EdgeRate
from loadtest.simulator.network import VirtualClock

Handler = Callable[[ev.Event], None]
Command = Callable[[Scheduler], object]

LAYER_GROUPS = 4  # parts in which a step's KV is published
TOKEN = SampledToken(0)
_STATUS_NS = 250_000_000  # ``decode_worker.service.STATUS_S``
_KV_EVENTS_NS = 20_000_000  # time over which the registry gathers cache changes


class TimedRunner:
    """``ModelRunner`` that only provides shapes: the clock decides when a step is done."""

    def __init__(self, geometry: KvGeometry) -> None:
        self.geometry = geometry
        self.eos_token_ids: tuple[int, ...] = ()
        self.capabilities = RunnerCapabilities()
        self.adapters = EmulatedAdapters()
        self.grammars: GrammarStore | None = None
        self.rewritten_rows: tuple[int, ...] = ()
        self.refused_rows: Mapping[int, BatonError] = {}
        self.mask_ns = 0

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """Admit all draft tokens."""
        return len(draft_tokens)

    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        """Return one token per sample."""
        return [[TOKEN] * len(row.samples) for row in plan.rows]


@dataclass(slots=True)
class _Steps:
    """Repeated steps in progress; each takes ``growth_ns`` longer than the one before."""

    plan: StepPlan
    began_ns: int
    count: int
    first_ns: float
    growth_ns: float
    publications: list[Publication]

    def span_ns(self, count: int) -> int:
        return round(count * self.first_ns + self.growth_ns * count * (count - 1) / 2)

    def done_after(self, elapsed_ns: int) -> int:
        low = 1
        high = self.count
        while low < high:
            middle = (low + high) // 2
            if self.span_ns(middle) >= elapsed_ns:
                high = middle
            else:
                low = middle + 1
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """Step times, pool and limits of a simulated worker.

    ``memory_blocks`` are those of a memory tier below the pool; copying a block between the two
    takes ``copy_ns``, one at a time. ``check_every_step`` recounts all blocks (tests).
    """

    timing: WorkerTiming
    geometry: KvGeometry
    config: SchedulerConfig
    memory_blocks: int = 0
    copy_ns: int = 0
    check_every_step: bool = False


class WorkerListener:
    """Interface of the router for reports of workers."""

    def on_status(self, worker: "SimulatedWorker", status: WorkerStatus) -> None:
        """Process a load report."""

    def on_cache_changed(self, worker: "SimulatedWorker", change: ev.CacheChanged) -> None:
        """Process blocks added to and removed from a worker's cache."""


class SimulatedWorker:
    """Simulated worker, from its start to its death."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        model: WorkerModel,
        *,
        clock: VirtualClock,
        listener: WorkerListener,
        host: str = "",
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = blake2b(f"{worker_id}/{epoch}".encode(), digest_size=16).digest()
        self.alive = True
        self._identity = WorkerIdentity(host=host)
        self.core = EngineCore(
            TimedRunner(model.geometry),
            model.config,
            1,
            tiers=[TierPlaces(TIERS[0], model.memory_blocks)] if model.memory_blocks else (),
            check_every_step=model.check_every_step,
        )
        self.run_began_ns = 0  # arrival of the first token in the current ``Tokens``
        self.busy_ns = 0
        self._clock = clock
        self._timing = model.timing
        self._listener = listener
        self._rates = StepRates()
        self._load = ev.StepDone(blocks=self.core.pool.counts())
        self._load_ns = 0  # begin of the step that ``_load`` is from
        self._edges: dict[str, EdgeRate] = {}
        self._edge_messages: dict[str, EdgeRateMessage] = {}
        self._handlers: dict[str, Handler] = {}
        self._inbox: list[Command] = []
        self._steps: _Steps | None = None
        self._turn_due = False
        self._status_due = False
        self._number = 0  # number of the steps in progress: a rescheduled end is void
        self._changes: list[ev.CacheChanged] = []
        self._copy_ns = model.copy_ns
        self._copier_free_ns = 0
        self._saved: list[Copied] = []  # reported before the next step

    def submit(self, request: EngineRequest, handler: Handler) -> None:
        """Queue a request; ``handler`` receives its events, ``Ended`` last."""
        self._handlers[request.request_id] = handler
        self.send(lambda scheduler: self._submit(scheduler, request))

    def _submit(self, scheduler: Scheduler, request: EngineRequest) -> None:
        try:
            scheduler.submit(request, self._clock.now_ns)
        except BatonError as error:
            self._deliver([ev.Ended(request.request_id, error.code, error.message)])

    def send(self, command: Command) -> None:
        """Run a command in the engine at the end of the current step."""
        if not self.alive:
            return
        self._inbox.append(command)
        self._report_soon()
        steps = self._steps
        if steps is None:
            if not self._turn_due:
                self._turn_due = True
                self._clock.after(0, self._turn)
            return
        count = steps.done_after(self._clock.now_ns - steps.began_ns)
        if count < steps.count:
            steps.count = count
            self._end_at(steps)

    def note_transfer(self, prefill_id: str, payload_bytes: float, seconds: float) -> None:
        """Record a KV transfer from another worker."""
        edge = self._edges.setdefault(prefill_id, EdgeRate())
        edge.note(int(payload_bytes), seconds)
        if edge.measured:  # reused in every report
            message = self._edge_messages.setdefault(
                prefill_id, EdgeRateMessage(prefill_worker_id=prefill_id)
            )
            message.bytes_per_s = edge.bytes_per_s

    def die(self) -> None:
        """Lose everything without notifying anyone."""
        self.alive = False
        self._number += 1
        self._handlers.clear()
        self._inbox.clear()

    def _turn(self) -> None:
        """Run pending commands, then start the next step, if there is one.

        A turn that was due may find a step begun: the end of the one before began it.
        """
        self._turn_due = False
        if not self.alive or self._steps is not None:
            return
        while True:
            inbox = self._inbox
            self._inbox = []
            for command in inbox:
                command(self.core.scheduler)
            saved = self._saved
            self._saved = []
            for copied in saved:
                self.core.tiers.copied(copied, self._clock.now_ns)
            plan = self.core.plan(self._clock.now_ns)
            self._copy()
            self._deliver(self.core.batch.take_events())
            if plan.rows:
                self._begin(plan)
                return
            self._deliver(self.core.take_events())
            if not self._inbox:
                return

    def _copy(self) -> None:
        """Simulate the thread that copies blocks between pool and tier, one at a time."""
        for copy in self.core.take_copies(self._clock.now_ns):
            end_ns = max(self._copier_free_ns, self._clock.now_ns) + self._copy_ns
            self._copier_free_ns = end_ns
            self._clock.at(end_ns, partial(self._copied, copy))

    def _copied(self, copy: TierCopy) -> None:
        if not self.alive:
            return
        done = Copied(copy.number, "done", self._copy_ns)
        if copy.target == POOL:
            self.send(lambda _: self.core.tiers.copied(done, self._clock.now_ns))
            return
        self._saved.append(done)
        if self._steps is None and not self._turn_due:
            self._turn_due = True
            self._clock.after(0, self._turn)

    def _begin(self, plan: StepPlan) -> None:
        steps = _Steps(
            plan,
            self._clock.now_ns,
            self.core.batch.equal_steps(plan),
            self._timing.seconds(plan.rows) * 1e9,
            self._timing.answer_context_s * len(plan.rows) * 1e9,
            self.core.publications(plan),
        )
        self._steps = steps
        self._report_soon()
        self._end_at(steps)
        if steps.publications:
            for done in range(1, LAYER_GROUPS):
                due_ns = steps.began_ns + steps.span_ns(1) * done // LAYER_GROUPS
                self._clock.at(due_ns, partial(self._publish, steps, done))

    def _end_at(self, steps: _Steps) -> None:
        self._number += 1
        end_ns = steps.began_ns + steps.span_ns(steps.count)
        self._clock.at(end_ns, partial(self._end, self._number))

    def _publish(self, steps: _Steps, done: int) -> None:
        if self.alive:
            due = [
                publication.on_layers_done(done, LAYER_GROUPS) for publication in steps.publications
            ]
            self._deliver([published for published in due if published is not None])

    def _end(self, number: int) -> None:
        steps = self._steps
        if number != self._number or steps is None:
            return
        self._publish(steps, LAYER_GROUPS)
        count = steps.count
        span_ns = steps.span_ns(steps.count)
        self.busy_ns += span_ns
        self.run_began_ns = steps.began_ns + steps.span_ns(1)
        results = self.core.runner.execute(steps.plan)
        if count > 1:
            results = [[TOKEN] * count for _ in steps.plan.rows]
        self._steps = None
        now_ns = self._clock.now_ns
        self._load_ns = now_ns - span_ns // count  # a command ends a run of equal steps
        self._deliver(self.core.apply(steps.plan, results, now_ns, span_ns // count, count))
        self._turn()

    def _deliver(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            match event:
                case ev.StepDone():
                    self._load = event
                    self._rates.add(event)
                case ev.CacheChanged():
                    self._note(event)
                case ev.AdapterChanged():
                    pass
                case ev.Ended():
                    handler = self._handlers.pop(event.request_id, None)
                    if handler is not None:
                        handler(event)
                case _:
                    handler = self._handlers.get(event.request_id)
                    if handler is not None:
                        handler(event)

    def _note(self, change: ev.CacheChanged) -> None:
        if not self._changes:
            self._clock.after(_KV_EVENTS_NS, self._send_changes)
        self._changes.append(change)

    def _send_changes(self) -> None:
        changes = self._changes
        self._changes = []
        if self.alive:
            for change in changes:
                self._listener.on_cache_changed(self, change)

    def _report_soon(self) -> None:
        if not self._status_due:
            self._status_due = True
            self._clock.after(_STATUS_NS, self._report)

    def _report(self) -> None:
        self._status_due = False
        if not self.alive:
            return
        self._listener.on_status(self, self.status())
        if self._steps is not None:
            self._report_soon()

    def first_token_s(self, hashes: Sequence[bytes], prompt_tokens: int) -> float:
        """Return the time until a new prompt's first token, by the true queue."""
        pool = self.core.pool
        timing = self._timing
        steps = self._steps
        total_s = 0.0
        if steps is not None and not self.core.batch.count_decodes():
            total_s = (steps.began_ns - self._clock.now_ns) / 1e9  # part of the step already done
        for item in [*self.core.batch.running, *self.core.batch.queue.items]:
            if not isinstance(item, TokenSequence) or item.decodes:
                continue
            done = item.computed or len(pool.match(item.block_hashes)) * pool.block_tokens
            total_s += timing.prompt_s(len(item.tokens), min(done, len(item.tokens) - 1))
        cached = len(pool.match(hashes)) * pool.block_tokens
        return total_s + timing.prompt_s(prompt_tokens, min(cached, prompt_tokens - 1))

    def status(self) -> WorkerStatus:
        """Return the status as the Decode service reports it."""
        status = engine_status(self._load, self._rates)
        status.identity.CopyFrom(self._identity)
        status.state = "ready"
        status.load_age_ns = self._clock.now_ns - self._load_ns if self._steps else 0
        status.edges.extend(self._edge_messages.values())
        return status
