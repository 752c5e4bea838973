"""Draft tokens in a batch: the blocks they borrow, and which of them are accepted."""

from collections.abc import Sequence

from baton.engine.core.blocks import BlockPool
from baton.engine.core.plan import PlanRow
from baton.engine.core.reservations import Reservations
from baton.engine.core.sequence import TokenSequence
from baton.types.params import SampledToken, finish_reason


def accepted_draft_tokens(row: PlanRow, sampled: Sequence[SampledToken]) -> int:
    """Return how many leading draft tokens equal the tokens sampled in their place."""
    draft_tokens = row.tokens[len(row.tokens) - row.num_draft_tokens :]
    for count, (draft_token, actual) in enumerate(zip(draft_tokens, sampled, strict=False)):
        if draft_token != actual.token:
            return count
    return row.num_draft_tokens


def accepted_run(
    sequence: TokenSequence, row: PlanRow, sampled: list[SampledToken], eos: frozenset[int]
) -> list[SampledToken]:
    """Return the tokens that a row with draft tokens adds: those that single steps would sample.

    Each right draft token allows one more token; nothing follows a token that ends the response.
    The result has at least one token.
    """
    run = sampled[: accepted_draft_tokens(row, sampled) + 1]
    params = sequence.request.spec.params
    generated = sequence.generated
    for count, last in enumerate(run, start=1):
        if finish_reason(params, eos, last.token, generated + count)[0]:
            return run[:count]
    return run


class SpareBlocks:
    """Lends unused blocks to draft tokens for one step.

    Draft tokens therefore cause no preemption, hold no blocks between steps, and never write to a
    shared block.
    """

    def __init__(self, pool: BlockPool, reservations: Reservations) -> None:
        self._pool = pool
        self._reservations = reservations
        self._borrowers: list[TokenSequence] = []

    def lend(self, sequence: TokenSequence, num_draft_tokens: int) -> int:
        """Make room behind the token to compute; return the number of draft tokens that fit."""
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
        """Release borrowed blocks that accepted tokens do not fill."""
        for sequence in self._borrowers:
            kept = self._pool.blocks_for(len(sequence.tokens))
            self._pool.release(sequence.blocks[kept:])
            del sequence.blocks[kept:]
        self._borrowers.clear()
