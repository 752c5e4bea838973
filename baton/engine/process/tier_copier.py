"""Copies blocks between the pool and its tiers, in a thread of the step loop's process.

The step loop hands it what ``KvTiers`` orders and hears of the ends through a descriptor that it
selects on. numpy and the kernel copy without Python's lock, so that a step is not held up.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from baton.engine.core.tiers.tiers import POOL, Copied, Copy
from baton.engine.process.tier_shelves import Bytes, DamagedError, Shelf
from baton.types.geometry import KvGeometry

_LOG = logging.getLogger(__name__)

_URGENT = 0
_LATER = 1
_LAST_COPY_S = 2.0


class BlockMover:
    """Makes one copy after the other.

    Args:
        pool: All of the KV pool; the same memory that steps read and write.
        geometry: Its shape.
        shelves: By the tier's name.
    """

    def __init__(
        self, pool: memoryview | bytearray, geometry: KvGeometry, shelves: Mapping[str, Shelf]
    ) -> None:
        layers = geometry.num_layers
        blocks = geometry.num_blocks
        flat = np.frombuffer(pool, np.uint8, count=geometry.pool_bytes)
        self._pool = flat.reshape(layers, 2, blocks, -1)
        self._staging = np.empty((layers, 2, geometry.block_bytes // (2 * layers)), np.uint8)
        self._shelves = shelves
        self._complained: set[str] = set()

    def move(self, copy: Copy) -> str:
        """Returns the ``outcome`` of `Copied`."""
        try:
            data = self._read(copy)
        except (DamagedError, OSError) as error:
            self._complain(copy.source, error)
            return "damaged"
        try:
            if copy.target == POOL:
                self._pool[:, :, copy.target_place] = data.reshape(self._staging.shape)
            else:
                self._shelves[copy.target].write(copy.target_place, copy.block_hash, data)
        except OSError as error:
            self._complain(copy.target, error)
            return "failed"
        return "done"

    def close(self) -> None:
        """Let another life have the shelves."""
        for shelf in self._shelves.values():
            shelf.close()

    def _read(self, copy: Copy) -> Bytes:
        if copy.source != POOL:
            return self._shelves[copy.source].read(copy.source_place, copy.block_hash)
        self._staging[...] = self._pool[:, :, copy.source_place]
        return self._staging.reshape(-1)

    def _complain(self, tier: str, error: Exception) -> None:
        """Once for each kind of trouble; metrics count the rest."""
        kind = f"{tier} {type(error).__name__}"
        if kind not in self._complained:
            self._complained.add(kind)
            _LOG.warning("KV tier %s: %s", tier, error)


class TierCopier:
    """See the module.

    Args:
        mover: Used by the thread alone.
    """

    def __init__(self, mover: BlockMover) -> None:
        self._mover = mover
        self._orders: queue.PriorityQueue[tuple[int, int, Copy | None]] = queue.PriorityQueue()
        self._ended: queue.SimpleQueue[Copied] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv tiers", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when a copy has ended."""
        return self._bell

    def order(self, copies: Sequence[Copy]) -> None:
        """Make these copies; those into the pool before all others."""
        for copy in copies:
            urgency = _URGENT if copy.target == POOL else _LATER
            self._orders.put((urgency, copy.number, copy))

    def take(self) -> list[Copied]:
        """Copies that have ended since the last call."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return []
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended

    def close(self) -> None:
        """End the thread, behind the copy under way; one that hangs ends with the process."""
        self._orders.put((-1, 0, None))
        self._thread.join(_LAST_COPY_S)
        if not self._thread.is_alive():
            os.close(self._bell)
            self._mover.close()

    def _run(self) -> None:
        while (copy := self._orders.get()[2]) is not None:
            began_ns = time.monotonic_ns()
            outcome = self._outcome(copy)
            self._ended.put(Copied(copy.number, outcome, time.monotonic_ns() - began_ns))
            os.eventfd_write(self._bell, 1)

    def _outcome(self, copy: Copy) -> str:
        """Whatever a copy ends with, the next one is made: admission waits for all of them."""
        try:
            return self._mover.move(copy)
        except Exception:  # noqa: BLE001 - logged; the copy has failed
            _LOG.exception("a KV block could not be copied from %s to %s", copy.source, copy.target)
            return "failed"
