"""The few workers that are worth a price. Sans-IO.

All workers are priced in C++ (``pricing.py``). Without a compiler a prompt costs some operations on
whole columns (``worker_columns.py``), and a price for the few workers that are left.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from router.request import GenerationRequest
from router.routing.placement.block_table import HASH_BYTES
from router.routing.placement.booked_load import LoadBook, Unreported
from router.routing.placement.congestion import Crowding
from router.routing.placement.cost import (
    BRING_OVERHEAD_S,
    PRIOR_TIER_BLOCK_S,
    Candidate,
    WorkerLoad,
    price,
)
from router.routing.placement.prefix_sources import (
    ENGINE_PULL_OVERHEAD_S,
    MAX_SOURCES,
    PULL_OVERHEAD_S,
    Source,
)
from router.routing.placement.pricing import Asked, Pricing
from router.routing.placement.resident_sessions import BEGINS, PromptSession
from router.routing.placement.worker_columns import WorkerColumns, Workers
from router.routing.placement.worker_load import NO_TIERS, Known, Rates, Reports
from router.routing.workers.slot import WorkerSlot

_JITTER_S = 1e-9  # random order of equal workers
_CROWDING_EVERY_NS = 20_000_000

_NOTHING = Unreported()

_Column = npt.NDArray[np.float64]
_Made = TypeVar("_Made")


class Placed(NamedTuple):
    """A priced placement; one worker does both if both are the same."""

    computes: Known
    holds: Known
    cost_s: float


@dataclass(slots=True, eq=False)
class Priced(Sequence[_Made]):
    """Lazy view of priced placements, the cheapest first; most are never read."""

    costs_s: Sequence[float]
    make: Callable[[int], _Made]
    made: dict[int, _Made] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.costs_s)

    @overload
    def __getitem__(self, index: int) -> _Made: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Made]: ...
    def __getitem__(self, index: int | slice) -> _Made | list[_Made]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index not in self.made:
            self.made[index] = self.make(index)
        return self.made[index]


def described(
    placed: Priced[Placed], asked: Asked, rates: Rates, wait_per_s: Mapping[str, float]
) -> Priced[Candidate]:
    """Return the placements with all their terms."""

    def load(worker: Known) -> WorkerLoad:
        return worker.load(rates, wait_per_s[worker.slot.role], sources=asked.sources)

    def describe(index: int) -> Candidate:
        computes, holds, _ = placed[index]
        return price(
            prefill=None if computes is holds else load(computes),
            decode=load(holds),
            prompt_tokens=asked.prompt_tokens,
            expected_tokens=asked.expected_tokens,
            choices=asked.choices,
            moves_kv=asked.moves_kv,
        )

    return Priced(placed.costs_s, describe)


class PromptToPlace(NamedTuple):
    """A request whose workers are chosen.

    Attributes:
        hashes: Packed hashes of the blocks that may come from a cache.
        held: Number of these blocks by incarnation that has them.
        sources: Workers from which leading blocks can be pulled, the longest first.
        avoid: Incarnation that failed the request; empty for none.
        session: The session that it continues or begins.
    """

    request: GenerationRequest
    hashes: bytes
    held: Mapping[bytes, int]
    sources: tuple[Source, ...]
    avoid: bytes
    session: PromptSession = BEGINS

    @property
    def cached_blocks(self) -> int:
        """Number of leading blocks at the worker that has most of them."""
        return max(self.held.values(), default=0)


class Shortlist:
    """Finds the cheapest placements of a prompt, or the workers that may be among them.

    Args:
        native: Whether to price all workers in C++, if that can be compiled.
    """

    def __init__(
        self, reports: Reports, crowding: Crowding, seed: int, *, native: bool = True
    ) -> None:
        self._workers = WorkerColumns(reports, native=native)
        self._crowding = crowding
        self._crowding_ns = -_CROWDING_EVERY_NS
        self._draw = np.random.default_rng(seed)
        self._random = random.Random(seed)
        self._written: tuple[Pricing, LoadBook] | None = None  # rows with the bookings of a book
        self._booked: dict[int, Unreported] = {}  # by index, without zeros

    @property
    def usable(self) -> list[WorkerSlot]:
        """Workers that take new requests, as of the last update."""
        return self._workers.usable

    def update(self, slots: Workers, now_ns: int, news: set[str] | None = None) -> Rates:
        """Read changed reports; see ``WorkerColumns.update``."""
        return self._workers.update(slots, now_ns, news)

    def sources(self, held: Mapping[bytes, int]) -> tuple[Source, ...]:
        """Return the workers with most blocks of a prompt, sorted; draining ones are included.

        ``held`` is the number of leading blocks of each incarnation that has the first one.
        """
        workers = self._workers
        holders = []
        for incarnation, blocks in held.items():
            slot = workers.slot_of.get(incarnation)
            tier = ""
            if slot is None:
                slot, tier = workers.tier_of.get(incarnation, (None, ""))
            if slot is not None:
                holders.append((blocks, held.get(slot.incarnation, 0), slot, tier))
        leading: dict[WorkerSlot, Source] = {}
        for blocks, in_pool, slot, tier in sorted(holders, key=itemgetter(0, 1), reverse=True):
            if slot in leading:
                continue
            # Workers that were usable at the last update are sources, too.
            if slot.incarnation in workers.index_of_incarnation or slot.gives_prefixes:
                overhead_s = _overhead_s(slot) + _bring_s(slot, tier, blocks - in_pool)
                leading[slot] = Source(slot.worker_id, blocks, overhead_s)
                if len(leading) == MAX_SOURCES:
                    break
        return tuple(leading.values())

    def tiers(self, held: Mapping[bytes, int]) -> dict[int, tuple[int, float]]:
        """Return ``Report.tiers`` of each worker that has more of a prompt below its pool.

        ``held`` is the number of leading blocks of each incarnation that has the first one.
        """
        workers = self._workers
        below: dict[int, dict[str, int]] = {}
        for incarnation, blocks in held.items():
            slot, tier = workers.tier_of.get(incarnation, (None, ""))
            if slot is not None and slot.incarnation in workers.index_of_incarnation:
                index = workers.index_of_incarnation[slot.incarnation]
                below.setdefault(index, {})[tier] = blocks
        tiers_of = {}
        for index, tiers in below.items():
            cached_blocks = held.get(workers.usable[index].incarnation, 0)
            tiers_of[index] = workers.reported[index].report.tiers(cached_blocks, tiers)
        return {index: tiers for index, tiers in tiers_of.items() if tiers[0]}

    def cheapest(
        self,
        asked: Asked,
        held: Mapping[bytes, int],
        book: LoadBook,
        now_ns: int,
        *,
        avoid: bytes = b"",
    ) -> Priced[Placed] | None:
        """Return the cheapest of all placements without ``avoid``; None if not all can be priced.

        ``held`` is the number of leading blocks of each incarnation that has the first one.
        """
        workers = self._workers
        pricing = workers.pricing
        if pricing is None or not workers.usable:
            return None
        self._write_bookings(pricing, book)
        cached = {
            index: blocks if asked.sources else self._kept(index, blocks, self._queued(index))
            for incarnation, blocks in held.items()
            if (index := workers.index_of_incarnation.get(incarnation)) is not None
        }
        if now_ns - self._crowding_ns >= _CROWDING_EVERY_NS:
            self._crowding_ns = now_ns
            self._note_crowding(pricing.waiting_tokens, now_ns)
        wait_per_s = partial(self._crowding.wait_per_s, continues=asked.continues)
        tiers = self.tiers(held)
        pairs, costs_s = pricing.cheapest(
            asked,
            cached.items(),
            (wait_per_s("prefill"), wait_per_s("decode")),
            tiers=tiers,
            avoid=workers.index_of_incarnation.get(avoid, -1),
            # numpy takes longer for a random number than for all prices
            first=int(self._random.random() * len(workers.usable)),
        )
        compared = {index: workers.reported[index] for pair in pairs for index in pair}
        all_booked = self._booked
        booked = {index: load for index in compared if (load := all_booked.get(index)) is not None}

        made: dict[int, Known] = {}

        def known(index: int) -> Known:
            if index not in made:
                unreported = booked.get(index, _NOTHING)
                below = tiers.get(index, NO_TIERS)
                made[index] = Known(*compared[index], unreported, cached.get(index, 0), below)
            return made[index]

        def placed(index: int) -> Placed:
            computes, holds = pairs[index]
            return Placed(known(computes), known(holds), costs_s[index])

        return Priced(costs_s, placed)

    def _queued(self, index: int) -> float:
        booked = self._booked.get(index, _NOTHING)
        return self._workers.reported[index].report.queued_tokens + booked.tokens

    def _kept(self, index: int, blocks: int, queued: float) -> int:
        """Return how many of a prompt's cached blocks are there after ``queued`` tokens.

        Other engines evict what waiting prompts need, the oldest blocks first: little by a short
        queue, and all by one that fills a third of the pool, as the next turns need older blocks.
        Blocks that others can pull keep their price as sources.
        """
        report = self._workers.reported[index].report
        if queued <= 0 or not report.evicts_of_queue:
            return blocks
        displaced = queued / report.block_tokens - report.status.kv_blocks.free
        lost = min((3 * max(displaced, 0.0) / max(report.total_blocks, 1)) ** 2, 1.0)
        return round(blocks * (1 - lost))

    def _write_bookings(self, pricing: Pricing, book: LoadBook) -> None:
        """Write bookings that have changed since the last prompt, or all into new rows."""
        changed: Iterable[str] = book.changed()
        if self._written != (pricing, book):
            changed = self._workers.index_of_worker
            self._written = (pricing, book)
            self._booked.clear()
        for worker_id in changed:
            if (index := self._workers.index_of_worker.get(worker_id)) is not None:
                load = self._booked[index] = book.unreported(worker_id)
                pricing.book(index, load)
                if not any(load):
                    del self._booked[index]

    def best(
        self, prompt: PromptToPlace, book: LoadBook, now_ns: int, *, keep: int
    ) -> list[tuple[WorkerSlot, int]]:
        """Return the workers of each role that are fastest, freest, or have most of the prompt.

        They come with their number of the prompt's blocks, the better ones first: ``keep`` of each
        role by the main measure of its work, and half as many by the others.
        """
        prompt_blocks = len(prompt.hashes) // HASH_BYTES
        source_blocks = prompt.sources[0].blocks if prompt.sources else 0
        workers = self._workers
        columns = workers.current()
        queued = columns["queued_tokens"].copy()
        streams = columns["streams"].copy()
        answering = columns["answering"].copy()
        for worker_id, booked in book.booked():
            if (index := workers.index_of_worker.get(worker_id)) is not None:
                queued[index] += booked.tokens
                streams[index] += booked.streams
                answering[index] += booked.streams
        np.maximum(queued, 0, out=queued)
        np.maximum(streams, 0, out=streams)
        np.maximum(answering, 0, out=answering)
        self._note_crowding(queued, now_ns)
        cached = np.zeros(len(queued))
        for incarnation, blocks in prompt.held.items():
            if (index := workers.index_of_incarnation.get(incarnation)) is not None:
                kept_blocks = self._kept(index, blocks, float(queued[index]))
                cached[index] = blocks if prompt.sources else kept_blocks
        jitter_s = self._draw.random(len(queued)) * _JITTER_S
        block_s = columns["block_tokens"] * columns["token_s"] * (1 + answering)
        own_s = (prompt_blocks - cached) * block_s
        for index, (blocks, seconds) in self.tiers(prompt.held).items():
            back_s = seconds + (prompt_blocks - blocks) * block_s[index]
            own_s[index] = min(own_s[index], back_s)
        if source_blocks:
            overhead_s = prompt.sources[0].overhead_s
            pull_s = overhead_s + (source_blocks - cached) * columns["block_pull_s"]
            rest_s = (prompt_blocks - source_blocks) * block_s
            own_s = np.where(cached < source_blocks, np.minimum(own_s, pull_s + rest_s), own_s)
        prompt_s = queued * columns["token_s"] + own_s + jitter_s
        streams += jitter_s
        if (index := self._workers.index_of_incarnation.get(prompt.avoid)) is not None:
            prompt_s[index] = streams[index] = np.inf  # behind all others
        kept: list[int] = []
        for role, members in workers.members.items():
            fast, free = (keep, keep // 2) if role == "prefill" else (keep // 2, keep)
            fastest = _smallest(members, prompt_s, fast)
            freest = _smallest(members, streams, free)
            holders = _smallest(members[cached[members] > 0], -cached, keep // 2)
            kept += dict.fromkeys([*fastest, *freest, *holders])
        return [
            (workers.usable[index], int(cached[index]))
            for index in kept
            if prompt_s[index] < np.inf
        ]

    def _note_crowding(self, queued: _Column, now_ns: int) -> None:
        self._crowding.note(
            {
                role: (int(np.count_nonzero(queued[members])), len(members))
                for role, members in self._workers.members.items()
            },
            now_ns,
        )


def _smallest(members: npt.NDArray[np.intp], column: _Column, keep: int) -> list[int]:
    values = column[members]
    if len(members) > keep:
        few = np.argpartition(values, keep)[:keep]
        members = members[few]
        values = values[few]
    return [int(index) for index in members[np.argsort(values)]]


def _bring_s(slot: WorkerSlot, tier: str, blocks: int) -> float:
    """Return the time in which a worker brings blocks back from a tier, to give them away."""
    if not blocks:
        return 0.0
    status = slot.link.status if slot.link is not None else None
    measured = {one.name: one.block_s for one in status.kv_tiers} if status is not None else {}
    return BRING_OVERHEAD_S + blocks * (measured.get(tier) or PRIOR_TIER_BLOCK_S[tier])


def _overhead_s(slot: WorkerSlot) -> float:
    """Return the time until the first byte of a pull from a worker."""
    has_engine = slot.link is not None and slot.link.capabilities.hand_off
    return ENGINE_PULL_OVERHEAD_S if has_engine else PULL_OVERHEAD_S
