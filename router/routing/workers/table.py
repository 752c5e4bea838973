"""Table of the workers as this router sees them: slot, stream and last report of each."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic_ns
from typing import Any

from batonpb.common_pb2 import TransferTotals
from batonpb.decode_pb2 import Hello

from baton.registry.types import WorkerRecord
from baton.registry.workers import RegistryWatcher
from baton.telemetry.tasks import BackgroundTasks
from baton.types.geometry import BLOCK_TOKENS
from router.process_core import ProcessCore
from router.routing.workers.link import LinkListener, WorkerLink
from router.routing.workers.resting import RestingWorkers
from router.routing.workers.slot import WorkerSlot
from router.routing.workers.transfer_totals import TransferLedger
from router.settings import LaneSettings

_LOG = logging.getLogger(__name__)

TRUST_OLDER_AFTER_S = 5.0
"""Time that a later incarnation must be dead before the record of an earlier one counts."""
_MOVE_AFTER_NS = 500_000_000


class WorkerTable:
    """Table of all slots, with a link to each worker in the directory.

    The listener gets every link's events, and calls ``note_*`` first.
    """

    def __init__(
        self,
        directory: RegistryWatcher,
        core: ProcessCore,
        settings: LaneSettings,
        hello: Hello,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._directory = directory
        self._core = core
        self._emulated = settings.emulated
        self._hello = hello
        self._listener: LinkListener  # from `start`
        self._slots: dict[str, WorkerSlot] = {}
        self._usable: list[WorkerSlot] = []
        self._usable_of: dict[str, WorkerSlot] = {}
        self._unseen: set[str] = set()  # slots that changed since `usable` was last read
        self._readers = [self._unseen]
        folder = core.settings.lane_dir(settings.fleet)
        self._transfers = TransferLedger(folder / "transfers.json" if folder else None)
        self._count_failure = count_failure
        self._tasks = BackgroundTasks("workers", count_failure)
        self._closing: set[WorkerLink] = set()
        self.changed = asyncio.Event()
        self.on_turn: Callable[[], None] = lambda: None  # a worker has changed its role
        self.resting = RestingWorkers(
            lambda: (slot.link for slot in self._slots.values() if slot.link is not None)
        )

    def start(self, listener: LinkListener) -> None:
        """Start following the directory; the listener gets the events of all links."""
        self._listener = listener
        self._tasks.keep(self._follow, "directory")
        self._tasks.keep(self.resting.run, "resting workers")
        self._tasks.keep(self._drop_dead_workers, "drop dead workers")

    async def close(self) -> None:
        """Close the links to all workers."""
        self._transfers.save()
        await self._tasks.close()
        links = [slot.link for slot in self._slots.values() if slot.link is not None]
        await asyncio.gather(
            *(link.close() for link in (*links, *self._closing)), return_exceptions=True
        )

    async def _follow(self) -> None:
        async for change in self._directory:
            try:
                if change.after is not None:
                    self._upsert(change.after)
                else:
                    self._gone(change.worker_id)
            except Exception:  # noqa: BLE001 - logged and counted; the other changes still count
                _LOG.exception("cannot apply the record of worker=%s", change.worker_id)
                self._count_failure("directory")

    async def _drop_dead_workers(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, TRUST_OLDER_AFTER_S))
            now_ns = monotonic_ns()
            limit_ns = now_ns - int(self._core.settings.dead_shown_s * 1e9)
            older_ns = now_ns - int(TRUST_OLDER_AFTER_S * 1e9)
            for worker_id, slot in list(self._slots.items()):
                if slot.older is not None and _long_dead(slot, older_ns):
                    self._take(slot, slot.older)
                # A new incarnation may start at a slot's address at any time: keep connecting.
                listed = slot.listed and slot.record.state != "dead"
                connecting = slot.link is not None and (listed or slot.link.known)
                stays = connecting or slot.is_begun or slot.is_kept
                if _long_dead(slot, limit_ns) and not stays:
                    self._hang_up(slot, died=False)
                    del self._slots[worker_id]
                    self._note_change(worker_id)

    def _upsert(self, record: WorkerRecord) -> None:
        slot = self._slots.get(record.worker_id)
        if slot is None:
            if record.state == "dead" and record.intent == "leave":
                return
            slot = self._slots[record.worker_id] = WorkerSlot(record, self._emulated)
            slot.on_change = partial(self._note_change, record.worker_id)
            self._note_change(record.worker_id)
        returned = not slot.listed or slot.record.intent == "leave"
        slot.listed = True
        if returned and record.state == "starting" and record.epoch > slot.epoch:
            slot.dead_since_ns = None  # the slot was removed, and is new
        if record.epoch < slot.epoch:  # most likely left over in Redis
            slot.older = record
            return
        self._take(slot, record)

    def _take(self, slot: WorkerSlot, record: WorkerRecord) -> None:
        if slot.is_begun and record.state == "dead":
            slot.dead_since_ns = None  # the incarnation that has ended never served
        turned = record.role != slot.role
        slot.record = record
        slot.epoch = record.epoch
        slot.older = None
        link = slot.link
        if record.state == "dead":
            # A worker that answers on its stream is alive, whatever the registry contains.
            if link is None or not link.live:
                self._mark_dead(slot)
                self._hang_up(slot, died=True)
            return
        if record.address and (link is None or link.address != record.address):
            self._hang_up(slot, died=True)
            slot.link = self._connect(record)
        if turned:
            self.on_turn()

    def _connect(self, record: WorkerRecord) -> WorkerLink:
        link = WorkerLink(
            record.worker_id,
            record.address,
            self._listener,
            self._hello,
            self._core,
            self._count_failure,
        )
        link.start()
        return link

    def _gone(self, worker_id: str) -> None:
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        slot.listed = False
        slot.older = None
        # Its record may have expired because Redis accepts no writes. While its stream exists the
        # worker is alive; when it breaks for good, the slot is dropped like any other.
        if slot.link is None or not slot.link.known:
            self._mark_dead(slot)
            self._hang_up(slot, died=False)

    def _hang_up(self, slot: WorkerSlot, *, died: bool) -> None:
        link = slot.link
        slot.link = None
        if link is not None:
            link.die("the worker left its slot", died=died)
            self._closing.add(link)
            self._tasks.spawn(self._close(link), "hang up")

    async def _close(self, link: WorkerLink) -> None:
        await link.close()
        self._closing.discard(link)

    def _mark_dead(self, slot: WorkerSlot) -> None:
        if slot.dead_since_ns is None:
            slot.dead_since_ns = monotonic_ns()
        self._signal()

    def _signal(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def note_live(self, link: WorkerLink) -> None:
        """Note that a link is live."""
        slot = self._slots.get(link.worker_id)
        if slot is not None and slot.link is link:
            slot.dead_since_ns = None
            if slot.refusal:
                _LOG.error("refused: worker=%s: %s", slot.worker_id, slot.refusal)
            if link.status is not None:
                slot.epoch = max(slot.epoch, link.status.identity.epoch)
            self._signal()

    def note_dead(self, link: WorkerLink) -> None:
        """Note that a link's incarnation died."""
        slot = self._slots.get(link.worker_id)
        if slot is not None:
            self._mark_dead(slot)

    def note_transfers(self, link: WorkerLink, totals: TransferTotals) -> None:
        """Note the transfer totals of an incarnation."""
        sums = (totals.count, totals.bytes, totals.failures)
        self._transfers.note(link.incarnation, sums)

    def __iter__(self) -> Iterator[WorkerSlot]:
        return iter(self._slots.values())

    def get(self, worker_id: str) -> WorkerSlot | None:
        """Return the slot of a worker."""
        return self._slots.get(worker_id)

    def link(self, worker_id: str | None) -> WorkerLink | None:
        """Return the link to a worker."""
        slot = self._slots.get(worker_id) if worker_id is not None else None
        return slot.link if slot is not None else None

    def leaves(self, link: WorkerLink, now_ns: int) -> bool:
        """Return whether the worker is draining and its requests should move.

        They stay for half a second, until other workers that leave as well are known to do so.
        """
        slot = self._slots.get(link.worker_id)
        if slot is None or slot.link is not link:
            return False
        if slot.state != "draining":
            slot.draining_since_ns = 0
            return False
        slot.draining_since_ns = slot.draining_since_ns or now_ns
        return now_ns - slot.draining_since_ns >= _MOVE_AFTER_NS

    def last_turn(self) -> int:
        """Return the number of the last turn by which workers have their roles here."""
        return max((slot.record.turn for slot in self), default=0)

    @property
    def usable(self) -> list[WorkerSlot]:
        """Slots whose workers take new requests; only changed ones are checked again."""
        if self._unseen:
            changed = False
            for worker_id in self._unseen:
                slot = self._slots.get(worker_id)
                now = slot if slot is not None and slot.usable else None
                changed = changed or now is not self._usable_of.get(worker_id)
            self._unseen.clear()
            if changed:
                self._usable = [slot for slot in self._slots.values() if slot.usable]
                self._usable_of = {slot.worker_id: slot for slot in self._usable}
        return self._usable

    def news(self) -> set[str]:
        """Return a set to which the id of each changed worker is added; its reader clears it.

        It contains every change, so that a reader need not check a thousand workers.
        """
        self._readers.append(set(self._slots))
        return self._readers[-1]

    def _note_change(self, worker_id: str) -> None:
        for unseen in self._readers:
            unseen.add(worker_id)

    def shown(self) -> list[WorkerSlot]:
        """Return the slots that operators see, in any order: not those that are long gone."""
        limit_ns = monotonic_ns() - int(self._core.settings.dead_shown_s * 1e9)
        return [
            slot
            for slot in self._slots.values()
            if slot.is_begun or slot.is_kept or not _long_dead(slot, limit_ns)
        ]

    def pool_tokens(self) -> int | None:
        """Return the tokens in the smallest KV pool of the workers that generate, if any is known.

        Threads other than the event loop's may call this.
        """
        slots = [slot for slot in list(self._slots.values()) if slot.role != "prefill"]
        statuses = [slot.link.status for slot in slots if slot.link is not None]
        totals = [status.kv_blocks.total for status in statuses if status is not None]
        return min(filter(None, totals), default=0) * BLOCK_TOKENS or None

    def transfers(self) -> dict[str, int]:
        """Return the sums of KV transfers: ``count``, ``bytes``, ``failures``."""
        count, payload, failures = self._transfers.total()
        return {"count": count, "bytes": payload, "failures": failures}

    def describe(self) -> dict[str, Any]:
        """Return the answer to ``GET /fleet``."""
        shown = sorted(self.shown(), key=lambda slot: slot.worker_id)
        return {
            "emulated": self._emulated or None,
            "workers": [slot.describe() for slot in shown],
            "transfers": self.transfers(),
        }


def _long_dead(slot: WorkerSlot, limit_ns: int) -> bool:
    return slot.dead_since_ns is not None and slot.dead_since_ns < limit_ns
