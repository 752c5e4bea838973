"""Emulated workers of the benchmark: one process, and one frame to each router for each step.

    python -m benchmarks.router.workers --redis URL --count 4 --step-s 0.006

A prompt costs nothing, and every request gets one token per step. As with real workers
(``decode_worker/session.py``), a frame grows while the router has not taken the last one.
"""

import asyncio
import contextlib
import os
import secrets
import struct
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import grpc.aio
import typer
import uvloop
from batonpb import common_pb2 as common
from batonpb import decode_pb2 as pb
from batonpb.decode_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server

from baton.engine.emulated_timing import numerics_id_of
from baton.registry.redis_store import Registry
from baton.registry.types import Snapshot, WorkerRecord
from baton.telemetry.tasks import BackgroundTasks
from baton.wire.codecs import scatter
from baton.wire.compatibility import own_wire

FLEET = "bench"
TIMING = "epyc-135m"
"""Emulated timing of a fleet with longer contexts than its model has."""

_CONTEXT_TOKENS = 8192  # of the model
_STATUS_S = 0.25
_BEAT_S = 1.0  # as in `decode_worker/session.py`: reports only when something changed, and a rest
_REFRESH_TURNS = 5  # seconds between refreshes of each worker's keys, whose TTL is 10 s
_TOKENS = [struct.pack("<I", 1000 + 13 * place) for place in range(997)]  # tokens of responses
_KV_GROUP = common.KvGroup(
    id=0,
    layer_ids=range(30),
    num_kv_heads=3,
    head_dim=64,
    block_tokens=16,
    dtype="bf16",
    components=["k", "v"],
)


class _Stream:
    """Outgoing stream to one router."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self.router_id = ""
        self._running: dict[str, tuple[pb.Submission, int]] = {}  # with the next token's index
        self.frame = pb.WorkerFrame()
        self._open_runs: dict[str, pb.TokenRun] = {}  # of this frame, as of real workers
        self.dirty = asyncio.Event()
        self.ended = False  # whether any request ended since the last report
        self.may_rest = False
        self.heard = self.answered = 0  # frames received, and acknowledged

    def begin(self, submission: pb.Submission) -> None:
        self._running[submission.request_id] = (submission, 0)

    def cancel(self, request_id: str) -> None:
        found = self._running.pop(request_id, None)
        if found is not None:
            self._end(found[0])

    @property
    def running(self) -> int:
        return len(self._running)

    def step(self) -> None:
        frame = self.frame
        over = []
        for request_id, (submission, index) in self._running.items():
            if not index:
                self._route(submission)
            last = index + 1 == submission.sampling.max_tokens
            token = _TOKENS[(submission.ticket + index) % len(_TOKENS)]
            if not last and (before := self._open_runs.get(request_id)) is not None:
                before.token_ids += token
            else:
                run = frame.tokens.add(
                    request_id=request_id,
                    attempt=submission.attempt,
                    index=index,
                    token_ids=token,
                    finish_reason="length" if last else "",
                )
                if index:
                    self._open_runs[request_id] = run
            self._running[request_id] = (submission, index + 1)
            if last:
                over.append(submission)
        for submission in over:
            del self._running[submission.request_id]
            self._end(submission)
        if frame.tokens:
            self.dirty.set()

    def _route(self, submission: pb.Submission) -> None:
        self.frame.routes.add(
            request_id=submission.request_id,
            attempt=submission.attempt,
            prefill_worker_id=submission.prefill.worker_id or self._worker_id,
            decode_worker_id=self._worker_id,
            mode="disaggregated" if submission.HasField("prefill") else "colocated",
        )

    def _end(self, submission: pb.Submission) -> None:
        self.frame.ends.add(request_id=submission.request_id, attempt=submission.attempt)
        self.ended = True
        self.dirty.set()

    def take(self) -> pb.WorkerFrame:
        frame = self.frame
        self.frame = pb.WorkerFrame()
        self._open_runs.clear()
        frame.heard = self.answered = self.heard
        self.dirty.clear()
        return frame


class SteppedWorker(DecodeServicer):
    """An emulated worker of this process."""

    def __init__(self, worker_id: str, step_s: float, context_tokens: int) -> None:
        self.worker_id = worker_id
        self._context_tokens = context_tokens
        self.address = ""
        self.incarnation = secrets.token_bytes(16)
        self._step_s = step_s
        self._steps = 0
        self._reported = b""
        self._streams: dict[int, _Stream] = {}
        self._busy = asyncio.Event()
        self._tasks = BackgroundTasks("bench worker")

    @property
    def _is_long(self) -> bool:
        return self._context_tokens > _CONTEXT_TOKENS

    async def start(self) -> None:
        """Start listening on a free port."""
        server = grpc.aio.server()
        add_DecodeServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Close all connections at once."""
        await self._server.stop(grace=0)

    async def run(self) -> None:
        """Run steps until cancelled."""
        loop = asyncio.get_running_loop()
        next_s = status_s = beat_s = loop.time()
        while True:
            streams = self._streams.values()
            if any(stream.running for stream in streams):
                next_s = max(next_s + self._step_s, loop.time())
                await asyncio.sleep(next_s - loop.time())
                self._steps += 1
                for stream in streams:
                    stream.step()
            else:
                self._busy.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(status_s - loop.time(), 0.0)):
                        await self._busy.wait()
            if loop.time() < status_s:
                continue
            status_s = loop.time() + _STATUS_S
            status = self._status()
            before = self._reported
            self._reported = status.SerializeToString()
            news = before != self._reported or any(stream.ended for stream in streams)
            due = loop.time() >= beat_s
            if due or news:
                beat_s = loop.time() + _BEAT_S
            for stream in streams:
                resting = stream.may_rest and not status.running
                stream.ended = False
                if news:
                    stream.frame.status.CopyFrom(status)
                    stream.frame.status.resting = resting
                asked = resting and stream.heard > stream.answered
                if news or asked or (due and not resting):
                    stream.dirty.set()

    def record(self) -> WorkerRecord:
        """Return the worker's record for the registry."""
        return WorkerRecord(
            worker_id=self.worker_id,
            role="decode",
            state="ready",
            epoch=1,
            incarnation=self.incarnation,
            pid=os.getpid(),
            address=self.address,
        )

    async def Serve(  # noqa: N802 - the service's name
        self, requests: AsyncIterator[pb.RouterFrame], context: Any
    ) -> AsyncIterator[pb.WorkerFrame]:
        """Serve the stream of one router."""
        stream = _Stream(self.worker_id)
        self._streams[id(stream)] = stream
        stream.frame.status.CopyFrom(self._status(first=True))
        stream.dirty.set()
        try:
            async with self._tasks.beside(self._listen(requests, stream), "listen"):
                while True:
                    await stream.dirty.wait()
                    yield stream.take()
        finally:
            del self._streams[id(stream)]

    async def Submit(self, submission: pb.Submission, context: Any) -> pb.SubmitAck:  # noqa: N802
        """Accept a long prompt, which comes outside the stream."""
        for stream in self._streams.values():
            if stream.router_id == submission.router_id:
                stream.begin(submission)
        self._busy.set()
        return pb.SubmitAck()

    async def _listen(self, requests: AsyncIterator[pb.RouterFrame], stream: _Stream) -> None:
        async for frame in requests:
            stream.heard += 1
            for single in scatter(frame):
                self._handle(single, stream)

    def _handle(self, frame: pb.RouterFrame, stream: _Stream) -> None:
        if frame.HasField("submit"):
            stream.begin(frame.submit)
            self._busy.set()
        elif frame.HasField("hello"):
            stream.router_id = frame.hello.router_id
            stream.may_rest = frame.hello.may_rest
            self._reported = b""  # forces a report to this router
        elif frame.HasField("cancel"):
            stream.cancel(frame.cancel.request_id)

    def _status(self, *, first: bool = False) -> common.WorkerStatus:
        status = common.WorkerStatus(
            identity=common.WorkerIdentity(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                epoch=1,
                role="decode",
                host="bench",
                address=self.address,
                pid=os.getpid(),
            ),
            state="ready",
            kv_blocks=common.BlockCounts(total=65536, free=65000),
            running=sum(stream.running for stream in self._streams.values()),
            threads=1,
            steps=self._steps,
            prefill_tokens_per_s=30_000,
            decode_step_s=self._step_s,
        )
        if first:
            status.capabilities.CopyFrom(
                common.Capabilities(
                    wire=own_wire(),
                    kv_groups=[_KV_GROUP],
                    numerics_id=numerics_id_of(TIMING) if self._is_long else "exact/bench",
                    weights_digest=b"w" * 16,
                    max_context_tokens=self._context_tokens,
                )
            )
        return status


async def serve(redis: str, count: int, step_s: float, context_tokens: int) -> None:
    """Run the workers until the process is killed."""
    registry = Registry(redis, FLEET)
    await registry.birth()
    workers = [SteppedWorker(f"decode-{place}", step_s, context_tokens) for place in range(count)]
    for worker in workers:
        await worker.start()
        empty = Snapshot(incarnation=worker.incarnation, sequence=1, packed=b"")
        await registry.blocks.publish_snapshot(empty, empty.checksum)
        await registry.register(worker.record())
    print("ready", flush=True)
    await asyncio.gather(_refresh(registry, workers), *(worker.run() for worker in workers))


async def _refresh(registry: Registry, workers: Sequence[SteppedWorker]) -> None:
    """Refresh all workers in Redis once per second, as each one's publisher would.

    One command serves all: a thousand publishers would take the core that the router needs.
    """
    turn = 0
    while True:
        now_ms = time.time_ns() // 1_000_000
        pairs = (part for worker in workers for part in (now_ms, worker.incarnation))
        await registry.send(("ZADD", registry.key("kv:live"), *pairs))
        for worker in workers[turn::_REFRESH_TURNS]:
            await registry.blocks.refresh(worker.incarnation)
            await registry.heartbeat(worker.record())
        turn = (turn + 1) % _REFRESH_TURNS
        await asyncio.sleep(1.0)


def main(
    redis: Annotated[str, typer.Option(help="URL of the registry.")],
    count: Annotated[int, typer.Option(help="Number of workers.")] = 4,
    step_s: Annotated[float, typer.Option("--step-s", help="Seconds between steps.")] = 0.006,
    context: Annotated[int, typer.Option(help="Tokens of a context.")] = _CONTEXT_TOKENS,
) -> None:
    """Run emulated workers until the process is killed."""
    uvloop.run(serve(redis, count, step_s, context))


if __name__ == "__main__":
    typer.run(main)
