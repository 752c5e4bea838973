"""Placements as candidates with all their terms, made when somebody asks: of most nobody does."""

from collections.abc import Mapping, Sequence
from typing import overload

from router.placement.cost import Candidate, WorkerLoad, price
from router.placement.placed import Placed
from router.placement.pricing import Asked
from router.placement.worker_load import Known, Rates


class Described(Sequence[Candidate]):
    """Candidates, the cheapest first.

    Args:
        placed: The placements, and what was known of their workers.
        asked: The prompt that they are for.
        rates: What was expected of workers that have not measured.
        wait_per_s: By role, how many seconds later requests wait for each second computed.
    """

    def __init__(
        self,
        placed: Sequence[Placed],
        asked: Asked,
        rates: Rates,
        wait_per_s: Mapping[str, float],
    ) -> None:
        self._placed = placed
        self._asked = asked
        self._rates = rates
        self._wait_per_s = wait_per_s
        self._made: list[Candidate | None] = [None] * len(placed)

    def __len__(self) -> int:
        return len(self._placed)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        made = self._made[index]
        if made is None:
            made = self._made[index] = self._describe(self._placed[index])
        return made

    def _describe(self, placed: Placed) -> Candidate:
        computes, holds, waits = placed.computes, placed.holds, self._wait_per_s
        alone, asked = computes is holds, self._asked
        gives = (asked.holder_id, asked.held_blocks)

        def load(worker: Known) -> WorkerLoad:
            return worker.load(self._rates, waits[worker.slot.role], holder=gives)

        return price(
            prefill=None if alone else load(computes),
            decode=load(holds),
            prompt_tokens=asked.prompt_tokens,
            expected_tokens=asked.expected_tokens,
            choices=asked.choices,
            moves_kv=asked.moves_kv,
        )
