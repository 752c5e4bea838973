"""Prices of all workers for one prompt, and of pairs of the best, in C++.

What ``cost.candidates`` finds among all workers, to the same bits: a hundred nanoseconds a worker
instead of ten microseconds. Without a compiler the few workers of the shortlist are priced instead
(``shortlist.py``).

    rows      one for each worker, of what its report says   written when it reports
    booked    what the report does not say yet               written for each prompt, and taken back
    cached    how much of the prompt it holds
"""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.placement.booked_load import Unreported
from router.placement.cost import (
    COMPARED,
    EDGE_OVERHEAD_S,
    EXPOSED_SHARE,
    PAIRED_OF_A_ROLE,
    PREFILL_OVERHEAD_S,
    PULL_OVERHEAD_S,
    STEP_SHARE_PER_STREAM,
)
from router.placement.worker_load import Rates, Report
from router.request import Mode

_COLUMNS = 14
NO_TIERS_AT_ALL: Mapping[int, tuple[int, float]] = {}


class Asked(NamedTuple):
    """What a prompt asks of workers; as in ``cost.candidates``.

    ``holder_id`` is a worker that can give the others ``held_blocks`` of it.
    """

    mode: Mode
    prompt_tokens: int
    expected_tokens: int
    choices: int
    moves_kv: bool
    holder_id: str = ""
    held_blocks: int = 0


class Priced(NamedTuple):
    """A placement, by the numbers of its workers; equal where one does both."""

    computes: int
    holds: int
    cost_s: float


class Pricing:
    """The rows of some workers.

    Args:
        library: From ``router.placement.native.library``.
        workers: How many.
    """

    def __init__(self, library: ctypes.CDLL, workers: int) -> None:
        self._library = library
        self._workers = workers
        self._rows = np.zeros((workers, _COLUMNS))
        self._names = [""] * workers
        self._reports: list[Report | None] = [None] * workers
        self._booked = np.zeros((workers, 3))
        self._cached = np.zeros(workers)
        self._tiers = np.zeros((workers, 2))  # blocks, and the seconds until they are back
        self._asked = np.zeros(12)
        self._pulls = np.zeros(workers)  # measured bytes/s from the holder; 0: as is usual
        self._alone_s = np.zeros(workers)
        self._prompts, self._answers = np.zeros((workers, 2)), np.zeros((workers, 2))
        self._formats: dict[str, int] = {}
        self._chosen, self._costs = np.zeros((COMPARED, 2), np.int32), np.zeros(COMPARED)
        self._halves = np.zeros((0, 2, PAIRED_OF_A_ROLE), np.int32)
        self._rates = np.zeros((0, PAIRED_OF_A_ROLE, PAIRED_OF_A_ROLE))
        self._at = _Addresses.of(self)

    def write(self, index: int, worker_id: str, role: str, report: Report, rates: Rates) -> None:
        """A worker has reported."""
        number = self._formats.setdefault(report.format_id, len(self._formats))
        if number >= len(self._halves):
            self._halves = np.zeros((number + 1, *self._halves.shape[1:]), np.int32)
            self._rates = np.zeros((number + 1, *self._rates.shape[1:]))
            self._at = _Addresses.of(self)
        line, streams = rates.prompt_line(role, report), report.streams
        self._names[index], self._reports[index] = worker_id, report
        self._rows[index] = (
            report.queued_tokens,
            report.queued_context,
            streams,
            streams if report.answering is None else report.answering,
            report.room_blocks,
            report.total_blocks,
            rates.token_s(role, report),
            line.context_s,
            report.decode_step_s or rates.decode_step_s,
            report.block_bytes,
            report.block_tokens,
            number,
            role == "decode",
            rates.edge_bytes_per_s,
        )

    @property
    def queued_tokens(self) -> npt.NDArray[np.float64]:
        """Prompt tokens that wait at each worker, by its report."""
        column: npt.NDArray[np.float64] = self._rows[:, 0]
        return column

    def cheapest(
        self,
        asked: Asked,
        booked: Iterable[tuple[int, Unreported]],
        cached: Iterable[tuple[int, int]],
        crowding: tuple[float, float],
        *,
        tiers: Mapping[int, tuple[int, float]] = NO_TIERS_AT_ALL,
        avoid: int = -1,
        first: int = 0,
    ) -> list[Priced]:
        """The cheapest placements, in their order.

        Args:
            asked: The prompt.
            booked: By worker, what its report does not hold yet.
            cached: By worker, how many of the prompt's blocks it has.
            crowding: Seconds that others wait for each second computed, in prefill and in decode.
            tiers: By worker, how many blocks it has in its pool or below, and how long they take.
            avoid: A worker that is not to be taken; -1: none.
            first: Where to begin to look: of equal workers the first ones are paired.
        """
        self._asked[:] = (
            *(asked.prompt_tokens, asked.expected_tokens, asked.choices, asked.moves_kv),
            *crowding,
            *(PREFILL_OVERHEAD_S, EDGE_OVERHEAD_S, STEP_SHARE_PER_STREAM, EXPOSED_SHARE),
            *(asked.held_blocks, PULL_OVERHEAD_S),
        )
        loads, held = dict(booked), dict(cached)
        touched, keeps = list(loads), list(held)
        if touched:
            self._booked[touched] = list(loads.values())
        if keeps:
            self._cached[keeps] = list(held.values())
        below = list(tiers)
        if below:
            self._tiers[below] = list(tiers.values())
        priced = self._price(asked.mode, avoid, first)
        if asked.held_blocks:  # now with the measured rates of those few that may be the best
            few = {index for one in priced for index in (one.computes, one.holds)}
            few.update(index for index in self._halves.ravel().tolist() if index >= 0)
            for index in few:
                self._pulls[index] = self._edges_to(index, [asked.holder_id])[0]
            if any(self._pulls[list(few)]):
                priced = self._price(asked.mode, avoid, first)
                self._pulls[list(few)] = 0.0
        if touched:
            self._booked[touched] = 0.0
        if keeps:
            self._cached[keeps] = 0.0
        if below:
            self._tiers[below] = 0.0
        return priced

    def _price(self, mode: Mode, avoid: int, first: int) -> list[Priced]:
        at, count, formats = self._at, self._workers, len(self._formats)
        self._library.baton_price_workers(
            *(at.rows, count, at.asked, at.booked, at.cached, at.tiers, at.pulls),
            *(avoid, first, formats),
            *(at.alone_s, at.prompts, at.answers, at.halves),
        )
        pairs = mode != "colocated"
        if pairs:
            self._read_edges()
        found = self._library.baton_price_cheapest(
            *(at.rows, count, at.asked, first, formats, mode != "disaggregated", pairs),
            *(at.alone_s, at.prompts, at.answers, at.halves, at.rates),
            *(COMPARED, at.chosen, at.costs),
        )
        chosen, costs = self._chosen[:found].tolist(), self._costs[:found].tolist()
        return [
            Priced(computes, holds, cost_s)
            for (computes, holds), cost_s in zip(chosen, costs, strict=True)
        ]

    def _read_edges(self) -> None:
        """Measured rates of the few pairs that are priced."""
        for number, (prefills, decodes) in enumerate(self._halves.tolist()):
            names = [self._names[index] for index in prefills]
            columns = [self._edges_to(decode, names) for decode in decodes if decode >= 0]
            if columns:
                self._rates[number, :, : len(columns)] = np.array(columns).T

    def _edges_to(self, worker: int, sources: Sequence[str]) -> list[float]:
        report = self._reports[worker]
        if report is None:
            return [0.0] * len(sources)
        return report.edges_bytes_per_s.rates(sources)


class _Addresses(NamedTuple):
    """Where the arrays lie: to ask numpy takes as long as all of the prices."""

    rows: int
    asked: int
    booked: int
    cached: int
    tiers: int
    pulls: int
    alone_s: int
    prompts: int
    answers: int
    halves: int
    rates: int
    chosen: int
    costs: int

    @classmethod
    def of(cls, pricing: Pricing) -> "_Addresses":
        arrays = vars(pricing)
        return cls(*(arrays[f"_{name}"].ctypes.data for name in cls._fields))
