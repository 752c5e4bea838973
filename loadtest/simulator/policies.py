"""Routing policies for comparison with the fleet's own (``fleet``).

Each uses the same data: last reports, bookings since, and the prefix index. Placement by a policy
has the bookings and the index of the fleet's own.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.types.errors import UnavailableError
from baton.types.geometry import context_tokens
from loadtest.simulator.records import Record
from router.routing.placement.booked_load import Booking, LoadBook
from router.routing.placement.cost import WorkerLoad
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.prefix_sources import Source
from router.routing.placement.worker_load import Reports, loads_of
from router.routing.workers.slot import WorkerSlot

Policy = Callable[[Sequence[WorkerLoad], int, int, random.Random], WorkerLoad]
"""Maps (workers that compute prompts, prompt tokens, request number, random source) to a worker."""

FLEET = "fleet"


def _plain_cost(
    workers: Sequence[WorkerLoad], prompt_tokens: int, _: int, draw: random.Random
) -> WorkerLoad:
    def tokens(worker: WorkerLoad) -> tuple[int, float]:
        cached = min(worker.cached_blocks * worker.block_tokens, prompt_tokens - 1)
        return worker.queued_tokens + prompt_tokens - cached, draw.random()

    return min(workers, key=tokens)


POLICIES: dict[str, Policy] = {
    "round-robin": lambda workers, _, number, __: workers[number % len(workers)],
    "random": lambda workers, _, __, draw: draw.choice(workers),
    # the fewest queued prompt tokens
    "least-loaded": lambda workers, _, __, draw: min(
        workers, key=lambda worker: (worker.queued_tokens, draw.random())
    ),
    # the first among equals
    "longest-prefix": lambda workers, *_: max(workers, key=lambda worker: worker.cached_blocks),
    # the fewest queued and own uncached tokens to compute
    "cost": _plain_cost,
}


class Chosen(NamedTuple):
    """Workers of a request by id; without ``prefill_id``, decode computes the prompt."""

    prefill_id: str | None
    decode_id: str
    uncached_tokens: int
    prefix: Sequence[Source] = ()


class PolicyPlacement:
    """Chooses the worker that computes by the policy, and decode by the fewest streams."""

    def __init__(
        self, policy: Policy, index: PrefixIndex, book: LoadBook, draw: random.Random
    ) -> None:
        self._policy = policy
        self._index = index
        self._book = book
        self._draw = draw
        self._reports = Reports()

    def place(
        self, record: Record, slots: Sequence[WorkerSlot], number: int, now_ns: int
    ) -> Chosen:
        """Choose among eligible workers, and book the load; ``number`` counts placements.

        Raises:
            UnavailableError: No worker of a role is ready.
        """
        loads = loads_of(
            slots, record.hashes, self._index, self._book, now_ns, reports=self._reports
        )
        decodes = [load for load in loads if load.role == "decode"]
        prefills = [load for load in loads if load.role == "prefill"]
        if not decodes or (record.request.mode == "disaggregated" and not prefills):
            raise UnavailableError("no worker is ready")
        computes = self._policy(prefills or decodes, record.prompt_tokens, number, self._draw)
        cached_tokens = min(
            computes.cached_blocks * computes.block_tokens, record.prompt_tokens - 1
        )
        uncached_tokens = record.prompt_tokens - cached_tokens
        decode = computes
        if prefills:
            decode = min(decodes, key=lambda load: (load.streams, self._draw.random()))
        context = context_tokens(cached_tokens, record.prompt_tokens)
        streams = 0 if prefills else 1
        prompt = Booking(tokens=uncached_tokens, context=context, streams=streams, at_ns=now_ns)
        self._book.book(computes.worker_id, record.id, prompt)
        if prefills:
            stream = Booking(tokens=0, streams=1, at_ns=now_ns)
            self._book.book(decode.worker_id, record.id, stream)
        for incarnation in {computes.incarnation, decode.incarnation}:
            self._index.expect(incarnation, record.hashes, now_ns)
        prefill_id = computes.worker_id if prefills else None
        return Chosen(prefill_id, decode.worker_id, uncached_tokens)
