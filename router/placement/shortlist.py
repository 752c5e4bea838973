"""Of all workers, the few that are worth a price. Sans-IO.

To look at a thousand workers one by one takes longer than all the rest of a placement. So what
their reports say stands in columns, and is written anew where something has changed. A prompt
costs some operations on whole columns, and a price for the few workers that are left.
"""

from collections.abc import Iterable, Mapping
from heapq import nlargest
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from router.placement.booked_load import LoadBook
from router.placement.cost import PULL_OVERHEAD_S
from router.placement.crowding import Crowding
from router.placement.worker_load import Rates, Report, Reports
from router.request import GenerationRequest
from router.workers.table import Slot

_JITTER_S = 1e-9  # among equals, not always the same are looked at
_HOLDERS = 8  # of a prompt are looked at

_Column = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.intp]


class Shortlist:
    """The columns, of usable workers only.

    Args:
        reports: The last of each worker.
        crowding: Learns how busy the fleet is.
        seed: Of the draws among equals.
    """

    def __init__(self, reports: Reports, crowding: Crowding, seed: int) -> None:
        self._reports = reports
        self._crowding = crowding
        self._draw = np.random.default_rng(seed)
        self._seen: list[Slot] = []  # all slots, usable or not
        self._marks: list[tuple[object, ...]] = []  # what was seen of each
        self._index_of: list[int] = []  # its index below; -1: not usable
        self._usable: list[tuple[Slot, Report]] = []
        self._index_of_worker: dict[str, int] = {}
        self._index_of_incarnation: dict[bytes, int] = {}
        self._slot_of_incarnation: dict[bytes, Slot] = {}  # usable or not
        self._of_role: dict[str, _Indices] = {}
        self._rates = Rates()
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
        return [slot for slot, _ in self._usable]

    def update(self, slots: Iterable[Slot], now_ns: int) -> Rates:
        """Look at what workers have said since the last time.

        Args:
            slots: All of them, usable or not.
            now_ns: Monotonic clock.

        Returns:
            What is expected of workers that have not measured themselves.
        """
        seen, marks, changed = self._seen, self._marks, []
        count, anew = -1, False
        for count, slot in enumerate(slots):
            link = slot.link
            status = (link, link.live, link.status) if link is not None else ()
            mark = (slot, slot.record, status)
            if count == len(marks):
                seen.append(slot)
                marks.append(mark)
                changed.append(count)
            elif marks[count] != mark:
                seen[count], marks[count] = slot, mark
                changed.append(count)
        fewer = len(marks) > count + 1
        del seen[count + 1 :], marks[count + 1 :]
        if fewer or any(map(self._came_or_went, changed)):
            self._begin_anew()
            changed, anew = [], True
        for place in changed:
            if (index := self._index_of[place]) >= 0:
                self._read(index)
        rates = self._reports.expected(self._usable, now_ns, changed=bool(changed) or anew)
        if rates is not self._rates:
            self._rates = rates
            changed = list(range(len(seen)))
        for place in changed:
            if (index := self._index_of[place]) >= 0:
                self._write(index)
        return rates

    def _came_or_went(self, place: int) -> bool:
        if place >= len(self._index_of):
            return True
        index, slot = self._index_of[place], self._seen[place]
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
        self._usable = [(slot, self._reports.of(slot)) for slot in slots]
        self._index_of_worker = {slot.worker_id: index for index, slot in enumerate(slots)}
        self._index_of_incarnation = {slot.incarnation: index for index, slot in enumerate(slots)}
        self._slot_of_incarnation = {slot.incarnation: slot for slot in self._seen}
        roles = np.array([slot.role for slot in slots])
        self._of_role = {role: np.flatnonzero(roles == role) for role in sorted(set(roles))}
        columns = np.zeros((6, len(slots)))
        self._queued_tokens, self._streams, self._answering = columns[:3]
        self._token_s, self._block_tokens, self._block_pull_s = columns[3:]
        for index in range(len(slots)):
            self._write(index)

    def _read(self, index: int) -> None:
        slot, _ = self._usable[index]
        self._usable[index] = slot, self._reports.of(slot)

    def _write(self, index: int) -> None:
        slot, report = self._usable[index]
        self._queued_tokens[index] = report.queued_tokens
        self._streams[index] = report.streams
        answering = report.answering
        self._answering[index] = report.streams if answering is None else answering
        self._block_tokens[index] = report.block_tokens
        self._token_s[index] = self._rates.token_s(slot.role, report)
        self._block_pull_s[index] = report.block_bytes / self._rates.edge_bytes_per_s

    # ---------------------------------------------------------------- a prompt

    def holder(self, held: Mapping[bytes, int]) -> tuple[Slot | None, int]:
        """Who can give others most of a prompt, and how many blocks; one that drains can too.

        ``held`` is how many blocks of it each incarnation has that has the first.
        """
        for incarnation, blocks in nlargest(_HOLDERS, held.items(), key=itemgetter(1)):
            slot = self._slot_of_incarnation.get(incarnation)
            if slot is not None and slot.gives_prefixes:
                return slot, blocks
        return None, 0

    def best(
        self,
        request: GenerationRequest,
        prompt_blocks: int,
        held: Mapping[bytes, int],
        book: LoadBook,
        now_ns: int,
        *,
        keep: int,
        given_blocks: int = 0,
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
            given_blocks: So many can be had from another worker.
            avoid: An incarnation that is not to be taken.

        Returns:
            Workers, and how many of the prompt's blocks they have; the better ones first.
        """
        queued, streams = self._queued_tokens.copy(), self._streams.copy()
        answering = self._answering.copy()
        for worker_id, booked in book.booked():
            if (index := self._index_of_worker.get(worker_id)) is not None:
                queued[index] += booked.tokens
                streams[index] += booked.streams
                answering[index] += booked.streams
        self._note_crowding(queued, now_ns)
        cached = np.zeros(len(queued))
        for incarnation, blocks in held.items():
            if (index := self._index_of_incarnation.get(incarnation)) is not None:
                cached[index] = blocks
        jitter_s = self._draw.random(len(queued)) * _JITTER_S
        block_s = self._block_tokens * self._token_s * (1 + answering)
        own_s = (prompt_blocks - cached) * block_s
        if given_blocks:
            pull_s = PULL_OVERHEAD_S + (given_blocks - cached) * self._block_pull_s
            rest_s = (prompt_blocks - given_blocks) * block_s
            own_s = np.where(cached < given_blocks, np.minimum(own_s, pull_s + rest_s), own_s)
        prompt_s = queued * self._token_s + own_s + jitter_s
        streams += jitter_s
        self._leave_out(request, avoid, prompt_s, streams)
        kept: list[int] = []
        for role, members in self._of_role.items():
            soon, free = (keep, keep // 2) if role == "prefill" else (keep // 2, keep)
            soonest, freest = _smallest(members, prompt_s, soon), _smallest(members, streams, free)
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


def _smallest(members: _Indices, column: _Column, keep: int) -> list[int]:
    """The members with the smallest values, in their order."""
    values = column[members]
    if len(members) > keep:
        few = np.argpartition(values, keep)[:keep]
        members, values = members[few], values[few]
    return [int(index) for index in members[np.argsort(values)]]
