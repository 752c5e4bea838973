"""Lazy views of priced placements; most are never read.

``Placements`` have costs; ``Described`` have candidates with all terms.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, overload

from router.routing.placement.booked_load import Unreported
from router.routing.placement.cost import Candidate, WorkerLoad, price
from router.routing.placement.pricing import Asked
from router.routing.placement.worker_load import NO_TIERS, Known, Rates, ReportedWorker

_NOTHING = Unreported()


class Placed(NamedTuple):
    """A priced placement; one worker does both if both are the same."""

    computes: Known
    holds: Known
    cost_s: float


class Placements(Sequence[Placed]):
    """Priced placements, the cheapest first.

    Args:
        pairs: Numbers of the workers that compute the prompt and hold the request.
        costs_s: Cost of each pair.
        workers: State of each worker, by number.
        booked: Unreported load, by number.
        cached: Number of the prompt's blocks that the worker has, by number.
        tiers: Blocks in the pool and tiers, with the time to bring them back, by number.
    """

    __slots__ = ("_booked", "_cached", "_known", "_pairs", "_tiers", "_workers", "costs_s")

    def __init__(
        self,
        pairs: Sequence[Sequence[int]],
        costs_s: Sequence[float],
        workers: Mapping[int, ReportedWorker],
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
        placed: Placements, with the state of their workers.
        asked: The prompt.
        rates: Expected rates of workers that have not measured.
        wait_per_s: Delay of later requests per second computed, by role.
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
            return worker.load(self._rates, waits[worker.slot.role], sources=asked.sources)

        return price(
            prefill=None if alone else load(computes),
            decode=load(holds),
            prompt_tokens=asked.prompt_tokens,
            expected_tokens=asked.expected_tokens,
            choices=asked.choices,
            moves_kv=asked.moves_kv,
        )
