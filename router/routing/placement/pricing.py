"""Prices of all workers for one prompt, and of pairs of the best, in C++.

The result is that of ``cost.candidates`` for all workers, with the same bits, at a hundred
nanoseconds a worker instead of ten microseconds. Without a compiler only the few workers of the
shortlist are priced (``shortlist.py``).

    rows      figures of each worker's report       written when it reports
    booked    load that the report does not show    written when it changes
    cached    blocks of the prompt that it has      written for each prompt, and reset

Single numbers are read and written through memoryviews: numpy takes as long for one as C++ for a
hundred prices.
"""

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from router.request import Mode
from router.routing.placement.booked_load import Unreported
from router.routing.placement.cost import (
    COMPARED,
    EDGE_OVERHEAD_S,
    EXPOSED_SHARE,
    PAIRED_OF_A_ROLE,
    PREFILL_OVERHEAD_S,
)
from router.routing.placement.edges import ReportedEdges
from router.routing.placement.prefix_sources import MAX_SOURCES, Source
from router.routing.placement.worker_load import ParsedReport, Rates

NO_TIERS_AT_ALL: Mapping[int, tuple[int, float]] = {}


class Asked(NamedTuple):
    """Demand of a prompt, see ``cost.candidates``.

    ``sources`` have leading blocks that other workers can pull, those with most first;
    ``continues`` is true for a later turn of a session.
    """

    mode: Mode
    prompt_tokens: int
    expected_tokens: int
    choices: int
    moves_kv: bool
    sources: tuple[Source, ...] = ()
    continues: bool = False


class PricingRow(ctypes.Structure):
    """Report of one worker: ``BatonRow`` in ``pricing.cpp``."""

    _fields_ = [
        ("queued_tokens", ctypes.c_double),
        ("queued_context", ctypes.c_double),
        ("streams", ctypes.c_double),
        ("answering", ctypes.c_double),
        ("room_blocks", ctypes.c_double),
        ("total_blocks", ctypes.c_double),
        ("token_s", ctypes.c_double),
        ("context_s", ctypes.c_double),
        ("step_s", ctypes.c_double),
        ("block_bytes", ctypes.c_double),
        ("block_tokens", ctypes.c_double),
        ("format", ctypes.c_double),
        ("is_decode", ctypes.c_double),
        ("unmeasured_bytes_per_s", ctypes.c_double),
        ("base_s", ctypes.c_double),
        ("row_s", ctypes.c_double),
        ("row_context_s", ctypes.c_double),
        ("answering_context", ctypes.c_double),
        ("coming_context", ctypes.c_double),
    ]


class Prompt(ctypes.Structure):
    """One prompt, and the constants of ``cost.py``: ``BatonPrompt`` in ``pricing.cpp``."""

    _fields_ = [
        ("prompt_tokens", ctypes.c_double),
        ("expected_tokens", ctypes.c_double),
        ("choices", ctypes.c_double),
        ("moves_kv", ctypes.c_double),
        ("crowding_prefill", ctypes.c_double),
        ("crowding_decode", ctypes.c_double),
        ("prefill_overhead_s", ctypes.c_double),
        ("edge_overhead_s", ctypes.c_double),
        ("exposed_share", ctypes.c_double),
        ("sources", ctypes.c_double),
        ("source_blocks", ctypes.c_double * MAX_SOURCES),
        ("source_overhead_s", ctypes.c_double * MAX_SOURCES),
    ]


class PricingBuffers:
    """Memory that Python and C++ share, by name, with its addresses.

    Addresses are kept, because numpy takes as long for one as C++ for all prices.
    """

    def __init__(self, workers: int) -> None:
        self.rows: Any = (PricingRow * workers)()
        self.prompt = Prompt(
            prefill_overhead_s=PREFILL_OVERHEAD_S,
            edge_overhead_s=EDGE_OVERHEAD_S,
            exposed_share=EXPOSED_SHARE,
        )
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.addresses = {
            "rows": ctypes.addressof(self.rows),
            "prompt": ctypes.addressof(self.prompt),
        }
        self._add("booked", (workers, 4))
        self._add("cached", (workers,))
        self._add("tiers", (workers, 2))  # blocks, and the time to bring them back
        self._add("pulls", (workers, 1 + MAX_SOURCES))  # whether measured, bytes/s per source
        self._add("again", (workers,), np.int32)  # workers that are priced again
        self._add("alone_s", (workers,))
        self._add("prompts", (workers, 2))
        self._add("answers", (workers, 2))
        self._add("chosen", (COMPARED, 2), np.int32)
        self._add("costs_s", (COMPARED,))
        self.make_formats(0)

    def make_formats(self, formats: int) -> None:
        """Replace the buffers that have a part for each KV format."""
        self._add("halves", (formats, 2, PAIRED_OF_A_ROLE), np.int32)
        self._add("rates", (formats, PAIRED_OF_A_ROLE, PAIRED_OF_A_ROLE))

    def cells(self, name: str) -> "memoryview[float]":
        """Return a flat view of an array of floats."""
        return cast("memoryview[float]", self.arrays[name].reshape(-1).data)

    def _add(self, name: str, shape: tuple[int, ...], dtype: type = np.float64) -> None:
        array: npt.NDArray[Any] = np.zeros(shape, dtype)
        self.arrays[name] = array
        self.addresses[name] = array.ctypes.data


class Pricing:
    """Prices of some workers."""

    def __init__(self, library: ctypes.CDLL, workers: int) -> None:
        self._library = library
        self._workers = workers
        self._buffers = buffers = PricingBuffers(workers)
        self._queued_tokens = np.ctypeslib.as_array(buffers.rows)["queued_tokens"]
        self._booked_cells = buffers.cells("booked")
        self._cached_cells = buffers.cells("cached")
        self._pull_cells = buffers.cells("pulls")
        self._rate_cells = buffers.cells("rates")
        self._names = [""] * workers
        self._edges: list[ReportedEdges] = [ReportedEdges.none()] * workers
        self._formats: dict[str, int] = {}
        self._rates_of: list[list[list[int]]] = []  # halves whose rates were read last

    def write(
        self, index: int, worker_id: str, role: str, report: ParsedReport, rates: Rates
    ) -> None:
        """Write the row of a worker that has reported."""
        number = self._formats.setdefault(report.format_id, len(self._formats))
        if number >= len(self._buffers.arrays["halves"]):
            self._buffers.make_formats(number + 1)
            self._rate_cells = self._buffers.cells("rates")
        line = rates.prompt_line(role, report)
        step_s = report.decode_step_s or rates.decode_step_s
        decode_line = report.decode_line.beside(step_s)
        streams = report.streams
        self._names[index] = worker_id
        self._edges[index] = report.edges_bytes_per_s
        self._buffers.rows[index] = PricingRow(
            queued_tokens=report.queued_tokens,
            queued_context=report.queued_context,
            streams=streams,
            answering=streams if report.answering is None else report.answering,
            room_blocks=report.room_blocks,
            total_blocks=report.total_blocks,
            token_s=rates.token_s(role, report),
            context_s=line.context_s,
            step_s=step_s,
            block_bytes=report.block_bytes,
            block_tokens=report.block_tokens,
            format=number,
            is_decode=role == "decode",
            unmeasured_bytes_per_s=rates.edge_bytes_per_s,
            base_s=decode_line.step_s,
            row_s=decode_line.row_s,
            row_context_s=decode_line.context_s,
            answering_context=report.answering_context,
            coming_context=report.coming_context,
        )

    @property
    def waiting_tokens(self) -> npt.NDArray[np.float64]:
        """Prompt tokens that wait at each worker, reported and booked."""
        booked = self._buffers.arrays["booked"][:, 0]
        waiting: npt.NDArray[np.float64] = np.maximum(self._queued_tokens + booked, 0)
        return waiting

    def book(self, index: int, load: Unreported) -> None:
        """Write the load of a worker that its report does not show."""
        cells = self._booked_cells
        at = 4 * index
        cells[at], cells[at + 1], cells[at + 2], cells[at + 3] = load

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
        """Return the cheapest placements, sorted: indices of both workers, and costs.

        Args:
            asked: The prompt.
            cached: Number of the prompt's blocks that a worker has, by index.
            crowding: Delay of others per second computed, in prefill and in decode.
            tiers: Blocks in pool and tiers, and the time to bring them back, by index.
            avoid: Index of a worker to exclude; -1 for none.
            first: Index at which the scan begins: of equal workers the first ones are paired.
        """
        self._write_prompt(asked, crowding)
        cells = self._cached_cells
        for index, blocks in cached:
            cells[index] = blocks
        below = list(tiers)
        if below:
            self._buffers.arrays["tiers"][below] = list(tiers.values())
        priced = self._price(asked.mode, avoid, first)
        if asked.sources and (measured := self._measured_pulls(priced[0], asked)):
            self._buffers.arrays["again"][: len(measured)] = measured
            priced = self._price(asked.mode, avoid, first, len(measured))
            for index in measured:
                self._pull_cells[index * (1 + MAX_SOURCES)] = 0.0
        for index, _ in cached:
            cells[index] = 0.0
        if below:
            self._buffers.arrays["tiers"][below] = 0.0
        return priced

    def _write_prompt(self, asked: Asked, crowding: tuple[float, float]) -> None:
        prompt = self._buffers.prompt
        prompt.prompt_tokens = asked.prompt_tokens
        prompt.expected_tokens = asked.expected_tokens
        prompt.choices = asked.choices
        prompt.moves_kv = asked.moves_kv
        prompt.crowding_prefill, prompt.crowding_decode = crowding
        prompt.sources = len(asked.sources)
        for place, source in enumerate(asked.sources):
            prompt.source_blocks[place] = source.blocks
            prompt.source_overhead_s[place] = source.overhead_s

    def _measured_pulls(self, pairs: list[list[int]], asked: Asked) -> list[int]:
        """Write measured rates from the sources, for the few workers that may be the best."""
        few = {computes for computes, _ in pairs}
        for prefills, decodes in self._buffers.arrays["halves"].tolist():
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
        at = self._buffers.addresses
        arrays = self._buffers.arrays
        count = self._workers
        formats = len(self._formats)
        self._library.baton_price_workers(
            at["rows"],
            count,
            at["prompt"],
            at["booked"],
            at["cached"],
            at["tiers"],
            at["pulls"],
            avoid,
            first,
            formats,
            at["alone_s"],
            at["prompts"],
            at["answers"],
            at["halves"],
            at["again"],
            again,
        )
        pairs = mode != "colocated"
        if pairs and ((halves := arrays["halves"].tolist()) != self._rates_of or not again):
            self._read_edges(halves)
            self._rates_of = halves
        priced = self._library.baton_price_cheapest(
            at["rows"],
            count,
            at["prompt"],
            first,
            formats,
            mode != "disaggregated",
            pairs,
            at["alone_s"],
            at["prompts"],
            at["answers"],
            at["halves"],
            at["rates"],
            COMPARED,
            at["chosen"],
            at["costs_s"],
        )
        return arrays["chosen"][:priced].tolist(), arrays["costs_s"][:priced].tolist()

    def _read_edges(self, halves: list[list[list[int]]]) -> None:
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
