"""Prefixes that prompts of one engine share, and that one of them computes for the others."""

from bisect import bisect_left
from collections.abc import Iterable

from baton.engine.core.blocks import BlockPool
from baton.engine.core.reservations import Reservation
from baton.engine.core.sequence import TokenSequence

_LEAST_SHARED_BLOCKS = 8  # fewer are computed again: a wait takes at least a step


def awaits_prompt(sequence: TokenSequence, running: list[TokenSequence], pool: BlockPool) -> bool:
    """Return whether a running prompt computes the next blocks that a sequence lacks."""
    if not sequence.request.spec.cacheable or sequence.prompt_outputs is not None:
        return False
    hashes = sequence.full_hashes(len(sequence.tokens) - 1, pool.block_tokens)
    prompts = [other for other in running if not other.decodes]
    if not prompts or len(hashes) < _LEAST_SHARED_BLOCKS:
        return False
    last = len(pool.match(hashes)) + _LEAST_SHARED_BLOCKS - 1
    # Equal blocks have equal blocks before them.
    return last < len(hashes) and any(
        other.request.spec.cacheable
        and other.full_hashes(len(other.tokens), pool.block_tokens)[last : last + 1]
        == [hashes[last]]
        for other in prompts
    )


def blocks_before(
    sequence: TokenSequence, others: Iterable[TokenSequence | Reservation], pool: BlockPool
) -> int:
    """Return how many first blocks of a new sequence are cached, or computed for others first."""
    hashes = sequence.full_hashes(len(sequence.tokens) - 1, pool.block_tokens)
    cached = len(pool.match(hashes))
    before = [
        other.block_hashes
        for other in others
        if isinstance(other, TokenSequence)
        and other.request.spec.cacheable
        and (other.running or other.request.order <= sequence.request.order)
    ]
    awaited = max((_common(hashes, known) for known in before), default=0)
    return awaited if awaited >= cached + _LEAST_SHARED_BLOCKS else cached


def _common(hashes: list[bytes], others: list[bytes]) -> int:
    shared = range(min(len(hashes), len(others)))
    return bisect_left(shared, 1, key=lambda index: hashes[index] != others[index])
