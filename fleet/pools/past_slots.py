"""Last data of slots that are not in the fleet now, so that no epoch and no turn is used twice."""

from dataclasses import dataclass

from baton.registry.types import Role


@dataclass(frozen=True, slots=True)
class PastSlot:
    """Last epoch, role and turn of a slot."""

    epoch: int
    role: Role
    turn: int


class PastSlots:
    """Slots that were removed, or that only the registry has."""

    def __init__(self) -> None:
        self._slots: dict[str, PastSlot] = {}

    def get(self, worker_id: str, role: Role) -> PastSlot:
        """Return the last data of a slot; an unknown one has ``role`` and was never used."""
        return self._slots.get(worker_id, PastSlot(0, role, 0))

    def put(self, worker_id: str, slot: PastSlot) -> None:
        """Keep the last data of a removed slot."""
        self._slots[worker_id] = slot

    def note(self, worker_id: str, record: PastSlot) -> None:
        """Note a record; of two records, the one with the later turn has the role."""
        past = self.get(worker_id, record.role)
        later = record if record.turn >= past.turn else past
        epoch = max(record.epoch, past.epoch)
        self._slots[worker_id] = PastSlot(epoch, later.role, later.turn)
