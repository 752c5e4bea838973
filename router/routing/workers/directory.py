"""Where the router's list of workers comes from."""

from collections.abc import AsyncIterator
from typing import Protocol

from baton.registry.workers import WorkerChange


class WorkerDirectory(Protocol):
    """Says which workers there are, for as long as it is iterated.

    It does not say which are alive: that is known from the streams to the workers.
    ``baton.registry.workers.RegistryWatcher`` is one.
    """

    @property
    def known(self) -> bool:
        """Whether every present worker has been named."""

    def __aiter__(self) -> AsyncIterator[WorkerChange]:
        """Every present worker first, then each change."""
