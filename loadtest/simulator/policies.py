"""Routing policies for comparison with the fleet's own (``fleet``).

Each uses the same data: last reports, bookings since, and the prefix index.
"""

import random
from collections.abc import Callable, Sequence

from router.routing.placement.cost import WorkerLoad

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
