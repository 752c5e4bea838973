"""Draft tokens in the batch: the blocks they may borrow, and which of them turn out to be right."""

from collections.abc import Sequence

from engine.core.blocks import BlockPool
from engine.core.geometry import BLOCK_TOKENS
from engine.core.params import SampledToken, finish_reason
from engine.core.plan import PlanRow
from engine.core.reservations import Reservations
from engine.core.sequence import TokenSequence, blocks_for


def accepted_draft_tokens(row: PlanRow, drawn: Sequence[SampledToken]) -> int:
    """How many draft tokens of a row, from the first, are what was drawn in their place."""
    draft_tokens = row.tokens[len(row.tokens) - row.num_draft_tokens :]
    for count, (draft_token, sampled) in enumerate(zip(draft_tokens, drawn, strict=False)):
        if draft_token != sampled.token:
            return count
    return row.num_draft_tokens


def accepted_run(
    sequence: TokenSequence, row: PlanRow, drawn: list[SampledToken], eos: frozenset[int]
) -> list[SampledToken]:
    """What a speculated row adds to its answer: the same tokens that single steps would have drawn.

    Behind each right draft token one more token counts, and nothing behind the token that ends the
    answer. There is always at least one.
    """
    run = drawn[: accepted_draft_tokens(row, drawn) + 1]
    params, generated = sequence.request.params, sequence.generated
    for count, sampled in enumerate(run, start=1):
        if finish_reason(params, eos, sampled.token, generated + count)[0]:
            return run[:count]
    return run


class SpareBlocks:
    """Lends blocks that nobody needs in this step to draft tokens, and takes them back after it.

    Draft tokens therefore preempt nobody, hold nothing between two steps, and never write into a block
    that others share.
    """

    def __init__(self, pool: BlockPool, reservations: Reservations) -> None:
        self._pool = pool
        self._reservations = reservations
        self._borrowers: list[TokenSequence] = []

    def lend(self, sequence: TokenSequence, num_draft_tokens: int) -> int:
        """Make room for ``num_draft_tokens`` tokens behind the one to be computed; returns how many fit."""
        first = sequence.computed + 1
        need = blocks_for(first + num_draft_tokens) - len(sequence.blocks)
        room = max(self._pool.available() - self._reservations.reserved_blocks, 0)
        if need > 0 and room:
            borrowed = self._pool.allocate(min(need, room), sequence.blocks[-1]) or []
            sequence.blocks += borrowed
            self._borrowers.append(sequence)
        end = first + num_draft_tokens
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
