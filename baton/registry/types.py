"""Data in the registry: worker records, KV events, snapshots, work of routers.

Does no I/O, so that the router's prefix index and the tests can use it without Redis.
"""

import re
from collections.abc import Iterable, Set
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np

INCARNATION_BYTES = HASH_BYTES = 16

TIERS = ("memory", "disk")  # below a worker's pool, fastest first

Role = Literal["prefill", "decode"]
WorkerState = Literal["starting", "ready", "draining", "dead"]
Intent = Literal["serve", "park", "leave"]
"""Intent of the controller for a slot: a worker, none until an operator restarts it, or no slot."""

_WORKER_ID = re.compile(r"worker-\d+", re.ASCII)


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Registry record of one slot of a pool.

    ``incarnation`` is 16 random bytes that the worker generates at start. It is empty while a slot
    has no process (``starting`` before its first process, ``dead`` between two). ``epoch`` counts
    the processes of the slot from 1.
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
    ranks: tuple[int, ...] = ()  # pids of a tensor-parallel replica, the leader's first
    reason: str = ""  # cause of state dead or draining
    turn: int = 0  # number of the turn that gave it its role, of all turns of the fleet
    intent: Intent = "serve"
    version: str = ""  # of the code that the worker runs; "" before its first process
    kv_blocks: int = 0  # of its KV pool; 0 while the slot has no process
    server: str = ""  # address:port of an attached server
    unseen_block_tokens: int = 0  # of that server, if it caches and sends no KV events


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of the blocks that a worker stored and removed since its last batch.

    Apply ``removed`` before ``stored``. Batches of one incarnation are numbered
    1, 2, 3 ...; a gap means that a batch was lost and a snapshot is needed.
    """

    incarnation: bytes
    sequence: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of all blocks that a worker has after its batch number ``sequence``.

    ``packed`` is their concatenation, each once, in any order: one object for ten thousand hashes.
    """

    incarnation: bytes
    sequence: int
    packed: bytes

    @property
    def hashes(self) -> frozenset[bytes]:
        """Set of the hashes."""
        return frozenset(split_hashes(self.packed))

    @property
    def checksum(self) -> int:
        """Checksum of the hashes, see `hashes_checksum`."""
        return packed_checksum(self.packed)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Checksum of a worker's set after batch ``sequence``. Reveals the loss of a last batch."""

    incarnation: bytes
    sequence: int
    checksum: int  # see `hashes_checksum`


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """End of an incarnation, and of all blocks that it had."""

    incarnation: bytes


class Refreshed(msgspec.Struct, frozen=True, kw_only=True):
    """Incarnations that have refreshed their keys in Redis since the last read: they run."""

    incarnations: Set[bytes]


FeedItem = Snapshot | EventBatch | Heartbeat | Forget


class PromptSum(msgspec.Struct, frozen=True, array_like=True):
    """Sum over prompts. ``context`` is the number of tokens before each token, added up."""

    count: int = 0
    tokens: int = 0
    context: int = 0


class WorkDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one router: sums since its start, and those that wait or run now.

    Attributes:
        arrived: Prompts of all requests, also of those that are refused.
        placed: Prompts of placed requests.
        uncached: The part of these that workers had to compute.
        responses: Responses that have ended.
        output_tokens: Tokens of all responses, also of those that have not ended.
        waiting: Prompts that are not placed yet.
        computing: Uncached part of prompts that are placed and have yielded no token.
        streams: Sequences that generate.
        stream_tokens: Tokens in the contexts of these.
    """

    arrived: PromptSum = PromptSum()
    placed: PromptSum = PromptSum()
    uncached: PromptSum = PromptSum()
    responses: int = 0
    output_tokens: int = 0
    waiting: PromptSum = PromptSum()
    computing: PromptSum = PromptSum()
    streams: int = 0
    stream_tokens: int = 0


@lru_cache(maxsize=16_384)
def tier_incarnation(incarnation: bytes, tier: str) -> bytes:
    """Return the pseudo incarnation under which events report the blocks of a worker's tier.

    Its set includes the blocks of the tiers above, so that it can be matched alone. Readers that do
    not support tiers take it for a worker that is not in the registry, and never use it.
    """
    return blake2b(incarnation + tier.encode(), digest_size=INCARNATION_BYTES).digest()


def split_hashes(packed: bytes) -> list[bytes]:
    """Split concatenated hashes into single ones."""
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


def hashes_checksum(hashes: Iterable[bytes], start: int = 0) -> int:
    """Return the xor of the first 8 bytes of each block hash, as a little-endian u64.

    Adding and removing are the same operation, so the checksum can follow changes of a set: pass
    the old checksum as ``start``, and the hashes that were added or removed.
    """
    return start ^ packed_checksum(b"".join(hashes))


def packed_checksum(packed: bytes) -> int:
    """Return the checksum of concatenated hashes."""
    firsts = np.frombuffer(packed, "<u8")[:: HASH_BYTES // 8]
    return int(np.bitwise_xor.reduce(firsts)) if len(firsts) else 0


def worker_name(number: int, prefix: str = "") -> str:
    """Return the id of a worker by its number; ``prefix`` is that of its lane."""
    return f"{prefix}worker-{number}"


def is_worker_name(text: str, prefix: str = "") -> bool:
    """Return whether a text is the id of a worker of a fleet, or of the lane with this prefix."""
    name = text.removeprefix(prefix)
    return text.startswith(prefix) and _WORKER_ID.fullmatch(name) is not None


def number_of(worker_id: str) -> int:
    """Return the number in a worker's id."""
    return int(worker_id.rpartition("-")[2])
