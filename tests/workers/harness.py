"""Real worker processes (emulated engine, real gRPC) and a minimal router to drive them."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
from batonpb import common_pb2, decode_pb2_grpc
from batonpb import decode_pb2 as pb

from baton.engine.settings import EngineSettings
from baton.registry.types import WorkerRecord
from baton.types.prompt_outputs import PromptLogprobsIntake
from baton.wire import codecs
from baton.wire.capability import sign
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_options import open_channel
from baton.wire.submission import prefix_request_id
from baton.wire.tls import FleetTls
from baton.wire.tokens import pack_tokens, unpack_tokens
from fleet.worker.worker import Worker, WorkerSettings
from tests.preloaded import PreloadedProcess

TOKEN = "fleet-token"
NO_REDIS = "redis://127.0.0.1:1"  # serving must not need it


def worker_settings(**fields: object) -> WorkerSettings:
    """Settings of a worker and of its engine, given side by side."""
    engine = {name: fields.pop(name) for name in EngineSettings.__struct_fields__ if name in fields}
    return WorkerSettings(engine=EngineSettings(**{"max_adapters": 8, **engine}), **fields)


def emulated_settings(worker_id: str, **changes: object) -> WorkerSettings:
    """Settings of a worker with an emulated engine."""
    fields = {
        "worker_id": worker_id,
        "role": worker_id.split("-", maxsplit=1)[0],
        "epoch": 1,
        "fleet": "test",
        "model": "emulated",
        "served_model_name": "emulated",
        "redis_url": NO_REDIS,
        "fleet_token": TOKEN,
        "kv_blocks": 128,
        "probe_s": 0.0,
        "check_every_step": True,
        **changes,
    }
    return worker_settings(**fields)


class WorkerProcess:
    """One worker in a process of its own."""

    def __init__(self, process: PreloadedProcess, record: WorkerRecord) -> None:
        self.process = process
        self.record = record

    @classmethod
    async def start(
        cls,
        worker_id: str,
        program: str = "fleet.worker.worker",
        ready_s: float = 60.0,
        damage: str = "",
        **changes: object,
    ) -> "WorkerProcess":
        """``damage`` is that of its frames, as for `FrameTamperer.parse`."""
        settings = msgspec.json.encode(emulated_settings(worker_id, **changes))
        if damage:
            program = "tests.workers.damaging_worker"
            settings = damage.encode() + b"\n" + settings
        process = await PreloadedProcess.start(program, settings)
        line = await asyncio.wait_for(process.stdout.readline(), ready_s)
        return cls(process, msgspec.json.decode(line, type=WorkerRecord))

    def target(self, request_id: str, reader: WorkerRecord) -> pb.PrefillTarget:
        """For one request of a decode worker, which may pull its KV."""
        holder = self.record.incarnation
        return pb.PrefillTarget(
            worker_id=self.record.worker_id,
            incarnation=holder,
            address=self.record.address,
            capability=sign(FleetToken(TOKEN), request_id, holder, reader.incarnation, time.time()),
        )

    def kill_engine(self) -> None:
        os.kill(self.record.pid, signal.SIGKILL)

    def signal_all(self, number: int) -> None:
        for pid in (self.record.pid, self.process.pid):
            os.kill(pid, number)

    async def stop(self) -> int:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal_all(signal.SIGCONT)
                self.process.terminate()
        try:
            return await asyncio.wait_for(self.process.wait(), 10)
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()


def prefix_source(
    holder: WorkerProcess, blocks: int, pull_id: str, reader: WorkerRecord
) -> common_pb2.PrefixSource:
    """Leading blocks of a prompt at a worker, which another one may pull."""
    target = holder.target(pull_id, reader)
    return common_pb2.PrefixSource(
        worker_id=target.worker_id,
        incarnation=target.incarnation,
        address=target.address,
        blocks=blocks,
        capability=target.capability,
    )


class MiniRouter:
    """One Serve stream; collects what each request gets."""

    def __init__(
        self,
        worker: WorkerProcess | Worker,
        router_id: str = "router",
        tls: FleetTls | None = None,
    ) -> None:
        self.worker = worker
        self.tls = tls
        self.target = WorkerProcess.target
        self.router_id = router_id
        self.tokens: dict[str, dict[int, list[int]]] = {}
        self.scores: dict[str, PromptLogprobsIntake] = {}
        self.vectors: dict[str, bytes] = {}
        self.largest_frame = 0
        self.repeats = 0
        self.routes: dict[str, pb.RequestRoute] = {}
        self.ends: dict[str, pb.RequestEnd] = {}
        self.asks: list[pb.PrefillNeeded] = []
        self.status: common_pb2.WorkerStatus | None = None
        self._reported: common_pb2.WorkerStatus | None = None  # the last, on this stream
        self.lost: str = ""
        self.streams = 0
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()  # gRPC takes one write at a time
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> None:
        self.status = self._reported = None
        self.streams += 1
        self.lost = ""
        self._channel = open_channel(self.worker.record.address, self.tls)
        stub = decode_pb2_grpc.DecodeStub(self._channel)
        self.call = stub.Serve(metadata=FleetToken(TOKEN).metadata)
        hello = pb.Hello(router_id=self.router_id, wire=common_pb2.WireRange(min=2, max=2))
        await self.send(hello=hello)
        self._tasks = [
            asyncio.create_task(self._read(self.call)),
            asyncio.create_task(self._beat()),
        ]
        await self.until(lambda: self.status is not None)
        assert self.status.capabilities.numerics_id, "a stream begins with what the worker can"

    async def send(self, **frame: object) -> None:
        async with self._lock:
            await self.call.write(pb.RouterFrame(**frame))

    async def submit(
        self,
        name: str,
        prompt: list[int],
        prefill: WorkerProcess | None = None,
        adapter: common_pb2.Adapter | None = None,
        emitted: Sequence[list[int]] = (),
        prefix: tuple[WorkerProcess, int] | None = None,
        prefix_then: Sequence[tuple[WorkerProcess, int]] = (),
        **fields,
    ) -> None:
        sampling = {"max_tokens": 8, "n": 1, "top_p": 1, "repetition_penalty": 1, "logprobs": -1}
        sampling |= fields.pop("sampling", {})
        submission = pb.Submission(
            request_id=name,
            attempt=1,
            ticket=len(self.tokens),
            prompt_tokens=pack_tokens(prompt),
            sampling=common_pb2.SamplingParams(**sampling),
            hash_seed=b"s" * 16,
            router_id=self.router_id,
            lease_ms=1500,
            prefill=self.target(prefill, name, self.worker.record) if prefill else None,
            emitted=[pb.Emitted(token_ids=pack_tokens(tokens)) for tokens in emitted],
        )
        if adapter is not None:
            submission.adapter.CopyFrom(adapter)
        if prefix is not None:
            reader = (prefill or self.worker).record  # who computes the prompt
            sources = [
                prefix_source(holder, blocks, prefix_request_id(name, link), reader)
                for link, (holder, blocks) in enumerate((prefix, *prefix_then))
            ]
            submission.prefix.CopyFrom(sources[0])
            submission.prefix_then.extend(sources[1:])
        for key, value in fields.items():
            setattr(submission, key, value)
        self.tokens[name] = {choice: list(tokens) for choice, tokens in enumerate(emitted)}
        self.scores[name] = PromptLogprobsIntake(len(prompt) - 1)
        await self.send(submit=submission)

    async def submit_alone(self, submission: pb.Submission) -> None:
        """The unary call for long prompts."""
        stub = decode_pb2_grpc.DecodeStub(self._channel)
        await stub.Submit(submission, metadata=FleetToken(TOKEN).metadata)

    async def ended(self, name: str, timeout_s: float = 20.0) -> pb.RequestEnd:
        await self.until(lambda: name in self.ends, timeout_s)
        return self.ends[name]

    async def until(self, condition, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                assert not self.lost.startswith("a hole"), self.lost
                self._changed.clear()
                await self._changed.wait()

    async def baseline(self, timeout_s: float = 5.0) -> None:
        """No block is leased or quarantined, nothing runs or waits."""
        self.status = None

        def idle() -> bool:
            if self.status is None:
                return False
            blocks = self.status.kv_blocks
            parts = blocks.free + blocks.cached + blocks.leased + blocks.quarantined
            assert parts == blocks.total
            busy = blocks.leased + blocks.quarantined + self.status.running + self.status.waiting
            return busy == 0

        await self.until(idle, timeout_s)

    async def resume(self, name: str) -> pb.RequestEnd:
        """Connect and ask for the rest, again if that stream breaks too, as a router does."""
        for _ in range(3):
            await self.connect()
            lacks = [len(tokens) for _, tokens in sorted(self.tokens[name].items())]
            await self.send(resume=pb.Resume(request_id=name, attempt=1, next_index=lacks))
            await self.until(lambda: name in self.ends or self.lost, 20.0)
            if name in self.ends:
                return self.ends[name]
            await self.drop_stream()
        raise AssertionError(f"every stream breaks: {self.lost}")

    async def drop_stream(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.call.cancel()
        await self._channel.close()

    async def _beat(self) -> None:
        with contextlib.suppress(Exception):
            while True:
                await asyncio.sleep(0.3)
                await self.send(heartbeat=pb.Heartbeat())

    async def _read(self, call) -> None:
        try:
            async for frame in call:
                self._take(frame)
                self._changed.set()
        except Exception as error:
            self.lost = str(error) or "lost"
            self._changed.set()

    def _take(self, frame: pb.WorkerFrame) -> None:
        self.largest_frame = max(self.largest_frame, frame.ByteSize())
        for run in frame.tokens:
            if run.HasField("prompt_logprobs"):
                assert not self.tokens.get(run.request_id), "scores come before tokens"
                part = run.prompt_logprobs
                intake = self.scores[run.request_id]
                assert intake.put(part.begin, codecs.prompt_logprobs_from_wire(part))
                continue
            if run.embedding:
                assert run.request_id not in self.vectors
                self.vectors[run.request_id] = run.embedding
                continue
            answers = self.tokens.setdefault(run.request_id, {})
            answer = answers.get(run.choice, [])
            fresh = unpack_tokens(run.token_ids)
            self.repeats += max(0, len(answer) - run.index)
            if run.index > len(answer) and self.streams > 1:
                continue  # from before the resume arrived, which repeats it
            assert run.index <= len(answer), "a hole in the answer"
            answers[run.choice] = answer
            answer[run.index :] = (
                fresh if run.index + len(fresh) >= len(answer) else answer[run.index :]
            )
        for route in frame.routes:
            self.routes[route.request_id] = route
        for end in frame.ends:
            assert end.request_id not in self.ends or self.repeats >= 0
            self.ends[end.request_id] = end
        self.asks.extend(frame.prefill_needed)
        if frame.HasField("status"):
            self.status = self._reported = frame.status
        elif frame == pb.WorkerFrame(step=frame.step, heard=frame.heard):  # a beat: nothing is new
            self.status = self._reported

    async def close(self) -> None:
        await self.drop_stream()


@contextlib.asynccontextmanager
async def workers(*names: str, **changes: object) -> AsyncIterator[list[WorkerProcess]]:
    """Start workers; ``changes`` apply to all, ``prefill_...``/``decode_...`` by role."""

    def fields(name: str) -> dict[str, object]:
        role = name.split("-", maxsplit=1)[0]
        own = {k: v for k, v in changes.items() if not k.startswith(("prefill_", "decode_"))}
        prefix = f"{role}_"
        own |= {k.removeprefix(prefix): v for k, v in changes.items() if k.startswith(prefix)}
        return own

    started = await asyncio.gather(*(WorkerProcess.start(name, **fields(name)) for name in names))
    try:
        yield list(started)
    finally:
        await asyncio.gather(*(worker.stop() for worker in started))


@contextlib.asynccontextmanager
async def worker_here(worker_id: str, **changes: object) -> AsyncIterator[Worker]:
    """A worker whose shell is this process, so that a test can reach into it."""
    worker = await Worker.start(emulated_settings(worker_id, **changes))
    try:
        yield worker
    finally:
        await worker.stop()


@contextlib.asynccontextmanager
async def routed(
    worker: WorkerProcess | Worker, router_id: str = "router", tls: FleetTls | None = None
) -> AsyncIterator[MiniRouter]:
    router = MiniRouter(worker, router_id, tls)
    await router.connect()
    try:
        yield router
    finally:
        await router.close()
