"""Routing policies for comparison with the fleet's own (``fleet``).

Each uses the same data: last reports, bookings since, and the prefix index.
"""

import random
from collections.abc import Callable, Sequence

from router.routing.placement.cost import WorkerLoad

Policy = Callable[[Sequence[WorkerLoad], int, int, random.Random], WorkerLoad]
"""Maps (workers that compute prompts, prompt tokens, request number, random source) to a worker."""

FLEET = "fleet"


def round_robin(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """Choose workers in turn."""
    return workers[number % len(workers)]


def at_random(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """Choose a worker at random."""
    return draw.choice(workers)


def least_loaded(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """Choose the worker with the fewest queued prompt tokens."""
    return min(workers, key=lambda worker: (worker.queued_tokens, draw.random()))


def longest_prefix(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """Choose the worker with the longest cached prefix; the first among equals."""
    return max(workers, key=lambda worker: worker.cached_blocks)


def plain_cost(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """Choose the worker with the fewest queued and own uncached tokens to compute."""

    def tokens(worker: WorkerLoad) -> tuple[int, float]:
        cached = min(worker.cached_blocks * worker.block_tokens, prompt_tokens - 1)
        return worker.queued_tokens + prompt_tokens - cached, draw.random()

    return min(workers, key=tokens)


POLICIES: dict[str, Policy] = {
    "round-robin": round_robin,
    "random": at_random,
    "least-loaded": least_loaded,
    "longest-prefix": longest_prefix,
    "cost": plain_cost,
}
