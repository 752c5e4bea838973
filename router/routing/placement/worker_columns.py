"""Columns of the usable workers' reports, kept in step with the slots. Sans-IO.

Looking at a thousand workers one by one takes longer than the rest of a placement. So their reports
are kept in columns, which are rewritten only where something has changed.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton.registry.types import TIERS, Role, tier_incarnation
from router.routing.placement.native.library import load
from router.routing.placement.pricing import Pricing
from router.routing.placement.worker_load import Rates, ReportedWorker, Reports
from router.routing.workers.slot import WorkerSlot

_COLUMNS = np.dtype(
    [
        ("queued_tokens", "f8"),
        ("streams", "f8"),
        ("answering", "f8"),  # streams that stand still while the worker computes a prompt
        ("token_s", "f8"),
        ("block_tokens", "f8"),
        ("block_pull_s", "f8"),  # time to pull a block from another worker
    ]
)


class Workers(Protocol):
    """Workers of the fleet; implemented by ``router.routing.workers.table.WorkerTable``."""

    @property
    def usable(self) -> list[WorkerSlot]:
        """Workers that take new requests."""

    def __iter__(self) -> Iterator[WorkerSlot]:
        """Iterate over all workers."""

    def get(self, worker_id: str) -> WorkerSlot | None:
        """Return the worker with this id."""

    def news(self) -> set[str] | None:
        """Return a set to which ids of changed workers are added; None: check all each time."""


class WorkerColumns:
    """Usable workers, by index, with their reports.

    Attributes:
        pricing: Rows of the workers in C++, replaced when a worker comes, goes or changes its role;
            None without C++.
        slot_of: All workers, usable or not, by incarnation.
        tier_of: Worker and tier, by incarnation of the tier.
        members: Indices of the workers of each role.
    """

    def __init__(self, reports: Reports, *, native: bool) -> None:
        self.pricing: Pricing | None = None
        self.rates = Rates()
        self.usable: list[WorkerSlot] = []
        self.reported: list[ReportedWorker] = []
        self.index_of_worker: dict[str, int] = {}
        self.index_of_incarnation: dict[bytes, int] = {}
        self.slot_of: dict[bytes, WorkerSlot] = {}
        self.tier_of: dict[bytes, tuple[WorkerSlot, str]] = {}
        self.members: dict[str, npt.NDArray[np.intp]] = {}
        self._reports = reports
        self._native = native
        self._seen: list[WorkerSlot] = []  # all slots, by place
        self._fingerprints: list[tuple[object, ...]] = []  # by place
        self._place_of: dict[str, int] = {}
        self._index_of: list[int] = []  # by place; -1: not usable
        self._roles: list[Role] = []  # of the usable workers, at the last rebuild
        self._columns = np.zeros(0, _COLUMNS)
        self._stale: set[int] = set()  # columns to write before they are read

    def update(self, slots: Workers, now_ns: int, news: set[str] | None = None) -> Rates:
        """Read what has changed since the last call, and return the expected rates.

        ``news`` has the ids of changed workers, and is emptied; with None all workers are checked.
        """
        places = self._take_news(slots, news) if news is not None else None
        rebuild = False
        if places is None:
            places, rebuild = self._scan(slots)
        rebuild = rebuild or any(map(self._membership_changed, places))
        indices: Iterable[int] = ()
        if rebuild:
            self._rebuild()
        else:
            indices = [self._index_of[place] for place in places if self._index_of[place] >= 0]
            for index in indices:
                self._read(index)
        rates = self._reports.expected(self.reported, now_ns, changed=rebuild or bool(places))
        if rates is not self.rates and not rates.is_like(self.rates):
            self.rates = rates  # rewrites each row, so not for a negligible difference
            indices = range(len(self.reported))
        for index in indices:
            self._write(index)
        return self.rates

    def current(self) -> "npt.NDArray[Any]":
        """Return the columns by name, after writing those that have changed."""
        while self._stale:
            self._write_columns(self._stale.pop())
        return self._columns

    def _take_news(self, slots: Workers, news: set[str]) -> list[int] | None:
        changed = []
        while news:
            worker_id = news.pop()
            place = self._place_of.get(worker_id)
            slot = slots.get(worker_id)
            if place is None or slot is None or slot is not self._seen[place]:
                news.clear()
                return None
            self._fingerprints[place] = _fingerprint(slot)
            changed.append(place)
        return changed

    def _scan(self, slots: Workers) -> tuple[list[int], bool]:
        """Return the places of changed workers, and whether there are fewer than before."""
        seen = self._seen
        fingerprints = self._fingerprints
        changed = []
        count = -1
        for count, slot in enumerate(slots):
            fingerprint = _fingerprint(slot)
            if count == len(fingerprints):
                seen.append(slot)
                fingerprints.append(fingerprint)
                changed.append(count)
            elif fingerprints[count] != fingerprint:
                seen[count] = slot
                fingerprints[count] = fingerprint
                changed.append(count)
        fewer = len(fingerprints) > count + 1
        del seen[count + 1 :], fingerprints[count + 1 :]
        if fewer or changed:
            self._place_of = {slot.worker_id: place for place, slot in enumerate(seen)}
        return changed, fewer

    def _membership_changed(self, place: int) -> bool:
        if place >= len(self._index_of):
            return True
        index = self._index_of[place]
        slot = self._seen[place]
        if index < 0 or not slot.usable:
            return (index >= 0) != slot.usable
        known = self.index_of_incarnation.get(slot.incarnation) == index
        same = self.usable[index] is slot and self._roles[index] == slot.role
        return not (same and known)

    def _rebuild(self) -> None:
        self.usable = [slot for slot in self._seen if slot.usable]
        self.index_of_worker = {slot.worker_id: index for index, slot in enumerate(self.usable)}
        self._index_of = [self.index_of_worker.get(slot.worker_id, -1) for slot in self._seen]
        self.reported = [
            ReportedWorker(slot, slot.incarnation, self._reports.of(slot)) for slot in self.usable
        ]
        self.index_of_incarnation = {
            worker.incarnation: index for index, worker in enumerate(self.reported)
        }
        self.slot_of = {slot.incarnation: slot for slot in self._seen}
        self.tier_of = {
            tier_incarnation(slot.incarnation, tier): (slot, tier)
            for slot in self._seen
            for tier in TIERS
        }
        self._roles = [slot.role for slot in self.usable]
        roles = np.array(self._roles)
        self.members = {role: np.flatnonzero(roles == role) for role in sorted(set(roles))}
        self._stale.clear()
        self._columns = np.zeros(len(self.usable), _COLUMNS)
        library = load() if self._native else None
        self.pricing = Pricing(library, len(self.usable)) if library is not None else None
        for index in range(len(self.usable)):
            self._write(index)

    def _read(self, index: int) -> None:
        worker = self.reported[index]
        self.reported[index] = worker._replace(report=self._reports.of(worker.slot))

    def _write(self, index: int) -> None:
        if self.pricing is None:
            self._write_columns(index)
            return
        slot, _, report = self.reported[index]
        self.pricing.write(index, slot.worker_id, slot.role, report, self.rates)
        self._stale.add(index)

    def _write_columns(self, index: int) -> None:
        slot, _, report = self.reported[index]
        row = self._columns[index]
        row["queued_tokens"] = report.queued_tokens
        row["streams"] = report.streams
        row["answering"] = report.streams if report.answering is None else report.answering
        row["token_s"] = self.rates.token_s(slot.role, report)
        row["block_tokens"] = report.block_tokens
        row["block_pull_s"] = report.block_bytes / self.rates.edge_bytes_per_s


def _fingerprint(slot: WorkerSlot) -> tuple[object, ...]:
    link = slot.link
    return (slot, slot.record, (link, link.live, link.status) if link is not None else ())
