"""Of all workers, the few that are worth a price. Sans-IO.

To look at a thousand workers one by one takes longer than all the rest of a placement. So what
their reports say stands in columns, and is written anew where something has changed. All of them
are priced in C++ (``pricing.py``). Without that a prompt costs some operations on whole columns,
and a price for the few workers that are left.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.registry.types import TIERS, tier_incarnation
from router.request import GenerationRequest
from router.routing.placement.booked_load import LoadBook, Unreported
from router.routing.placement.chain import MAX_SOURCES, PULL_OVERHEAD_S, Source
from router.routing.placement.crowding import Crowding
from router.routing.placement.native.library import load
from router.routing.placement.placed import Found, Placements
from router.routing.placement.pricing import Asked, Pricing
from router.routing.placement.worker_load import Rates, Report, Reports
from router.routing.workers.table import Slot

_JITTER_S = 1e-9  # among equals, not always the same are looked at
_CROWDING_EVERY_NS = 20_000_000

_Column = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.intp]


class Slots(Protocol):
    """The workers; ``router.routing.workers.table.WorkerTable`` is it."""

    def __iter__(self) -> Iterator[Slot]:
        """All."""

    def get(self, worker_id: str) -> Slot | None:
        """The one of that name."""


class Shortlist:
    """The columns, of usable workers only.

    Args:
        reports: The last of each worker.
        crowding: Learns how busy the fleet is.
        seed: Of the draws among equals.
        native: Whether to price all workers, where that can be compiled.
    """

    def __init__(
        self, reports: Reports, crowding: Crowding, seed: int, *, native: bool = True
    ) -> None:
        self._native = native
        self.pricing: Pricing | None = None
        self._crowding_ns = -_CROWDING_EVERY_NS
        self._reports = reports
        self._crowding = crowding
        self._draw = np.random.default_rng(seed)
        self._random = random.Random(seed)
        self._booked_of: LoadBook | None = None  # whose bookings stand in the rows
        self._booked: dict[int, Unreported] = {}  # those that are not nothing
        self._seen: list[Slot] = []  # all slots, usable or not
        self._marks: list[tuple[object, ...]] = []  # what was seen of each
        self._place_of: dict[str, int] = {}  # in these lists
        self._index_of: list[int] = []  # its index below; -1: not usable
        self._slots: list[Slot] = []  # usable ones
        self._usable: list[tuple[Slot, Report]] = []
        self._index_of_worker: dict[str, int] = {}
        self._index_of_incarnation: dict[bytes, int] = {}
        self._slot_of_incarnation: dict[bytes, Slot] = {}  # usable or not
        self._found: list[Found] = []  # what is known of usable ones
        self._tier_of_incarnation: dict[bytes, tuple[Slot, str]] = {}  # by its tiers' names
        self._of_role: dict[str, _Indices] = {}
        self._rates = Rates()
        self._not_in_columns: set[int] = set()  # written when the columns are read
        self._queued_tokens: _Column = np.zeros(0)
        self._streams: _Column = np.zeros(0)
        self._answering: _Column = np.zeros(0)  # streams that stand still while it computes
        self._token_s: _Column = np.zeros(0)
        self._block_tokens: _Column = np.zeros(0)
        self._block_pull_s: _Column = np.zeros(0)  # for a block that another worker holds

    # ---------------------------------------------------------------- columns

    @property
    def usable(self) -> list[Slot]:
        """The workers that take new requests, as of the last look."""
        return self._slots

    def update(self, slots: Slots, now_ns: int, news: set[str] | None = None) -> Rates:
        """Look at what workers have said since the last time.

        Args:
            slots: All of them, usable or not.
            now_ns: Monotonic clock.
            news: The workers of which anything changed, which is emptied; None: each is looked at.

        Returns:
            What is expected of workers that have not measured themselves.
        """
        changed = self._changed_of(slots, news) if news is not None else None
        anew = False
        if changed is None:
            changed, fewer = self._look_at_all(slots)
            anew = fewer
        if anew or any(map(self._came_or_went, changed)):
            self._begin_anew()
            changed = []
            anew = True
        for place in changed:
            if (index := self._index_of[place]) >= 0:
                self._read(index)
        rates = self._reports.expected(self._usable, now_ns, changed=bool(changed) or anew)
        if rates is not self._rates and not rates.is_like(self._rates):
            self._rates = rates  # a row for each worker is written anew: not for nothing
            changed = list(range(len(self._seen)))
        for place in changed:
            if (index := self._index_of[place]) >= 0:
                self._write(index)
        return self._rates

    def _write(self, index: int) -> None:
        if self.pricing is None:
            self._write_columns(index)
            return
        slot, report = self._usable[index]
        self.pricing.write(index, slot.worker_id, slot.role, report, self._rates)
        self._not_in_columns.add(index)

    def _changed_of(self, slots: Slots, news: set[str]) -> list[int] | None:
        """The places of what changed; None where one came or went."""
        changed = []
        while news:
            worker_id = news.pop()
            place = self._place_of.get(worker_id)
            slot = slots.get(worker_id)
            if place is None or slot is None or slot is not self._seen[place]:
                news.clear()
                return None
            self._marks[place] = _mark(slot)
            changed.append(place)
        return changed

    def _look_at_all(self, slots: Slots) -> tuple[list[int], bool]:
        """The places of what changed, and whether there are fewer than before."""
        seen = self._seen
        marks = self._marks
        changed = []
        count = -1
        for count, slot in enumerate(slots):
            mark = _mark(slot)
            if count == len(marks):
                seen.append(slot)
                marks.append(mark)
                changed.append(count)
            elif marks[count] != mark:
                seen[count] = slot
                marks[count] = mark
                changed.append(count)
        fewer = len(marks) > count + 1
        del seen[count + 1 :], marks[count + 1 :]
        if fewer or changed:
            self._place_of = {slot.worker_id: place for place, slot in enumerate(seen)}
        return changed, fewer

    def _came_or_went(self, place: int) -> bool:
        if place >= len(self._index_of):
            return True
        index = self._index_of[place]
        slot = self._seen[place]
        if index < 0 or not slot.usable:
            return (index >= 0) != slot.usable
        known = self._index_of_incarnation.get(slot.incarnation) == index
        return self._usable[index][0] is not slot or not known

    def _begin_anew(self) -> None:
        usable = [slot.usable for slot in self._seen]
        self._index_of = [
            index - 1 if is_usable else -1
            for index, is_usable in zip(np.cumsum(usable), usable, strict=True)
        ]
        slots = [slot for slot, is_usable in zip(self._seen, usable, strict=True) if is_usable]
        self._slots = slots
        self._usable = [(slot, self._reports.of(slot)) for slot in slots]
        self._index_of_worker = {slot.worker_id: index for index, slot in enumerate(slots)}
        self._index_of_incarnation = {slot.incarnation: index for index, slot in enumerate(slots)}
        self._slot_of_incarnation = {slot.incarnation: slot for slot in self._seen}
        self._found = [Found(slot, slot.incarnation, report) for slot, report in self._usable]
        self._booked_of = None
        self._tier_of_incarnation = {
            tier_incarnation(slot.incarnation, tier): (slot, tier)
            for slot in self._seen
            for tier in TIERS
        }
        roles = np.array([slot.role for slot in slots])
        self._of_role = {role: np.flatnonzero(roles == role) for role in sorted(set(roles))}
        self._not_in_columns.clear()
        columns = np.zeros((6, len(slots)))
        self._queued_tokens, self._streams, self._answering = columns[:3]
        self._token_s, self._block_tokens, self._block_pull_s = columns[3:]
        library = load() if self._native else None
        self.pricing = Pricing(library, len(slots)) if library is not None else None
        for index in range(len(slots)):
            self._write(index)

    def _read(self, index: int) -> None:
        slot, _ = self._usable[index]
        report = self._reports.of(slot)
        self._usable[index] = slot, report
        self._found[index] = Found(slot, self._found[index].incarnation, report)

    def _write_columns(self, index: int) -> None:
        slot, report = self._usable[index]
        self._queued_tokens[index] = report.queued_tokens
        self._streams[index] = report.streams
        answering = report.answering
        self._answering[index] = report.streams if answering is None else answering
        self._block_tokens[index] = report.block_tokens
        self._token_s[index] = self._rates.token_s(slot.role, report)
        self._block_pull_s[index] = report.block_bytes / self._rates.edge_bytes_per_s

    # ---------------------------------------------------------------- a prompt

    def sources(self, held: Mapping[bytes, int]) -> tuple[Source, ...]:
        """Who can give others most of a prompt, the first most of all; one that drains can too.

        ``held`` is how many blocks of it each incarnation has that has the first.
        """
        usable = self._index_of_incarnation  # by what was seen last: those give, too
        found: dict[Slot, int] = {}
        for incarnation, blocks in sorted(held.items(), key=itemgetter(1), reverse=True):
            slot = self._slot_of_incarnation.get(incarnation)
            if slot is None:
                slot, tier = self._tier_of_incarnation.get(incarnation, (None, ""))
                slot = slot if tier == TIERS[0] else None  # a disk takes as long as computing
            if slot is None or slot in found:
                continue
            if slot.incarnation in usable or slot.gives_prefixes:
                found[slot] = blocks
                if len(found) == MAX_SOURCES:
                    break
        return tuple(Source(slot.worker_id, blocks) for slot, blocks in found.items())

    def tiers(self, held: Mapping[bytes, int]) -> dict[int, tuple[int, float]]:
        """Of workers that have more of a prompt below their pools: see ``Report.tiers``.

        Args:
            held: As in ``sources``.
        """
        below: dict[int, dict[str, int]] = {}
        for incarnation, blocks in held.items():
            slot, tier = self._tier_of_incarnation.get(incarnation, (None, ""))
            if slot is not None and slot.incarnation in self._index_of_incarnation:
                index = self._index_of_incarnation[slot.incarnation]
                below.setdefault(index, {})[tier] = blocks
        found = {
            index: self._usable[index][1].tiers(held.get(self._slots[index].incarnation, 0), tiers)
            for index, tiers in below.items()
        }
        return {index: tiers for index, tiers in found.items() if tiers[0]}

    def cheapest(
        self,
        asked: Asked,
        held: Mapping[bytes, int],
        book: LoadBook,
        now_ns: int,
        *,
        avoid: bytes = b"",
    ) -> Placements | None:
        """The cheapest placements of all that there are; None where all cannot be priced.

        Args:
            asked: The prompt.
            held: How many of its blocks each incarnation has that has the first.
            book: Load that reports do not show yet.
            now_ns: Monotonic clock.
            avoid: An incarnation that is not to be taken.
        """
        if self.pricing is None or not self._usable:
            return None
        pricing = self.pricing
        of_incarnation = self._index_of_incarnation
        self._take_bookings(pricing, book)
        cached = {
            index: blocks
            for incarnation, blocks in held.items()
            if (index := of_incarnation.get(incarnation)) is not None
        }
        if now_ns - self._crowding_ns >= _CROWDING_EVERY_NS:
            self._crowding_ns = now_ns
            self._note_crowding(pricing.waiting_tokens, now_ns)
        wait_per_s = self._crowding.wait_per_s
        tiers = self.tiers(held)
        pairs, costs_s = pricing.cheapest(
            asked,
            cached.items(),
            (wait_per_s("prefill"), wait_per_s("decode")),
            tiers=tiers,
            avoid=of_incarnation.get(avoid, -1),
            first=self._first(),
        )
        all_found = self._found
        all_booked = self._booked
        found = {index: all_found[index] for pair in pairs for index in pair}
        booked = {index: load for index in found if (load := all_booked.get(index)) is not None}
        return Placements(pairs, costs_s, found, booked, cached, tiers)

    def _take_bookings(self, pricing: Pricing, book: LoadBook) -> None:
        """Write those that have changed since the last prompt; all, where the rows are new."""
        changed: Iterable[str] = book.changed()
        if self._booked_of is not book:
            changed = self._index_of_worker
            self._booked_of = book
            self._booked.clear()
        for worker_id in changed:
            if (index := self._index_of_worker.get(worker_id)) is not None:
                load = self._booked[index] = book.unreported(worker_id)
                pricing.book(index, load)
                if not any(load):
                    del self._booked[index]

    def _first(self) -> int:
        """Where to begin: numpy's draws of one number take longer than all the prices."""
        return int(self._random.random() * len(self._usable))

    def best(
        self,
        request: GenerationRequest,
        prompt_blocks: int,
        held: Mapping[bytes, int],
        book: LoadBook,
        now_ns: int,
        *,
        keep: int,
        source_blocks: int = 0,
        avoid: bytes = b"",
    ) -> list[tuple[Slot, int]]:
        """Of each role the soonest with the prompt, the freest, and those that hold most of it.

        Args:
            request: What is to run.
            prompt_blocks: Full blocks of its prompt.
            held: How many of them each incarnation has that has the first.
            book: Load that reports do not show yet.
            now_ns: Monotonic clock.
            keep: So many of each role by the measure that its work is about, and half as many by
                the others.
            source_blocks: So many can be had from another worker.
            avoid: An incarnation that is not to be taken.

        Returns:
            Workers, and how many of the prompt's blocks they have; the better ones first.
        """
        while self._not_in_columns:
            self._write_columns(self._not_in_columns.pop())
        queued = self._queued_tokens.copy()
        streams = self._streams.copy()
        answering = self._answering.copy()
        for worker_id, booked in book.booked():
            if (index := self._index_of_worker.get(worker_id)) is not None:
                queued[index] += booked.tokens
                streams[index] += booked.streams
                answering[index] += booked.streams
        np.maximum(streams, 0, out=streams)
        np.maximum(answering, 0, out=answering)
        self._note_crowding(queued, now_ns)
        cached = np.zeros(len(queued))
        for incarnation, blocks in held.items():
            if (index := self._index_of_incarnation.get(incarnation)) is not None:
                cached[index] = blocks
        jitter_s = self._draw.random(len(queued)) * _JITTER_S
        block_s = self._block_tokens * self._token_s * (1 + answering)
        own_s = (prompt_blocks - cached) * block_s
        for index, (blocks, seconds) in self.tiers(held).items():
            back_s = seconds + (prompt_blocks - blocks) * block_s[index]
            own_s[index] = min(own_s[index], back_s)
        if source_blocks:
            pull_s = PULL_OVERHEAD_S + (source_blocks - cached) * self._block_pull_s
            rest_s = (prompt_blocks - source_blocks) * block_s
            own_s = np.where(cached < source_blocks, np.minimum(own_s, pull_s + rest_s), own_s)
        prompt_s = queued * self._token_s + own_s + jitter_s
        streams += jitter_s
        self._leave_out(request, avoid, prompt_s, streams)
        kept: list[int] = []
        for role, members in self._of_role.items():
            soon, free = (keep, keep // 2) if role == "prefill" else (keep // 2, keep)
            soonest = _smallest(members, prompt_s, soon)
            freest = _smallest(members, streams, free)
            holders = _smallest(members[cached[members] > 0], -cached, keep // 2)
            kept += dict.fromkeys([*soonest, *freest, *holders])
        return [
            (self._usable[index][0], int(cached[index]))
            for index in kept
            if prompt_s[index] < np.inf
        ]

    def _note_crowding(self, queued: _Column, now_ns: int) -> None:
        self._crowding.note(
            {
                role: (int(np.count_nonzero(queued[members])), len(members))
                for role, members in self._of_role.items()
            },
            now_ns,
        )

    def _leave_out(
        self, request: GenerationRequest, avoid: bytes, prompt_s: _Column, streams: _Column
    ) -> None:
        """Put those that may not be taken behind all others, and out of sight."""
        index = self._index_of_incarnation.get(avoid)
        out = [index] if index is not None else []
        if request.goes_on:
            out += [i for i, (slot, _) in enumerate(self._usable) if not slot.goes_on]
        prompt_s[out] = streams[out] = np.inf


def _mark(slot: Slot) -> tuple[object, ...]:
    link = slot.link
    return (slot, slot.record, (link, link.live, link.status) if link is not None else ())


def _smallest(members: _Indices, column: _Column, keep: int) -> list[int]:
    """The members with the smallest values, in their order."""
    values = column[members]
    if len(members) > keep:
        few = np.argpartition(values, keep)[:keep]
        members = members[few]
        values = values[few]
    return [int(index) for index in members[np.argsort(values)]]
