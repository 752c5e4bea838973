"""Copying of blocks between the pool and its tiers, in a thread of the step loop's process.

The step loop passes on the copies that ``KvTiers`` requests, and selects on a descriptor for the
results. numpy and the kernel copy without the GIL, so that steps are not delayed.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from baton.engine.core.tiers.tiers import POOL, Copied, TierCopy
from baton.engine.process.tier_shelves import (
    BlockGoneError,
    Bytes,
    DamagedError,
    FolderWatch,
    OtherBlocks,
    OtherFolders,
    Shelf,
)
from baton.types.geometry import KvGeometry

_LOG = logging.getLogger(__name__)

_URGENT = 0
_LATER = 1
_LAST_COPY_S = 2.0


class Erasure(msgspec.Struct, frozen=True):
    """Erasure of the blocks with these tags."""

    number: int
    tags: frozenset[bytes]


class Erased(msgspec.Struct, frozen=True):
    """Result of an erasure: blocks by tier; -1: an error, which is logged."""

    number: int
    blocks: dict[str, int]


class BlockMover:
    """Executor of single copies."""

    def __init__(
        self, pool: memoryview | bytearray, geometry: KvGeometry, shelves: Mapping[str, Shelf]
    ) -> None:
        layers = geometry.num_layers
        blocks = geometry.num_blocks
        flat = np.frombuffer(pool, np.uint8, count=geometry.pool_bytes)
        self._pool = flat.reshape(layers, 2, blocks, -1)
        self._staging = np.empty((layers, 2, geometry.block_bytes // (2 * layers)), np.uint8)
        self._shelves = shelves
        self._warned: set[str] = set()

    def move(self, copy: TierCopy) -> str:
        """Make a copy and return the ``outcome`` of `Copied`."""
        try:
            data = self._read(copy)
        except BlockGoneError:
            return "gone"
        except (DamagedError, OSError) as error:
            self._warn(copy.source, error)
            return "damaged"
        try:
            if copy.target == POOL:
                self._pool[:, :, copy.target_place] = data.reshape(self._staging.shape)
            else:
                self._shelves[copy.target].write(copy.target_place, copy.block_hash, data)
        except OSError as error:
            self._warn(copy.target, error)
            return "failed"
        return "done"

    def erase(self, tags: frozenset[bytes]) -> dict[str, int]:
        """Erase the blocks with these tags; return their number by tier, -1 after an error."""
        counts = {}
        for tier, shelf in self._shelves.items():
            try:
                counts[tier] = shelf.erase(tags)
            except OSError as error:
                _LOG.warning("failed to erase KV blocks tier=%s: %s", tier, error)
                counts[tier] = -1
        return counts

    def close(self) -> None:
        """Close the shelves, so that another process can open them."""
        for shelf in self._shelves.values():
            shelf.close()

    def _read(self, copy: TierCopy) -> Bytes:
        if copy.source != POOL:
            return self._shelves[copy.source].read(copy.source_place, copy.block_hash)
        self._staging[...] = self._pool[:, :, copy.source_place]
        return self._staging.reshape(-1)

    def _warn(self, tier: str, error: Exception) -> None:
        """Log the first error of each kind; metrics count the others."""
        kind = f"{tier} {type(error).__name__}"
        if kind not in self._warned:
            self._warned.add(kind)
            _LOG.warning("failed to copy a KV block tier=%s: %s", tier, error)


class TierCopier:
    """Thread that makes copies in order of urgency.

    Args:
        others: Folders of other workers that share the disk tier.
    """

    def __init__(self, mover: BlockMover, others: OtherFolders | None = None) -> None:
        self._mover = mover
        self._orders: queue.PriorityQueue[tuple[int, int, TierCopy | Erasure | None]] = (
            queue.PriorityQueue()
        )
        self._ended: queue.SimpleQueue[Copied | Erased | OtherBlocks] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv tiers", daemon=True)
        self._thread.start()
        self._watch = FolderWatch(others, self._report) if others is not None else None

    def fileno(self) -> int:
        """Return a descriptor that is readable when a copy has ended."""
        return self._bell

    def order(self, copies: Sequence[TierCopy]) -> None:
        """Queue copies; those into the pool come first."""
        for copy in copies:
            urgency = _URGENT if copy.target == POOL else _LATER
            self._orders.put((urgency, copy.number, copy))

    def erase(self, number: int, tags: frozenset[bytes]) -> None:
        """Queue an erasure behind the saves with lower numbers."""
        self._orders.put((_LATER, number, Erasure(number, tags)))

    def take(self) -> list[Copied | Erased | OtherBlocks]:
        """Return the copies and erasures that ended since the last call, and others' changes."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return []
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended

    def close(self) -> None:
        """End the thread after its current copy; a hanging copy ends with the process."""
        self._orders.put((-1, 0, None))
        has_ended = self._watch is None or self._watch.close()
        self._thread.join(_LAST_COPY_S)
        if not self._thread.is_alive():
            self._mover.close()
            if has_ended:
                os.close(self._bell)

    def _report(self, what: Copied | Erased | OtherBlocks) -> None:
        self._ended.put(what)
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while (order := self._orders.get()[2]) is not None:
            began_ns = time.monotonic_ns()
            if isinstance(order, Erasure):
                self._report(Erased(order.number, self._mover.erase(order.tags)))
            else:
                outcome = self._outcome(order)
                self._report(Copied(order.number, outcome, time.monotonic_ns() - began_ns))

    def _outcome(self, copy: TierCopy) -> str:
        """Make a copy and catch every error: admission waits for all copies."""
        try:
            return self._mover.move(copy)
        except Exception:  # noqa: BLE001 - logged; the copy failed
            _LOG.exception("failed to copy a KV block from %s to %s", copy.source, copy.target)
            return "failed"
