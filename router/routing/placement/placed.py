"""Placements that were priced, made into objects when somebody asks: of most nobody does.

``Placements`` are what the prices say; ``Described`` are candidates with all their terms.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, overload

from router.routing.placement.booked_load import Unreported
from router.routing.placement.cost import Candidate, WorkerLoad, price
from router.routing.placement.pricing import Asked
from router.routing.placement.worker_load import NO_TIERS, Known, Rates, Report
from router.routing.workers.table import Slot

_NOTHING = Unreported()


class Placed(NamedTuple):
    """A placement that was priced; one worker does both where both are the same."""

    computes: Known
    holds: Known
    cost_s: float


class Found(NamedTuple):
    """What was known of one worker when it was priced."""

    slot: Slot
    incarnation: bytes
    report: Report


class Placements(Sequence[Placed]):
    """The cheapest first.

    Args:
        pairs: The numbers of the worker that computes the prompt, and of the one that holds it.
        costs_s: Of each pair.
        workers: By number.
        booked: By number, what its report does not hold yet.
        cached: By number, how many of the prompt's blocks it has.
        tiers: By number, what it has in its pool and below.
    """

    __slots__ = ("_booked", "_cached", "_known", "_pairs", "_tiers", "_workers", "costs_s")

    def __init__(
        self,
        pairs: Sequence[Sequence[int]],
        costs_s: Sequence[float],
        workers: Mapping[int, Found],
        booked: Mapping[int, Unreported],
        cached: Mapping[int, int],
        tiers: Mapping[int, tuple[int, float]],
    ) -> None:
        self.costs_s = costs_s
        self._pairs = pairs
        self._workers = workers
        self._booked = booked
        self._cached = cached
        self._tiers = tiers
        self._known: dict[int, Known] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> Placed: ...
    @overload
    def __getitem__(self, index: slice) -> list[Placed]: ...
    def __getitem__(self, index: int | slice) -> Placed | list[Placed]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        computes, holds = self._pairs[index]
        return Placed(self._of(computes), self._of(holds), self.costs_s[index])

    def _of(self, number: int) -> Known:
        known = self._known.get(number)
        if known is None:
            known = self._known[number] = Known(
                *self._workers[number],
                self._booked.get(number, _NOTHING),
                self._cached.get(number, 0),
                self._tiers.get(number, NO_TIERS),
            )
        return known


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
        computes = placed.computes
        holds = placed.holds
        waits = self._wait_per_s
        alone = computes is holds
        asked = self._asked

        def load(worker: Known) -> WorkerLoad:
            return worker.load(self._rates, waits[worker.slot.role], givers=asked.givers)

        return price(
            prefill=None if alone else load(computes),
            decode=load(holds),
            prompt_tokens=asked.prompt_tokens,
            expected_tokens=asked.expected_tokens,
            choices=asked.choices,
            moves_kv=asked.moves_kv,
        )
