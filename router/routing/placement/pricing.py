"""Prices of all workers for one prompt, and of pairs of the best, in C++.

What ``cost.candidates`` finds among all workers, to the same bits: a hundred nanoseconds a worker
instead of ten microseconds. Without a compiler the few workers of the shortlist are priced instead
(``shortlist.py``).

    rows      one for each worker, of what its report says   written when it reports
    booked    what the report does not say yet               written when that changes
    cached    how much of the prompt it holds                written for each prompt, and taken back

Single numbers go in and out through memoryviews: numpy takes as long for one as C++ for a hundred
prices.
"""

import ctypes
from collections.abc import Iterable, Mapping
from struct import Struct
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from router.request import Mode
from router.routing.placement.booked_load import Unreported
from router.routing.placement.chain import MAX_SOURCES, PULL_OVERHEAD_S, Source
from router.routing.placement.cost import (
    COMPARED,
    EDGE_OVERHEAD_S,
    EXPOSED_SHARE,
    PAIRED_OF_A_ROLE,
    PREFILL_OVERHEAD_S,
    STEP_SHARE_PER_STREAM,
)
from router.routing.placement.edges import ReportedEdges
from router.routing.placement.worker_load import Rates, Report

_ROW = Struct("14d")
_ASKED = Struct(f"{12 + MAX_SOURCES}d")
_NOBODY = (0,) * MAX_SOURCES
NO_TIERS_AT_ALL: Mapping[int, tuple[int, float]] = {}


class Asked(NamedTuple):
    """What a prompt asks of workers; as in ``cost.candidates``.

    ``sources`` can give the others leading blocks of it, those with most first.
    """

    mode: Mode
    prompt_tokens: int
    expected_tokens: int
    choices: int
    moves_kv: bool
    sources: tuple[Source, ...] = ()


class Pricing:
    """The rows of some workers.

    Args:
        library: From ``router.routing.placement.native.library``.
        workers: How many.
    """

    def __init__(self, library: ctypes.CDLL, workers: int) -> None:
        self._library = library
        self._workers = workers
        self._rows = np.zeros((workers, _ROW.size // 8))
        self._row_bytes = self._rows.reshape(-1).data.cast("B")
        self._names = [""] * workers
        self._edges: list[ReportedEdges] = [ReportedEdges.none()] * workers
        self._booked = np.zeros((workers, 3))
        self._cached = np.zeros(workers)
        self._book_cells = _cells(self._booked)
        self._cached_cells = _cells(self._cached)
        self._asked = bytearray(_ASKED.size)
        self._tiers = np.zeros((workers, 2))  # blocks, and the seconds until they are back
        # Bytes/s from each source, behind whether any was measured.
        self._pulls = np.zeros((workers, 1 + MAX_SOURCES))
        self._pull_cells = _cells(self._pulls)
        self._again = np.zeros(workers, np.int32)  # of which those are known
        self._alone_s = np.zeros(workers)
        self._prompts = np.zeros((workers, 2))
        self._answers = np.zeros((workers, 2))
        self._formats: dict[str, int] = {}
        self._chosen = np.zeros((COMPARED, 2), np.int32)
        self._costs = np.zeros(COMPARED)
        self._halves = np.zeros((0, 2, PAIRED_OF_A_ROLE), np.int32)
        self._rates = np.zeros((0, PAIRED_OF_A_ROLE, PAIRED_OF_A_ROLE))
        self._rate_cells = _cells(self._rates)
        self._read_of: list[list[list[int]]] = []  # halves whose rates these are
        self._at = _Addresses.of(self)

    def write(self, index: int, worker_id: str, role: str, report: Report, rates: Rates) -> None:
        """A worker has reported."""
        number = self._formats.setdefault(report.format_id, len(self._formats))
        if number >= len(self._halves):
            self._halves = np.zeros((number + 1, *self._halves.shape[1:]), np.int32)
            self._rates = np.zeros((number + 1, *self._rates.shape[1:]))
            self._rate_cells = _cells(self._rates)
            self._at = _Addresses.of(self)
        line = rates.prompt_line(role, report)
        streams = report.streams
        self._names[index] = worker_id
        self._edges[index] = report.edges_bytes_per_s
        _ROW.pack_into(
            self._row_bytes,
            _ROW.size * index,
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
    def waiting_tokens(self) -> npt.NDArray[np.float64]:
        """Prompt tokens that wait at each worker, by its report and by what is booked."""
        waiting: npt.NDArray[np.float64] = self._rows[:, 0] + self._booked[:, 0]
        return waiting

    def book(self, index: int, load: Unreported) -> None:
        """What a worker's report does not hold yet is this from now on."""
        cells = self._book_cells
        at = 3 * index
        cells[at], cells[at + 1], cells[at + 2] = load

    def cheapest(
        self,
        asked: Asked,
        cached: Iterable[tuple[int, int]],
        crowding: tuple[float, float],
        *,
        tiers: Mapping[int, tuple[int, float]] = NO_TIERS_AT_ALL,
        avoid: int = -1,
        first: int = 0,
    ) -> tuple[list[list[int]], list[float]]:
        """The cheapest placements, in their order: who computes and who holds, and what it costs.

        Args:
            asked: The prompt.
            cached: By worker, how many of the prompt's blocks it has.
            crowding: Seconds that others wait for each second computed, in prefill and in decode.
            tiers: By worker, how many blocks it has in its pool or below, and how long they take.
            avoid: A worker that is not to be taken; -1: none.
            first: Where to begin to look: of equal workers the first ones are paired.
        """
        source_blocks = (*(source.blocks for source in asked.sources), *_NOBODY)[:MAX_SOURCES]
        _ASKED.pack_into(
            self._asked,
            0,
            asked.prompt_tokens,
            asked.expected_tokens,
            asked.choices,
            asked.moves_kv,
            *crowding,
            PREFILL_OVERHEAD_S,
            EDGE_OVERHEAD_S,
            STEP_SHARE_PER_STREAM,
            EXPOSED_SHARE,
            PULL_OVERHEAD_S,
            len(asked.sources),
            *source_blocks,
        )
        cells = self._cached_cells
        for index, blocks in cached:
            cells[index] = blocks
        below = list(tiers)
        if below:
            self._tiers[below] = list(tiers.values())
        priced = self._price(asked.mode, avoid, first)
        if asked.sources and (measured := self._measured_pulls(priced[0], asked)):
            self._again[: len(measured)] = measured
            priced = self._price(asked.mode, avoid, first, len(measured))
            for index in measured:
                self._pull_cells[index * (1 + MAX_SOURCES)] = 0.0
        for index, _ in cached:
            cells[index] = 0.0
        if below:
            self._tiers[below] = 0.0
        return priced

    def _measured_pulls(self, pairs: list[list[int]], asked: Asked) -> list[int]:
        """Note measured rates from the sources, for those few that may be the best.

        Returns:
            For which there are any.
        """
        few = {computes for computes, _ in pairs}
        for prefills, decodes in self._halves.tolist():
            few.update(prefills if asked.mode == "disaggregated" else prefills + decodes)
        few.discard(-1)
        most = asked.sources[0].blocks
        held = self._cached_cells
        cells = self._pull_cells
        sources = [source.worker_id for source in asked.sources]
        measured = []
        for index in few:
            if held[index] < most and any(rates := self._edges[index].rates(sources)):
                at = index * (1 + MAX_SOURCES)
                cells[at] = 1.0
                for place, rate in enumerate(rates, start=at + 1):
                    cells[place] = rate
                measured.append(index)
        return measured

    def _price(
        self, mode: Mode, avoid: int, first: int, again: int = 0
    ) -> tuple[list[list[int]], list[float]]:
        at = self._at
        count = self._workers
        formats = len(self._formats)
        self._library.baton_price_workers(
            at.rows,
            count,
            at.asked,
            at.booked,
            at.cached,
            at.tiers,
            at.pulls,
            avoid,
            first,
            formats,
            at.alone_s,
            at.prompts,
            at.answers,
            at.halves,
            at.again,
            again,
        )
        pairs = mode != "colocated"
        if pairs and ((halves := self._halves.tolist()) != self._read_of or not again):
            self._read_edges(halves)
            self._read_of = halves
        found = self._library.baton_price_cheapest(
            at.rows,
            count,
            at.asked,
            first,
            formats,
            mode != "disaggregated",
            pairs,
            at.alone_s,
            at.prompts,
            at.answers,
            at.halves,
            at.rates,
            COMPARED,
            at.chosen,
            at.costs,
        )
        return self._chosen[:found].tolist(), self._costs[:found].tolist()

    def _read_edges(self, halves: list[list[list[int]]]) -> None:
        """Measured rates of the few pairs that are priced."""
        names = self._names
        cells = self._rate_cells
        for number, (prefills, decodes) in enumerate(halves):
            of_prefills = [names[index] for index in prefills if index >= 0]
            for place, decode in enumerate(decodes):
                if decode < 0 or not of_prefills:
                    break
                at = number * PAIRED_OF_A_ROLE * PAIRED_OF_A_ROLE + place
                for rate in self._edges[decode].rates(of_prefills):
                    cells[at] = rate
                    at += PAIRED_OF_A_ROLE


def _cells(array: npt.NDArray[np.float64]) -> "memoryview[float]":
    """Its numbers in a row, one by one."""
    return cast("memoryview[float]", array.reshape(-1).data)


class _Addresses(NamedTuple):
    """Where the arrays lie: to ask numpy takes as long as all of the prices."""

    rows: int
    asked: int
    booked: int
    cached: int
    tiers: int
    pulls: int
    again: int
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
        return cls(*(_address_of(arrays[f"_{name}"]) for name in cls._fields))


def _address_of(array: npt.NDArray[np.generic] | bytearray) -> int:
    if isinstance(array, bytearray):
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return int(array.ctypes.data)
