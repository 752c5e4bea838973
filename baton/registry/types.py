"""What travels through the registry, as plain data: worker records, KV events, snapshots.

Nothing here does I/O, so that the router's prefix index and the tests can use it without Redis.
"""

from collections.abc import Iterable, Set
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np

INCARNATION_BYTES = HASH_BYTES = 16

TIERS = ("memory", "disk")  # below a worker's pool, the fastest first

Role = Literal["prefill", "decode"]
WorkerState = Literal["starting", "ready", "draining", "dead"]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a pool, as the registry knows it.

    ``incarnation`` is 16 random bytes, made by the worker when it starts; it is empty while a slot
    has no process (``starting`` before the first life, ``dead`` between two lives). ``epoch``
    counts the lives of the slot from 1.
    """

    worker_id: str
    role: Role
    state: WorkerState
    epoch: int
    incarnation: bytes = b""
    pid: int = 0  # the process that holds the model
    host: str = ""
    address: str = ""  # host:port of its gRPC server
    metrics_address: str = ""  # host:port of its Prometheus page
    threads: int = 0  # of all its ranks together
    ranks: tuple[int, ...] = ()  # processes of a tensor-parallel replica, the leader's first
    rank_hosts: tuple[str, ...] = ()  # of each of them; none: all are on ``host``
    reason: str = ""  # why it is dead or draining


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of the blocks that one worker stored and removed since its last batch.

    Apply in the order ``cleared``, ``removed``, ``stored``. Batches of one incarnation are numbered
    1, 2, 3 ...; a hole means that something was lost and a snapshot is needed.
    """

    incarnation: bytes
    sequence: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    cleared: bool = False


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The hashes of all blocks that one worker holds after its batch number ``sequence``.

    ``packed`` has them one behind the other, each once, in any order: ten thousand are one object.
    """

    incarnation: bytes
    sequence: int
    packed: bytes

    @property
    def hashes(self) -> frozenset[bytes]:
        """The same, each by itself."""
        return frozenset(split_hashes(self.packed))

    @property
    def checksum(self) -> int:
        """See `hashes_checksum`."""
        return packed_checksum(self.packed)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The checksum of a worker's set after batch ``sequence``; shows that a last batch was lost."""

    incarnation: bytes
    sequence: int
    checksum: int  # see `hashes_checksum`


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """This incarnation is gone, and all that it held with it."""

    incarnation: bytes


class Refreshed(msgspec.Struct, frozen=True, kw_only=True):
    """These have refreshed their keys in Redis since it was last read: their shells run."""

    incarnations: Set[bytes]


FeedItem = Snapshot | EventBatch | Heartbeat | Forget


@lru_cache(maxsize=16_384)
def tier_incarnation(incarnation: bytes, tier: str) -> bytes:
    """Under what name events tell which blocks can be had from a tier of a worker.

    That set holds what the tiers above it have, too, so that it can be matched by itself. Who does
    not know tiers takes it for a worker that is not in the registry, and so never serves.
    """
    return blake2b(incarnation + tier.encode(), digest_size=INCARNATION_BYTES).digest()


def split_hashes(packed: bytes) -> list[bytes]:
    """Hashes that stand one behind the other."""
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


def hashes_checksum(hashes: Iterable[bytes], start: int = 0) -> int:
    """Xor of the first 8 bytes of each block hash, as a little-endian u64.

    Adding and taking away are the same operation, so a set's checksum follows its changes: pass
    the old checksum as ``start`` and the hashes that entered or left.
    """
    return start ^ packed_checksum(b"".join(hashes))


def packed_checksum(packed: bytes) -> int:
    """The same of hashes that stand one behind the other."""
    firsts = np.frombuffer(packed, "<u8")[:: HASH_BYTES // 8]
    return int(np.bitwise_xor.reduce(firsts)) if len(firsts) else 0
