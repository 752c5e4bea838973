"""Places a request: which workers there are, what each choice costs, the booking, the sending."""

import random
from functools import partial
from time import monotonic_ns

from batonpb.decode_pb2 import Submission

from engine.core.errors import BatonError, UnavailableError
from router.metrics import Observer
from router.placement.booked_load import LoadBook
from router.placement.cost import candidates, choose
from router.placement.prefix_index import PrefixIndex
from router.placement.prompt_hashes import BlockHashCache, prefill_target
from router.placement.worker_load import loads_of
from router.requests.active_request import EXPLAINED_CANDIDATES, ActiveRequest
from router.requests.fair_queue import Waiting
from router.requests.request import GenerationRequest
from router.settings import RouterSettings
from router.workers.table import Slot, WorkerTable
from telemetry.running_mean import RunningMean
from wire.codecs import adapter_to_wire, sampling_to_wire
from wire.tokens import pack_tokens

_FIRST_GUESS_TOKENS = 128.0
_ANSWER_WEIGHT = 0.05  # of one answer in the mean of their lengths
_STEP_S = 0.03


class Placer:
    """Turns requests into submissions.

    Args:
        settings: Ties, leases, and when a prompt is long.
        workers: Who is there.
        prefix_index: Who holds which blocks.
        book: Load that reports do not show yet.
        observer: Metrics.
        router_id: Stands on every submission.
    """

    def __init__(
        self,
        settings: RouterSettings,
        workers: WorkerTable,
        prefix_index: PrefixIndex,
        book: LoadBook,
        observer: Observer,
        router_id: str,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._prefix_index = prefix_index
        self._book = book
        self._observer = observer
        self._router_id = router_id
        self._names = BlockHashCache()
        self._random = random.Random()
        self._answer_tokens = RunningMean(_ANSWER_WEIGHT, prior=_FIRST_GUESS_TOKENS)

    @property
    def answer_s(self) -> float:
        """How long one answer is expected to take, roughly."""
        return self._answer_tokens.value * _STEP_S

    def check_served(self, request: GenerationRequest) -> None:
        """Refuse what no worker that is ready could serve.

        Raises:
            UnavailableError: Says which workers there are, or what role is missing.
        """
        usable = self._workers.usable
        if not usable:
            states = sorted(f"{slot.worker_id} is {slot.state}" for slot in self._workers)
            raise UnavailableError(f"no worker is ready ({', '.join(states[:8]) or 'none known'})")
        if request.mode != "disaggregated":
            return
        for role in ("prefill", "decode"):
            if all(slot.role != role for slot in usable):
                raise UnavailableError(
                    f"x-baton-mode is disaggregated, and no {role} worker is ready"
                )

    def waiting(self, request: GenerationRequest) -> Waiting:
        """The request's place in the queue; what of it is cached is not known yet."""
        return Waiting(
            request.priority,
            request.request_id,
            request.sampling.n,
            request.tenant,
            self.cost_tokens(request, len(request.prompt)),
        )

    def cost_tokens(self, request: GenerationRequest, uncached_tokens: int) -> float:
        """What a request takes of the fleet: prompt tokens to compute, answer tokens expected."""
        return uncached_tokens + request.sampling.n * self._expected_tokens(request)

    def _expected_tokens(self, request: GenerationRequest) -> int:
        return min(request.sampling.max_tokens, round(self._answer_tokens.value))

    def learn(self, active: ActiveRequest) -> None:
        """An answer is complete: its length is news."""
        if active.request.pooling or active.request.score_only:
            return
        tokens = active.record.completion_tokens / active.request.sampling.n
        self._answer_tokens.add(tokens)

    def eligible(self, request: GenerationRequest, avoid: bytes = b"") -> list[Slot]:
        """Workers that may serve the request; ``avoid`` is an incarnation that just failed."""
        usable = [slot for slot in self._workers.usable if slot.incarnation != avoid]
        if request.pinned is None:
            return usable
        wanted = (request.pinned.prefill, request.pinned.decode)
        return [slot for slot in usable if slot.worker_id in wanted]

    def place(self, active: ActiveRequest, avoid: bytes = b"") -> BatonError | None:
        """Begin an attempt: choose, book, send.

        Returns:
            Why the request cannot be placed, or None.
        """
        request, now_ns = active.request, monotonic_ns()
        usable = self.eligible(request, avoid)
        if not usable:
            return UnavailableError("no worker is ready")
        names = self._names.of(request, usable)
        reusable = [] if request.whole_prompt else names
        found = candidates(
            loads_of(
                usable, reusable, self._prefix_index, self._book, now_ns, request.adapter_digest
            ),
            mode=request.mode,
            prompt_tokens=len(request.prompt),
            expected_tokens=self._expected_tokens(request),
            choices=request.sampling.n,
            moves_kv=request.sampling.max_tokens > 1,
        )
        if not found:
            return UnavailableError(
                f"x-baton-mode {request.mode} cannot be met by the workers that are ready"
            )
        chosen = choose(found, tie_s=self._settings.tie_s, pick=self._random.choice)
        active.candidates = found[:EXPLAINED_CANDIDATES]
        active.chosen, active.placed_ns = chosen, now_ns
        active.decode_id = chosen.decode.worker_id
        active.prefill_id = chosen.prefill.worker_id if chosen.prefill else None
        active.wants_prefill = False
        attempt = active.record.next_attempt()
        where = f"placed on {chosen.computes.worker_id} → {active.decode_id}"
        active.record.note(where, now_ns)
        self._book_load(active, now_ns)
        if not request.probe:
            for incarnation in {chosen.computes.incarnation, chosen.decode.incarnation}:
                self._prefix_index.expect(incarnation, names, now_ns)
        self._observer.placed(active)
        return self._send(active, attempt, now_ns)

    def _book_load(self, active: ActiveRequest, now_ns: int) -> None:
        chosen, n = active.chosen, active.request.sampling.n
        if chosen is None:
            return
        computes, decodes = chosen.computes.worker_id, chosen.decode.worker_id
        tokens = chosen.uncached_tokens
        book = partial(self._book.book, now_ns=now_ns, adapter=active.request.adapter_digest)
        if computes != decodes:
            book(computes, active.id, tokens=tokens, streams=0)
            tokens = 0
        book(decodes, active.id, tokens=tokens, streams=n)

    def _send(self, active: ActiveRequest, attempt: int, now_ns: int) -> BatonError | None:
        request = active.request
        link, prefill = self._workers.link(active.decode_id), self._workers.link(active.prefill_id)
        if link is None:
            return UnavailableError("the worker that was chosen is gone")
        packed = pack_tokens(request.prompt)
        submission = Submission(
            request_id=active.id,
            attempt=attempt,
            ticket=active.record.ticket,
            priority=request.priority,
            prompt_tokens=packed,
            sampling=sampling_to_wire(request.sampling),
            tenant=request.tenant,
            hash_seed=self._names.seed(request, link.capabilities),
            deadline_remaining_ns=max(request.deadline_ns - now_ns, 1),
            prefill=prefill_target(prefill) if prefill is not None else None,
            traceparent=request.traceparent,
            router_id=self._router_id,
            lease_ms=self._settings.lease_ms,
            probe=request.probe,
            adapter=adapter_to_wire(request.adapter),
            pooling=request.pooling,
        )
        link.submit(submission, alone=len(packed) > self._settings.unary_prompt_bytes)
        return None
