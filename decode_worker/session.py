"""Outgoing stream to one router: batches events into frames, and survives a lost stream."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from batonpb import common_pb2
from batonpb import decode_pb2 as pb

from baton.telemetry.alive_clock import ALIVE
from baton.types import events as ev
from baton.wire import codecs
from baton.wire.tokens import count_tokens, pack_tokens

MAX_PENDING_BYTES = 8 << 20  # of new tokens
MAX_FRAME_BYTES = 1 << 20  # a frame is cut before it grows larger; gRPC refuses 16 MiB
BEAT_S = 0.9  # with work and no news; checked every 250 ms. Routers take 2 s of silence for a death
_RUN_TOKENS = 256  # per run of one choice: with log-probabilities some 100 KiB


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load at one time.

    Attributes:
        status: The load.
        content: The load without its age, serialized.
        at_rest: Part that counts as news without work, serialized; empty while there is work.
    """

    status: common_pb2.WorkerStatus
    content: bytes
    at_rest: bytes = b""


class RouterSession:
    """Outgoing stream to one router. Events join the next frame while the last one is written."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.connected_ns = ALIVE.now_ns()
        self.renewed_ns = self.connected_ns
        self._begin_frame()
        self._full: deque[pb.WorkerFrame] = deque()  # full frames before it
        self._dirty = asyncio.Event()
        self._stream = 0
        self._ended_stream = 0
        self._unread_bytes = 0  # of new tokens, since a frame was last taken
        self._reported = b""  # news of the last report
        self._content = b""  # content of the last report
        self._taken_ns = 0  # when the router was last sent anything
        self._may_rest = False
        self._read = self._acknowledged = 0  # frames of this stream

    def _begin_frame(self) -> None:
        self._frame = pb.WorkerFrame()
        self._frame_bytes = 0
        self._open_runs: dict[tuple[str, int, int], pb.TokenRun] = {}  # that later tokens may join

    def connected(self, *, may_rest: bool = False) -> int:
        """Begin a stream, whose ``hello`` has been read, and return its number.

        Frames that the last stream did not send are dropped: the router requests a ``Resume``. With
        ``may_rest`` the router accepts silence from a worker without work.
        """
        self.connected_ns = ALIVE.now_ns()
        self.renewed_ns = self.connected_ns
        self._begin_frame()
        self._unread_bytes = 0
        self._full.clear()
        self._reported = self._content = b""
        self._may_rest = may_rest
        self._read = 1
        self._acknowledged = 0
        self._stream += 1
        return self._stream

    def end_stream(self, stream: int | None = None) -> None:
        """End the stream of that number, or the current one: the router opens another."""
        self._ended_stream = max(self._ended_stream, self._stream if stream is None else stream)
        self._dirty.set()

    def note_frame(self, stream: int) -> None:
        """Count a frame from the router, and renew the leases of its requests."""
        self.renew()
        if stream == self._stream:
            self._read += 1

    def renew(self) -> None:
        """Renew the leases of the router's requests."""
        self.renewed_ns = ALIVE.now_ns()

    async def frames(self, stream: int, step: Callable[[], int]) -> AsyncIterator[pb.WorkerFrame]:
        """Yield frames for a stream until it ends or a newer one begins; ``step``: the engine's."""
        while True:
            await self._dirty.wait()
            if self._stream != stream:
                self._dirty.set()  # that was for the newer stream
                return
            if self._ended_stream >= stream:
                return
            self._dirty.clear()
            if self._full:
                frame = self._full.popleft()
                self._dirty.set()
            else:
                frame = self._frame
                self._begin_frame()
            frame.step = step()
            frame.heard = self._acknowledged = self._read
            self._unread_bytes = 0
            self._taken_ns = time.monotonic_ns()
            yield frame
            if self._unread_bytes > MAX_PENDING_BYTES:
                return  # the router does not read: it will reconnect and resume

    def tokens(self, request: pb.Submission, tokens: ev.Tokens, *, repeated: bool = False) -> None:
        """Add tokens of one choice.

        Tokens that are ``repeated`` for a resume do not count as unread: the router requested them.
        """
        size_bytes = 0
        for begin in range(0, max(len(tokens.tokens), 1), _RUN_TOKENS):
            part = tokens.tokens[begin : begin + _RUN_TOKENS]
            run = pb.TokenRun(
                request_id=request.request_id,
                attempt=request.attempt,
                choice=tokens.choice,
                index=tokens.index + begin,
                token_ids=pack_tokens([token.token for token in part]),
            )
            if part and part[0].logprob is not None:
                run.logprobs.extend(codecs.logprob_to_wire(token) for token in part)
            if begin + _RUN_TOKENS >= len(tokens.tokens):
                run.finish_reason = tokens.finish_reason
                if tokens.stop_token is not None:
                    run.has_stop_token = True
                    run.stop_token_id = tokens.stop_token
            size_bytes += self._join(run) or self._add(run)
        if not repeated:
            self._unread_bytes += size_bytes

    def prompt_outputs(self, request: pb.Submission, prompt_outputs: ev.PromptOutputsReady) -> None:
        """Add the log-probabilities of a prompt, slice by slice, or its embedding."""
        scores = prompt_outputs.scores
        for part in codecs.prompt_logprobs_to_wire(scores) if scores is not None else ():
            self._add_bulk(request, prompt_logprobs=part)
        if prompt_outputs.vector:
            self._add_bulk(request, embedding=prompt_outputs.vector, finish_reason="stop")

    def _add_bulk(self, request: pb.Submission, **fields: Any) -> None:
        """Add bytes that do not count as unread: the request holds them anyway."""
        self._add(pb.TokenRun(request_id=request.request_id, attempt=request.attempt, **fields))

    def _add(self, run: pb.TokenRun) -> int:
        size_bytes = run.ByteSize()
        self._make_room(size_bytes)
        self._frame.tokens.append(run)
        if run.index and not (run.logprobs or run.finish_reason):
            self._open_runs[run.request_id, run.attempt, run.choice] = self._frame.tokens[-1]
        return size_bytes

    def _join(self, run: pb.TokenRun) -> int:
        """Add tokens to the run before them in this frame; return the added bytes, 0 for none.

        A router that is behind reads them in less time. First and last tokens, and those with
        log-probabilities, have runs of their own. A frame of short runs grows to 6 MiB at most.
        """
        before = self._open_runs.get((run.request_id, run.attempt, run.choice))
        if before is None or run.logprobs or run.finish_reason:
            return 0
        count = count_tokens(before.token_ids)
        if 4 * count >= _RUN_TOKENS or before.index + count != run.index:
            return 0
        before.token_ids += run.token_ids
        return len(run.token_ids)

    def route(self, route: pb.RequestRoute) -> None:
        """Add the workers that a request runs on."""
        self._make_room(route.ByteSize())
        self._frame.routes.append(route)

    def end(self, end: pb.RequestEnd) -> None:
        """Add the end of a request."""
        self._make_room(end.ByteSize())
        self._frame.ends.append(end)
        self._reported = b""  # the next report must be sent, even if it equals the last

    def ask(self, needed: pb.PrefillNeeded) -> None:
        """Add a request for another prefill worker."""
        self._make_room(needed.ByteSize())
        self._frame.prefill_needed.append(needed)

    def status(self, status: common_pb2.WorkerStatus) -> None:
        """Add the worker's load, replacing an older one."""
        keep = self._frame.status.capabilities if self._frame.HasField("status") else None
        self._frame.status.CopyFrom(status)
        if keep is not None and keep.numerics_id and not status.HasField("capabilities"):
            self._frame.status.capabilities.CopyFrom(keep)
        self._dirty.set()

    def report(self, report: LoadReport, now_ns: int) -> None:
        """Add the worker's load if it is news, or an empty frame if a heartbeat is due.

        Without work the only heartbeats are answers to frames of the router.
        """
        resting = self._may_rest and bool(report.at_rest)
        news = report.at_rest if resting else report.content
        asked = resting and self._read > self._acknowledged
        if news != self._reported or (asked and report.content != self._content):
            self._reported = news
            self._content = report.content
            self.status(report.status)
            self._frame.status.resting = resting
        elif asked or (not resting and now_ns - self._taken_ns >= BEAT_S * 1e9):
            self._dirty.set()

    def transfers(self, totals: common_pb2.TransferTotals) -> None:
        """Add the transfer totals, so that they are current when a response arrives."""
        self._frame.transfers.CopyFrom(totals)
        self._dirty.set()

    def _make_room(self, size_bytes: int) -> None:
        if self._frame_bytes and self._frame_bytes + size_bytes > MAX_FRAME_BYTES:
            self._full.append(self._frame)
            self._begin_frame()
        self._frame_bytes += size_bytes
        self._dirty.set()
