"""Guesses in the batch: the blocks they may borrow, and which of them turn out to be right."""

from collections.abc import Sequence

from engine.core.blocks import BlockPool
from engine.core.geometry import BLOCK_TOKENS
from engine.core.params import SampledToken, finish_reason
from engine.core.plan import PlanRow
from engine.core.reservations import Reservations
from engine.core.sequence import TokenSequence, blocks_for


def right_guesses(row: PlanRow, drawn: Sequence[SampledToken]) -> int:
    """How many guesses of a row, from the first, are what was drawn in their place."""
    guesses = row.tokens[len(row.tokens) - row.guesses :]
    for count, (guess, sampled) in enumerate(zip(guesses, drawn, strict=False)):
        if guess != sampled.token:
            return count
    return row.guesses


def accepted_run(
    sequence: TokenSequence, row: PlanRow, drawn: list[SampledToken], eos: frozenset[int]
) -> list[SampledToken]:
    """What a speculated row adds to its answer: the same tokens that single steps would have drawn.

    Behind each right guess one more token counts, and nothing behind the token that ends the
    answer. There is always at least one.
    """
    run = drawn[: right_guesses(row, drawn) + 1]
    params, generated = sequence.request.params, sequence.generated
    for count, sampled in enumerate(run, start=1):
        if finish_reason(params, eos, sampled.token, generated + count)[0]:
            return run[:count]
    return run


class SpareBlocks:
    """Lends blocks that nobody needs in this step to guesses, and takes them back after it.

    Guesses therefore preempt nobody, hold nothing between two steps, and never write into a block
    that others share.
    """

    def __init__(self, pool: BlockPool, reservations: Reservations) -> None:
        self._pool = pool
        self._reservations = reservations
        self._borrowers: list[TokenSequence] = []

    def lend(self, sequence: TokenSequence, guesses: int) -> int:
        """Make room for ``guesses`` tokens behind the one to be computed; returns how many fit."""
        first = sequence.computed + 1
        need = blocks_for(first + guesses) - len(sequence.blocks)
        room = max(self._pool.available() - self._reservations.reserved_blocks, 0)
        if need > 0 and room:
            borrowed = self._pool.allocate(min(need, room), sequence.blocks[-1]) or []
            sequence.blocks += borrowed
            self._borrowers.append(sequence)
        end = first + guesses
        for index in range(first // BLOCK_TOKENS, blocks_for(end)):
            if index >= len(sequence.blocks) or self._pool.shared(sequence.blocks[index]):
                end = index * BLOCK_TOKENS
                break
        return max(end - first, 0)

    def take_back(self) -> None:
        """Release what the tokens that were accepted do not fill."""
        for sequence in self._borrowers:
            kept = blocks_for(len(sequence.tokens))
            self._pool.release(sequence.blocks[kept:])
            del sequence.blocks[kept:]
        self._borrowers.clear()
