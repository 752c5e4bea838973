"""Draft tokens in the batch: the blocks they may borrow, and which of them turn out to be right."""

from collections.abc import Sequence

from baton.engine.core.blocks import BlockPool
from baton.engine.core.plan import PlanRow
from baton.engine.core.reservations import Reservations
from baton.engine.core.sequence import TokenSequence
from baton.types.params import SampledToken, finish_reason


def accepted_draft_tokens(row: PlanRow, sampled: Sequence[SampledToken]) -> int:
    """How many draft tokens of a row, from the first, are what was sampled in their place."""
    draft_tokens = row.tokens[len(row.tokens) - row.num_draft_tokens :]
    for count, (draft_token, actual) in enumerate(zip(draft_tokens, sampled, strict=False)):
        if draft_token != actual.token:
            return count
    return row.num_draft_tokens


def accepted_run(
    sequence: TokenSequence, row: PlanRow, sampled: list[SampledToken], eos: frozenset[int]
) -> list[SampledToken]:
    """What a row with draft tokens adds to its answer: the tokens that single steps would sample.

    Behind each right draft token one more token counts, and nothing behind the token that ends the
    answer. There is always at least one.
    """
    run = sampled[: accepted_draft_tokens(row, sampled) + 1]
    params = sequence.request.spec.params
    generated = sequence.generated
    for count, last in enumerate(run, start=1):
        if finish_reason(params, eos, last.token, generated + count)[0]:
            return run[:count]
    return run


class SpareBlocks:
    """Lends blocks that nobody needs in this step to draft tokens, and takes them back after it.

    Draft tokens therefore preempt nobody, hold nothing between two steps, and never write into a
    block that others share.
    """

    def __init__(self, pool: BlockPool, reservations: Reservations) -> None:
        self._pool = pool
        self._reservations = reservations
        self._borrowers: list[TokenSequence] = []

    def lend(self, sequence: TokenSequence, num_draft_tokens: int) -> int:
        """Make room behind the token to be computed; returns how many draft tokens fit."""
        first = sequence.computed + 1
        block_tokens = self._pool.block_tokens
        need = self._pool.blocks_for(first + num_draft_tokens) - len(sequence.blocks)
        room = max(self._pool.available() - self._reservations.reserved_blocks, 0)
        if need > 0 and room:
            borrowed = self._pool.allocate(min(need, room), sequence.blocks[-1]) or []
            sequence.blocks += borrowed
            self._borrowers.append(sequence)
        end = first + num_draft_tokens
        for index in range(first // block_tokens, self._pool.blocks_for(end)):
            if index >= len(sequence.blocks) or self._pool.shared(sequence.blocks[index]):
                end = index * block_tokens
                break
        return max(end - first, 0)

    def take_back(self) -> None:
        """Release what the tokens that were accepted do not fill."""
        for sequence in self._borrowers:
            kept = self._pool.blocks_for(len(sequence.tokens))
            self._pool.release(sequence.blocks[kept:])
            del sequence.blocks[kept:]
        self._borrowers.clear()
