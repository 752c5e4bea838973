"""Workers as the simulated router sees them: real slots, and links that are never opened."""

from collections.abc import Iterator

import msgspec
from batonpb.common_pb2 import Capabilities, KvGroup
from batonpb.decode_pb2 import Hello, Submission, WorkerFrame

from baton.registry.types import Role, WorkerRecord
from baton.wire.compatibility import own_wire
from loadtest.simulator.worker import SimulatedWorker
from router.process_core import ProcessCore
from router.routing.workers.link import WorkerLink
from router.routing.workers.slot import WorkerSlot


class NoListener:
    """Ignores all events, since the links are never opened."""

    def on_live(self, link: WorkerLink, *, same_life: bool) -> None:
        """Ignore the start of a worker."""

    def on_frame(self, link: WorkerLink, frame: WorkerFrame) -> None:
        """Ignore a frame from a worker."""

    def on_dead(self, link: WorkerLink, incarnation: bytes, reason: str, *, died: bool) -> None:
        """Ignore the death of a worker."""

    def on_broken(self, link: WorkerLink, kind: str) -> None:
        """Ignore a broken stream."""

    def on_submit_failed(self, link: WorkerLink, submission: Submission, reason: str) -> None:
        """Ignore a failed submission."""


def capabilities(block_tokens: int, kv_bytes_per_token: int) -> Capabilities:
    """Return capabilities with one layer and one head that have all bytes of a token."""
    group = KvGroup(
        id=0,
        layer_ids=[0],
        num_kv_heads=1,
        head_dim=kv_bytes_per_token // 4,  # K and V, two bytes each
        block_tokens=block_tokens,
        dtype="bf16",
        components=["k", "v"],
    )
    return Capabilities(
        wire=own_wire(),
        kv_groups=[group],
        numerics_id="simulated",
        weights_digest=b"simulated",
        max_context_tokens=1 << 24,
    )


class SimulatedTable:
    """Fixed slots for ``Placer``: a ``router.routing.placement.placer.Workers``."""

    def __init__(self, advertised: Capabilities) -> None:
        self._advertised = advertised
        self._slots: dict[str, WorkerSlot] = {}
        self._live: dict[str, SimulatedWorker] = {}
        self.usable: list[WorkerSlot] = []

    def __iter__(self) -> Iterator[WorkerSlot]:
        return iter(self._slots.values())

    def get(self, worker_id: str) -> WorkerSlot | None:
        """Return a worker's slot."""
        return self._slots.get(worker_id)

    def news(self) -> None:
        """Do nothing: the simulated router notifies no listeners."""

    def note_live(self, worker: SimulatedWorker, role: Role) -> None:
        """Add a worker that has started; ``role`` counts for its first life."""
        slot = self._slots.get(worker.worker_id)
        if slot is None:
            record = WorkerRecord(worker_id=worker.worker_id, role=role, state="ready", epoch=1)
            slot = self._slots[worker.worker_id] = WorkerSlot(record)
        link = WorkerLink(worker.worker_id, "", NoListener(), Hello(), ProcessCore())
        link.capabilities = self._advertised
        link.status = worker.status()
        link.incarnation = worker.incarnation
        link.live = True
        slot.link = link
        self._live[worker.worker_id] = worker
        self._count()

    def change_role(self, worker_id: str, role: Role) -> None:
        """Give a worker another role."""
        slot = self._slots[worker_id]
        slot.record = msgspec.structs.replace(slot.record, role=role)

    def leave(self, worker_id: str) -> None:
        """Place nothing more on a worker, which completes what it has."""
        slot = self._slots[worker_id]
        slot.record = msgspec.structs.replace(slot.record, state="draining")
        self._count()

    def note_dead(self, worker: SimulatedWorker) -> None:
        """Remove a worker that has died."""
        link = self._slots[worker.worker_id].link
        if link is not None:
            link.live = False
        del self._live[worker.worker_id]
        self._count()

    def _count(self) -> None:
        self.usable = [slot for slot in self._slots.values() if slot.usable]

    def link(self, worker: SimulatedWorker) -> WorkerLink | None:
        """Return the link of this life of a worker; None when it is over."""
        slot = self._slots[worker.worker_id]
        link = slot.link
        return link if link is not None and link.incarnation == worker.incarnation else None

    def is_live(self, worker_id: str) -> bool:
        """Return whether a worker runs."""
        return worker_id in self._live

    def worker(self, worker_id: str) -> SimulatedWorker:
        """Return a live worker by id."""
        return self._live[worker_id]

    def of_role(self, role: str) -> list[WorkerSlot]:
        """Return the slots of a role that accept new requests."""
        return [slot for slot in self.usable if slot.role == role]
