"""Interface of the directory of workers."""

from collections.abc import AsyncIterator
from typing import Protocol

from baton.registry.workers import WorkerChange


class WorkerDirectory(Protocol):
    """Directory of the registered workers; see ``baton.registry.workers.RegistryWatcher``.

    It does not know which workers are alive: the streams to the workers do.
    """

    @property
    def known(self) -> bool:
        """True once every registered worker has been listed."""

    def __aiter__(self) -> AsyncIterator[WorkerChange]:
        """Yield every registered worker, then each change."""
