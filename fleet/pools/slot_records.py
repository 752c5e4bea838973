"""Records of the slots in the registry, written by the controller."""

import contextlib
from dataclasses import dataclass

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import WorkerRecord
from fleet.pools.controller import FleetController


@dataclass(frozen=True, slots=True)
class SlotRecords:
    """Records of one lane's slots; without Redis nothing is written or read."""

    registry: Registry
    config: FleetConfig

    async def learn(self, machine: FleetController) -> None:
        """Read the epochs of earlier incarnations, so that no epoch is used twice."""
        with contextlib.suppress(RegistryUnavailableError):
            for records in await self.registry.records():
                for record in records.values():
                    machine.note_record(record.worker_id, record.epoch, record.role, record.turn)

    async def write(self, *records: WorkerRecord) -> None:
        """Write records of slots at once."""
        with contextlib.suppress(RegistryUnavailableError):
            await self.registry.write_slots(list(map(self._with_threads, records)))

    def _with_threads(self, record: WorkerRecord) -> WorkerRecord:
        threads = self.config.threads_per_rank
        if threads == "auto":  # then the worker itself reports them
            return record
        width = self.config.pools.width(record.role)
        return msgspec.structs.replace(record, threads=threads * width)
