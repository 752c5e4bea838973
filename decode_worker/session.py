"""One router's stream: gathers what a step has to say into one frame; survives a lost stream."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from batonpb import common_pb2
from batonpb import decode_pb2 as pb

from engine.core import events as ev
from engine.core.params import SampledToken
from wire import codecs
from wire.tokens import pack_tokens

MAX_PENDING_BYTES = 8 << 20
MAX_FRAME_BYTES = 1 << 20  # where log-probabilities of prompts or vectors are in it


class RouterSession:
    """What one router is owed. The frame in the making grows while the last one is being written.

    Args:
        router_id: Name of the router process.
    """

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.renewed_ns = self.connected_ns = time.monotonic_ns()
        self._frame = pb.WorkerFrame()
        self._full: deque[pb.WorkerFrame] = (
            deque()
        )  # ahead of it; a long prompt's log-probabilities fill many
        self._dirty = asyncio.Event()
        self._stream = 0
        self._pending_bytes = 0

    def connected(self) -> int:
        """Begin a stream and return its number.

        What the last one did not take is dropped: the router asks for it by ``Resume``.
        """
        self.renewed_ns = self.connected_ns = time.monotonic_ns()
        self._frame = pb.WorkerFrame()
        self._full.clear()
        self._stream += 1
        return self._stream

    def renew(self) -> None:
        """The router is alive: all its requests live on."""
        self.renewed_ns = time.monotonic_ns()

    async def frames(self, stream: int, step: "StepCounter") -> AsyncIterator[pb.WorkerFrame]:
        """Frames for the stream of that number; it ends when a newer one has begun."""
        while True:
            await self._dirty.wait()
            if self._stream != stream:
                self._dirty.set()  # that was meant for the newer stream
                return
            self._dirty.clear()
            if self._full:
                frame = self._full.popleft()
                self._dirty.set()
            else:
                frame, self._frame, self._pending_bytes = self._frame, pb.WorkerFrame(), 0
            frame.step = step.value
            yield frame
            if self._pending_bytes > MAX_PENDING_BYTES:
                return  # the router does not read: it will reconnect and resume

    def tokens(
        self,
        request: pb.Submission,
        choice: int,
        index: int,
        tokens: Sequence[SampledToken],
        finish_reason: str = "",
        stop_token: int | None = None,
    ) -> None:
        """Add tokens of one choice, ``index`` being the first one's place in the answer."""
        run = self._frame.tokens.add(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=choice,
            index=index,
            token_ids=pack_tokens([token.token for token in tokens]),
            finish_reason=finish_reason,
        )
        if tokens and tokens[0].logprob is not None:
            run.logprobs.extend(codecs.logprob_to_wire(token) for token in tokens)
        if stop_token is not None:
            run.has_stop_token, run.stop_token_id = True, stop_token
        self._touch(64 + 16 * len(tokens))

    def prompt_outputs(self, request: pb.Submission, prompt_outputs: ev.PromptOutputsReady) -> None:
        """Add the log-probabilities of a prompt, slice by slice, or its vector."""
        scores = prompt_outputs.scores
        for part in codecs.prompt_logprobs_to_wire(scores) if scores is not None else ():
            self._add_bulk(request, part.ByteSize(), prompt_logprobs=part)
        if prompt_outputs.vector:
            size = len(prompt_outputs.vector)
            self._add_bulk(request, size, embedding=prompt_outputs.vector, finish_reason="stop")

    def _add_bulk(self, request: pb.Submission, size_bytes: int, **fields: Any) -> None:
        """Add to the frame in the making, or to the next one if it would become too large.

        Full frames are no sign of a router that does not read: they are bounded by the requests
        that it has sent, which hold the same bytes for a resume.
        """
        if self._pending_bytes + size_bytes > MAX_FRAME_BYTES:
            self._full.append(self._frame)
            self._frame, self._pending_bytes = pb.WorkerFrame(), 0
        self._frame.tokens.add(request_id=request.request_id, attempt=request.attempt, **fields)
        self._touch(size_bytes)

    def route(self, route: pb.RequestRoute) -> None:
        """Say where a request runs."""
        self._frame.routes.append(route)
        self._touch(128)

    def end(self, end: pb.RequestEnd) -> None:
        """Say that a request has ended here."""
        self._frame.ends.append(end)
        self._touch(128)

    def ask(self, needed: pb.PrefillNeeded) -> None:
        """Ask for another prefill worker."""
        self._frame.prefill_needed.append(needed)
        self._touch(128)

    def status(self, status: common_pb2.WorkerStatus) -> None:
        """Add the worker's load; only the newest counts."""
        keep = self._frame.status.capabilities if self._frame.HasField("status") else None
        self._frame.status.CopyFrom(status)
        if keep is not None and keep.numerics_id and not status.HasField("capabilities"):
            self._frame.status.capabilities.CopyFrom(keep)
        self._touch(0)

    def transfers(self, totals: common_pb2.TransferTotals) -> None:
        """A hand-off was counted: whoever has its answer shall find it in the sums."""
        self._frame.transfers.CopyFrom(totals)
        self._touch(0)

    def _touch(self, size_bytes: int) -> None:
        self._pending_bytes += size_bytes
        self._dirty.set()


class StepCounter:
    """The engine's step number, shared by all sessions."""

    value = 0
