"""Prefixes that prompts of one engine share, and that one of them computes for the others."""

from bisect import bisect_left
from collections.abc import Iterable

from baton.engine.core.blocks import BlockPool
from baton.engine.core.sequence import TokenSequence

_LEAST_SHARED_BLOCKS = 8  # fewer are computed again: a wait takes at least a step


def shared_blocks(
    sequence: TokenSequence, others: Iterable[TokenSequence], pool: BlockPool
) -> tuple[int, int]:
    """Return how many first blocks of a sequence are cached, and are when others are computed."""
    if not sequence.request.spec.cacheable or sequence.prompt_outputs is not None:
        return 0, 0
    hashes = sequence.full_hashes(len(sequence.tokens) - 1, pool.block_tokens)
    cached = len(pool.match(hashes))
    known = [
        other.full_hashes(len(other.tokens), pool.block_tokens)
        for other in others
        if other.request.spec.cacheable
    ]
    shared = max((_common(hashes, of_other) for of_other in known), default=0)
    return cached, shared if shared >= cached + _LEAST_SHARED_BLOCKS else cached


def _common(hashes: list[bytes], others: list[bytes]) -> int:
    # Equal blocks have equal blocks before them.
    both = range(min(len(hashes), len(others)))
    return bisect_left(both, 1, key=lambda index: hashes[index] != others[index])
