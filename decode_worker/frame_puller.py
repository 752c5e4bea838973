"""Pulls frames of one hand-off, verifies them, and scatters them into their pages off the loop."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget, Submission

from decode_worker.parts import WorkerParts
from kvtransfer import chunk
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import Action, HandoffReceiver, Pull
from kvtransfer.transport import FrameStream, TransportError

_LOG = logging.getLogger(__name__)

_BUDGET_TIMES = 4  # as long as the edge's bandwidth says, and so long on top of it
_BUDGET_S = 1.0


class FramePuller:
    """Carries out the pulls that the machine asks for, and tells it what became of each frame.

    Args:
        submission: The request.
        machine: Of its hand-off.
        parts: Of this worker.
        perform: Takes the machine's next actions.
    """

    def __init__(
        self,
        submission: Submission,
        machine: HandoffReceiver,
        parts: WorkerParts,
        perform: Callable[[list[Action]], None],
    ) -> None:
        self.began_ns = 0  # when the first pull began
        self._request_id = submission.request_id
        self._attempt = submission.attempt
        self._machine = machine
        self._pool = parts.pool
        self._peers = parts.peers
        self._metrics = parts.metrics
        self._perform = perform

    async def pull(self, pull: Pull, target: PrefillTarget, generation: int) -> None:
        """One pull, to its end.

        Args:
            pull: What to ask for.
            target: Whom to ask.
            generation: Of the reservation whose pages are written.
        """
        self.began_ns = self.began_ns or time.monotonic_ns()
        edge = self._peers.edge(target.worker_id)
        size = sum(kv_slice.payload_bytes(self._pool.geometry) for kv_slice in pull.kv_slices)
        budget_s = _BUDGET_TIMES * size / edge.bytes_per_s + _BUDGET_S
        began_s = asyncio.get_running_loop().time()
        missing = deque(pull.kv_slices)
        reason = f"{target.worker_id} sent fewer frames than were asked for"
        try:
            request = self._request(pull, target, generation)
            frames = self._peers.pull(target, request)
            try:
                bound = chunk.binding(
                    self._request_id, self._attempt, generation, target.incarnation
                )
                await self._store_all(frames, missing, bound, pull.epoch, began_s + budget_s)
            finally:
                frames.close()
        except TimeoutError:
            reason = f"a pull from {target.worker_id} outlasted its budget of {budget_s:.1f} s"
        except TransportError as error:
            reason = f"a pull from {target.worker_id} broke: {error}"
        if missing:
            self._perform(self._machine.pull_failed(missing, reason, pull.epoch))
        else:  # while prefill computes, only the time of the pull itself says how fast the edge is
            edge.note(size, asyncio.get_running_loop().time() - began_s)

    def _request(self, pull: Pull, target: PrefillTarget, generation: int) -> pb.PullRequest:
        return pb.PullRequest(
            request_id=self._request_id,
            attempt=self._attempt,
            generation=generation,
            source_incarnation=target.incarnation,
            kv_slices=[kv_slice.to_wire() for kv_slice in pull.kv_slices],
        )

    async def _store_all(
        self,
        frames: FrameStream,
        missing: deque[KvSlice],
        bound: bytes,
        epoch: int,
        until_s: float,
    ) -> None:
        """Take each frame that comes off ``missing``, until all came or the pull is over."""
        while missing:
            async with asyncio.timeout_at(until_s):
                frame = await frames.read()
            if frame is None or not await self._store(frame, missing.popleft(), bound, epoch):
                return

    async def _store(self, frame: bytes, kv_slice: KvSlice, bound: bytes, epoch: int) -> bool:
        """Verify and store one frame; False ends the pull (nobody asks for it any more)."""
        if not self._machine.frame_arrived(kv_slice, epoch):
            return False
        blocks = self._machine.blocks
        try:
            await asyncio.to_thread(self._verify_and_write, frame, kv_slice, bound, blocks)
        except chunk.ChunkError as error:
            self._metrics.inc("baton_chunks_refused", cause=error.cause)
            self._metrics.inc("baton_chunks_repaired")
            actions = self._machine.frame_bad(kv_slice, epoch)
        except _GoneError:
            actions = self._machine.frame_gone(kv_slice, epoch)
        except Exception:  # noqa: BLE001 - a fault of ours: the pages must come free all the same
            _LOG.exception("a frame of %s could not be stored", self._request_id)
            actions = self._machine.frame_bad(kv_slice, epoch)
        else:
            actions = self._machine.frame_stored(kv_slice, epoch, time.monotonic_ns())
        self._perform(actions)
        return True

    def _verify_and_write(
        self, frame: bytes, kv_slice: KvSlice, bound: bytes, blocks: tuple[int, ...]
    ) -> None:
        header, payload = chunk.decode(frame)
        if header.HasField("error"):
            raise _GoneError(header.error.message)
        chunk.verify(header, payload, kv_slice, self._pool.geometry, bound)
        self._pool.write(blocks, kv_slice, payload)


class _GoneError(Exception):
    """The peer does not hold these blocks (any more)."""
