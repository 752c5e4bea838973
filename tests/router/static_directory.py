"""A list of workers without Redis."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from baton.registry.types import WorkerRecord
from baton.registry.workers import WorkerChange


class StaticDirectory:
    """A list of workers that changes only when told."""

    def __init__(self, records: Iterable[WorkerRecord] = ()) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._changes: asyncio.Queue[WorkerChange] = asyncio.Queue()
        for record in records:
            self.put(record)

    @property
    def known(self) -> bool:
        """Whether every worker on the list has been named."""
        return self._changes.empty()

    def put(self, record: WorkerRecord) -> None:
        """Add or change a worker."""
        before = self._records.get(record.worker_id)
        self._records[record.worker_id] = record
        self._changes.put_nowait(WorkerChange(record.worker_id, before, record))

    def remove(self, worker_id: str) -> None:
        """Take a worker off the list."""
        before = self._records.pop(worker_id, None)
        self._changes.put_nowait(WorkerChange(worker_id, before, None))

    async def __aiter__(self) -> AsyncIterator[WorkerChange]:
        while True:
            yield await self._changes.get()
