"""Pulls frames of one hand-off by the best transport, and stores them off the event loop.

If a transport fails, the pull falls back to gRPC at once. The machine sees a failed pull only if
the fallback fails too.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget, Submission

from baton.telemetry.alive_clock import ALIVE
from decode_worker.parts import WorkerParts
from kvtransfer import chunk
from kvtransfer.edge import FALLBACK
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import HandoffReceiver
from kvtransfer.receiver_actions import Action, Pull
from kvtransfer.transport import Frame, FrameStream, TransportError

_LOG = logging.getLogger(__name__)

_BUDGET_TIMES = 4  # the expected duration at the edge's bandwidth
_BUDGET_S = 1.0
_ENCODINGS = (common_pb2.PLAIN, common_pb2.INT8)


@dataclass(frozen=True, slots=True)
class _Attempt:
    way: str
    target: PrefillTarget
    generation: int
    epoch: int
    bound: bytes
    encoding: common_pb2.ChunkEncoding = common_pb2.PLAIN


class FramePuller:
    """Carries out the machine's pulls, and reports the outcome of each frame to it."""

    def __init__(
        self,
        submission: Submission,
        machine: HandoffReceiver,
        parts: WorkerParts,
        perform: Callable[[list[Action]], None],
    ) -> None:
        self.began_ns = 0  # when the first pull began
        self.waited_s = 0.0  # for credit, all pulls together
        self._owner = f"{submission.request_id}/{submission.attempt}"
        self._request_id = submission.request_id
        self._attempt = submission.attempt
        self._machine = machine
        self._pool = parts.pool
        self._reader = parts.identity.incarnation
        self._peers = parts.peers
        self._pacer = parts.pacer
        self._metrics = parts.metrics
        self._perform = perform

    async def pull(self, pull: Pull, target: PrefillTarget, generation: int) -> None:
        """Run one pull to its end, in parts as large as the credit permits."""
        self.began_ns = self.began_ns or time.monotonic_ns()
        left = list(pull.kv_slices)
        while left and self._machine.pulls(pull.epoch):
            sizes = [kv_slice.payload_bytes(self._pool.geometry) for kv_slice in left]
            began_s = time.monotonic()
            room = await self._pacer.take(self._owner, target.worker_id, sizes, self.waited_s)
            waited_s = time.monotonic() - began_s
            self.waited_s += waited_s
            self._metrics.observe("baton_credit_wait_seconds", waited_s)
            if not self._machine.pulls(pull.epoch):  # the hand-off ended meanwhile
                self._pacer.give_back(room, 0)
                return
            part = left[: room.frames]
            left = left[room.frames :]
            came_bytes = 0
            try:
                came_bytes = await self._pull_part(part, pull.epoch, target, generation)
            finally:
                self._pacer.give_back(room, came_bytes)
            if not came_bytes:
                reason = f"{target.worker_id} sent none of the previous frames"
                self._perform(self._machine.pull_failed(left, reason, pull.epoch))
                return

    @property
    def waits(self) -> bool:
        """True while requested frames wait for credit."""
        return self._pacer.waits(self._owner)

    def drop(self) -> None:
        """Release the credit of a hand-off that ends or restarts."""
        self._pacer.drop(self._owner)

    def forget(self) -> None:
        """Drop the reference to the owner, after the last pull."""
        self._perform = lambda _: None

    async def _pull_part(
        self, kv_slices: Sequence[KvSlice], epoch: int, target: PrefillTarget, generation: int
    ) -> int:
        """Pull by the best transport that works; return the received bytes."""
        key = (self._request_id, self._attempt, generation)
        bound = chunk.binding(*key, target.incarnation)
        attempt = _Attempt(FALLBACK, target, generation, epoch, bound)
        missing = deque(kv_slices)
        reason = f"no transport reaches {attempt.target.worker_id}"
        for way in self._peers.ways(attempt.target, time.monotonic_ns()):
            reason = await self._try(replace(attempt, way=way), missing)
            if not reason or not missing:
                break
        else:
            self._perform(self._machine.pull_failed(missing, reason, attempt.epoch))
        return self._size(kv_slices, common_pb2.PLAIN) - self._size(missing, common_pb2.PLAIN)

    async def _try(self, attempt: _Attempt, missing: deque[KvSlice]) -> str:
        """Pull missing frames, removing each that arrives; return why it failed, or ""."""
        loop = asyncio.get_running_loop()
        edge = self._peers.edge(attempt.target.worker_id)
        size, int8_size = (self._size(missing, encoding) for encoding in _ENCODINGS)
        target = attempt.target
        way = attempt.way
        encoding = self._peers.encoding(target, way, size, int8_size)
        attempt = replace(attempt, encoding=encoding)
        budget_s = _BUDGET_TIMES * size / edge.rate(way).bytes_per_s + _BUDGET_S
        began_s = loop.time()
        ends_ns = ALIVE.now_ns() + int(budget_s * 1e9)
        kv_slices = tuple(missing)
        peer = attempt.target.worker_id
        try:
            request = self._request(missing, attempt)
            frames = self._peers.pull(attempt.target, request, attempt.way)
            try:
                wanted = await self._store_all(frames, missing, attempt, ends_ns)
            finally:
                frames.close()
        except TimeoutError:
            kind = "late"
            reason = f"outlasted its budget of {budget_s:.1f} s"
            asked = self._size(kv_slices, encoding)
            came = asked - self._size(list(missing)[1:], encoding)  # with the one that was due
            edge.note_late(way, asked, came, loop.time() - began_s)
        except TransportError as error:
            kind = "broke"
            reason = f"broke: {error}"
        else:
            if not wanted:
                return ""
            if not missing:
                # While prefill computes, only the pull's duration shows the edge's bandwidth.
                elapsed_s = loop.time() - began_s
                edge.note(way, size, elapsed_s, int8=encoding == common_pb2.INT8)
                return ""
            kind = "short"
            reason = "returned fewer frames than requested"
        self._note_failure(attempt, kind)
        return f"a pull from {peer} by {attempt.way} {reason}"

    def _size(self, kv_slices: Iterable[KvSlice], encoding: common_pb2.ChunkEncoding) -> int:
        geometry = self._pool.geometry
        return sum(chunk.payload_bytes(kv_slice, geometry, encoding) for kv_slice in kv_slices)

    def _request(self, missing: Sequence[KvSlice], attempt: _Attempt) -> pb.PullRequest:
        return pb.PullRequest(
            request_id=self._request_id,
            attempt=self._attempt,
            generation=attempt.generation,
            source_incarnation=attempt.target.incarnation,
            kv_slices=[kv_slice.to_wire() for kv_slice in missing],
            reader_incarnation=self._reader,
            capability=attempt.target.capability,
            encoding=attempt.encoding,
        )

    def _note_failure(self, attempt: _Attempt, kind: str) -> None:
        if attempt.way != FALLBACK:
            self._peers.edge(attempt.target.worker_id).failed(attempt.way, time.monotonic_ns())
            self._metrics.inc("baton_transfer_fallbacks", transport=attempt.way, reason=kind)

    async def _store_all(
        self, frames: FrameStream, missing: deque[KvSlice], attempt: _Attempt, ends_ns: int
    ) -> bool:
        """Store frames until the stream ends; return False if they are not needed any more."""
        while missing:
            async with ALIVE.timeout((ends_ns - ALIVE.now_ns()) / 1e9):
                came = await frames.read()
            if not came:
                break
            kv_slices = [missing.popleft() for _ in range(min(len(came), len(missing)))]
            if not await self._store(list(zip(came, kv_slices, strict=False)), attempt):
                return False
        return True

    async def _store(self, frames: list[tuple[Frame, KvSlice]], attempt: _Attempt) -> bool:
        machine = self._machine
        epoch = attempt.epoch
        wanted = [
            (frame, kv_slice)
            for frame, kv_slice in frames
            if machine.frame_arrived(kv_slice, epoch)
        ]
        faults = await asyncio.to_thread(self._store_each, wanted, machine.blocks, attempt.bound)
        for (_, kv_slice), fault in zip(wanted, faults, strict=True):
            match fault:
                case None:
                    moved_bytes = self._size([kv_slice], attempt.encoding)
                    self._note_moved(moved_bytes, attempt)
                    actions = machine.frame_stored(kv_slice, epoch, ALIVE.now_ns())
                case chunk.GoneError():
                    actions = machine.frame_gone(kv_slice, epoch)
                case _:
                    self._note_damage(fault, attempt)
                    actions = machine.frame_bad(kv_slice, epoch)
            self._perform(actions)
        return len(wanted) == len(frames)

    def _store_each(
        self, frames: list[tuple[Frame, KvSlice]], blocks: Sequence[int], bound: bytes
    ) -> list[Exception | None]:
        """Store frames and return the fault of each, if any; the pages must come free anyway."""
        faults: list[Exception | None] = []
        for frame, kv_slice in frames:
            try:
                for pool in self._pool.holding(kv_slice):
                    frame.store(pool, blocks, kv_slice, bound)
            except Exception as fault:  # noqa: BLE001 - reported to the machine, frame by frame
                faults.append(fault)
            else:
                faults.append(None)
        return faults

    def _note_moved(self, moved_bytes: int, attempt: _Attempt) -> None:
        encoding = common_pb2.ChunkEncoding.Name(attempt.encoding).lower()
        labels = {"transport": attempt.way, "encoding": encoding}
        self._metrics.inc("baton_pulled_bytes", moved_bytes, **labels)

    def _note_damage(self, fault: Exception, attempt: _Attempt) -> None:
        if isinstance(fault, chunk.ChunkError):
            self._metrics.inc("baton_chunks_refused", cause=fault.cause)
            self._metrics.inc("baton_chunks_repaired")
            self._note_failure(attempt, "damaged")
        else:  # a fault of this process
            _LOG.error("cannot store a frame: request=%s", self._request_id, exc_info=fault)
