"""Records of the slots in the registry, written by the controller."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from baton.config.fleet_file import FleetConfig
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import WorkerRecord
from fleet.pools.controller import FleetController
from fleet.pools.slots import Publish, Slot


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

    async def write(self, news: Publish) -> None:
        """Write one slot's record."""
        with contextlib.suppress(RegistryUnavailableError):
            await self.registry.write_slots([self._record(news)])

    async def write_all(self, slots: Iterable[Slot]) -> None:
        """Write all slots at once."""
        with contextlib.suppress(RegistryUnavailableError):
            await self.registry.write_slots([self._record(slot.describe()) for slot in slots])

    def _record(self, news: Publish) -> WorkerRecord:
        threads = self.config.threads_per_rank  # with `auto` the worker itself reports them
        return WorkerRecord(
            worker_id=news.worker_id,
            role=news.role,
            state=news.state,
            epoch=news.epoch,
            threads=0 if threads == "auto" else threads * self.config.pools.width(news.role),
            reason=news.reason,
            turn=news.turn,
            intent=news.intent,
        )
