"""A rank's side of KV transfers: pages, bytes and digests. The leader decides (``link.py``)."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from batonpb import common_pb2, rank_pb2
from batonpb.decode_pb2 import PrefillTarget

from kvtransfer import chunk, sender
from kvtransfer.grpc_transport import GrpcTransport
from kvtransfer.kv_slice import KvSlice
from kvtransfer.pool_source import HeldKv, Key
from kvtransfer.transport import Frame, FrameStream, Peer, TransportError

_LOG = logging.getLogger(__name__)

_NO_LEASE_NS = 1 << 62  # the leader has the lease


class RankHandoffs:
    """Prompts of which this rank holds some KV.

    Args:
        given_back: Called with the name of an ended KV transfer when its pages are not read.
    """

    def __init__(self, pool: chunk.PoolView, given_back: Callable[[str], None]) -> None:
        self._pool = pool
        self._given_back = given_back
        self._by_name: dict[str, tuple[Key, sender.HandoffSender]] = {}
        self._names: dict[Key, str] = {}

    def hold(self, word: rank_pb2.RankHold) -> None:
        """Open a KV transfer for a prompt that has its pages."""
        heads = self._pool.parts[0]
        machine = sender.HandoffSender(
            self._pool.geometry, word.prompt_tokens, 0, _NO_LEASE_NS, 0, first_head=heads.start
        )
        machine.admitted(tuple(word.pages))
        key = (word.request_id, word.attempt, word.generation, word.decode_incarnation)
        self._by_name[word.name] = (key, machine)
        self._names[key] = word.name

    def publish(self, word: rank_pb2.RankPublish) -> None:
        """Record a computed rectangle; repeats change nothing."""
        if word.name in self._by_name:
            _, machine = self._by_name[word.name]
            machine.published_kv.add(KvSlice.from_wire(word.kv_slice))

    def revoke(self, name: str) -> None:
        """End a KV transfer: no more of it may be sent."""
        _, machine = self._by_name[name]
        self._perform(name, machine.release())

    def find(self, key: Key) -> HeldKv | None:
        """Return the KV of a key, for the source of frames."""
        name = self._names.get(key)
        if name is None:
            return None
        _, machine = self._by_name[name]
        return HeldKv(machine, lambda actions: self._perform(name, actions))

    def _perform(self, name: str, actions: Sequence[sender.Action]) -> None:
        for action in actions:
            if isinstance(action, sender.GiveBack):
                key, _ = self._by_name.pop(name)
                if self._names.get(key) == name:
                    del self._names[key]
                self._given_back(name)


async def take(
    word: rank_pb2.RankTake, pool: chunk.PoolView, transport: GrpcTransport
) -> rank_pb2.RankTaken:
    """Pull, verify and store slices; once this returns, nothing writes into the pages."""
    pull = word.pull
    key = (pull.request_id, pull.attempt, pull.generation)
    bound = chunk.binding(*key, pull.source_incarnation)
    peer = Peer(PrefillTarget(address=word.address), common_pb2.Capabilities())
    taken = rank_pb2.RankTaken(serial=word.serial)
    wanted = [KvSlice.from_wire(message) for message in pull.kv_slices]
    frames = transport.pull(peer, pull)
    try:
        async with asyncio.timeout(word.budget_ms / 1e3) as budget:
            await _take_each(frames, wanted, list(word.pages), pool, bound, taken, budget)
    except TimeoutError:
        taken.reason = f"timed out after {word.budget_ms / 1e3:.1f} s"
    except TransportError as error:
        taken.reason = f"broke: {error}"
    finally:
        frames.close()
    missing = len(wanted) - len(taken.outcomes)
    taken.outcomes.extend([rank_pb2.MISSING] * missing)
    taken.reason = taken.reason or "brought fewer frames than requested" * bool(missing)
    return taken


async def _take_each(
    frames: FrameStream,
    wanted: Sequence[KvSlice],
    pages: Sequence[int],
    pool: chunk.PoolView,
    bound: bytes,
    taken: rank_pb2.RankTaken,
    budget: asyncio.Timeout,
) -> None:
    """Store frames in the order of the slices; a store that has begun outlives the timeout."""
    until_s = budget.when()
    while len(taken.outcomes) < len(wanted):
        came = await frames.read()
        if not came:
            return
        budget.reschedule(None)
        for frame in came[: len(wanted) - len(taken.outcomes)]:
            kv_slice = wanted[len(taken.outcomes)]
            taken.outcomes.append(
                await asyncio.to_thread(_store, frame, pool, pages, kv_slice, bound)
            )
        budget.reschedule(until_s)


def _store(
    frame: Frame,
    pool: chunk.PoolView,
    pages: Sequence[int],
    kv_slice: KvSlice,
    bound: bytes,
) -> rank_pb2.TakeOutcome:
    try:
        frame.store(pool, pages, kv_slice, bound)
    except chunk.GoneError:
        return rank_pb2.GONE
    except Exception as fault:  # noqa: BLE001 - reported to the leader for each frame
        if not isinstance(fault, chunk.ChunkError):  # a fault of this process
            _LOG.exception("failed to store a frame")
        return rank_pb2.DAMAGED
    return rank_pb2.STORED
