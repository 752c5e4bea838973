"""Ways to choose the worker that computes a prompt, to compare with the fleet's own (``fleet``).

Each sees what the fleet's sees: the last reports, what was booked since, and the prefix index.
"""

import random
from collections.abc import Callable, Sequence

from router.routing.placement.cost import WorkerLoad

Policy = Callable[[Sequence[WorkerLoad], int, int, random.Random], WorkerLoad]
"""(workers that compute prompts, prompt tokens, number of the request, draws) to one of them."""

FLEET = "fleet"


def _uncached_tokens(worker: WorkerLoad, prompt_tokens: int) -> int:
    return prompt_tokens - min(worker.cached_blocks * worker.block_tokens, prompt_tokens - 1)


def round_robin(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """One after the other."""
    return workers[number % len(workers)]


def at_random(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """Any."""
    return draw.choice(workers)


def least_loaded(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """The one with the fewest prompt tokens to compute."""
    return min(workers, key=lambda worker: (worker.queued_tokens, draw.random()))


def longest_prefix(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """The one that holds most of the prompt; among equals the first."""
    return max(workers, key=lambda worker: worker.cached_blocks)


def plain_cost(
    workers: Sequence[WorkerLoad], prompt_tokens: int, number: int, draw: random.Random
) -> WorkerLoad:
    """The fewest tokens to compute before the answer begins: those queued, and the prompt's own."""

    def tokens(worker: WorkerLoad) -> tuple[int, float]:
        return worker.queued_tokens + _uncached_tokens(worker, prompt_tokens), draw.random()

    return min(workers, key=tokens)


POLICIES: dict[str, Policy] = {
    "round-robin": round_robin,
    "random": at_random,
    "least-loaded": least_loaded,
    "longest-prefix": longest_prefix,
    "cost": plain_cost,
}
