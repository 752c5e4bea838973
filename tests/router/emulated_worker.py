"""A worker of real gRPC and no model: deterministic tokens, and failures on demand.

`python tests/router/emulated_worker.py --port N …` runs it in a process of its own, so that a kill
is a kill; tests that need to look inside run `EmulatedWorker` in their own loop.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import grpc.aio
from batonpb import common_pb2 as common
from batonpb import decode_pb2 as pb
from batonpb.decode_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server

from baton.wire.grpc_options import listen
from baton.wire.tls import FleetTls

KV_GROUP = common.KvGroup(
    id=0,
    layer_ids=range(30),
    num_kv_heads=3,
    head_dim=64,
    block_tokens=16,
    dtype="bf16",
    components=["k", "v"],
)


def answer_token(seed: int, choice: int, index: int) -> int:
    """What every emulated worker answers: a pure function, as with the real engine."""
    return 1000 + (seed * 31 + choice * 7 + index * 13) % 20000


@dataclass
class Script:
    """How the worker behaves."""

    step_s: float = 0.005
    prefill_s: float = 0.0
    second_s: float = 0.0  # more before the second token, as after a hand-off
    answer: list[int] | None = None  # token ids instead of the pure function
    stop_token: int | None = None  # ends the answer after `answer`
    die_at_index: int | None = None  # exit the process when this index would be sent
    hang: bool = False  # take requests and say nothing, not even status
    fail: tuple[str, str, bool] | None = None  # error code, message, retryable
    need_prefill: bool = False  # say that the prefill worker failed
    peer_died: bool = True
    cut_stream_at: int | None = None  # end the stream (once) when this index would be sent
    skip_index: int | None = None  # lose this token once: the router must ask for it
    logprob: float = -0.5
    cached_tokens: int = 0
    streams: int = 0  # how many more requests its reports pretend to run, with a step for each
    bad_seed: int | None = None  # such requests get alternatives without log-probabilities
    lose_end: bool = False  # never confirm the end
    lose_ack: bool = False  # a submission on a call of its own arrives, and its answer is lost
    decode_step_s: float = 0.02
    prefill_tokens_per_s: float = 3000.0
    numerics_id: str = "exact/emulated"
    kv_blocks: int = 512
    scores_slice: int = 0  # prompt tokens whose scores come in one run; 0 = all


@dataclass
class Job:
    """One submission."""

    submission: pb.Submission
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    ended_choices: set[int] = field(default_factory=set)
    replacement: asyncio.Future | None = None
    task: asyncio.Task | None = None


class EmulatedWorker(DecodeServicer):
    """The service, and a log of what the router said."""

    def __init__(self, worker_id: str, role: str = "decode", script: Script | None = None) -> None:
        self.worker_id = worker_id
        self.role = role
        self.script = script or Script()
        self.incarnation = secrets.token_bytes(16)
        self.state = "ready"
        self.epoch = 1
        self.jobs: dict[str, Job] = {}
        self.submissions: list[pb.Submission] = []
        self.unary: list[str] = []
        self.cancels: list[pb.Cancel] = []
        self.resumes: list[pb.Resume] = []
        self.replacements: list[pb.PrefillReplacement] = []
        self.tokens_metadata: list[str] = []
        self.transfer_count = 0
        self.steps = 0
        self.address = ""
        self._queues: set[asyncio.Queue] = set()
        self._server: grpc.aio.Server | None = None
        self._cut = self._skipped = False

    async def start(self, port: int = 0, tls: FleetTls | None = None) -> "EmulatedWorker":
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_DecodeServicer_to_server(self, self._server)
        bound = listen(self._server, f"127.0.0.1:{port}", tls)
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        """Go away at once, as far as the network can tell."""
        for job in self.jobs.values():
            if job.task is not None:
                job.task.cancel()
        if self._server is not None:
            await self._server.stop(grace=0)

    # --- the service ----------------------------------------------------------------------------

    async def Submit(self, request, context):
        self.unary.append(request.request_id)
        self._begin(request)
        if self.script.lose_ack:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        return pb.SubmitAck()

    async def Serve(self, request_iterator, context) -> AsyncIterator[pb.WorkerFrame]:
        metadata = dict(context.invocation_metadata())
        self.tokens_metadata.append(metadata.get("x-baton-fleet-token", ""))
        queue: asyncio.Queue = asyncio.Queue()
        if not self.script.hang:
            queue.put_nowait(pb.WorkerFrame(status=self._status(first=True)))
        self._queues.add(queue)
        reader = asyncio.create_task(self._listen(request_iterator))
        ticker = asyncio.create_task(self._tick(queue))
        try:
            while True:
                frame = await queue.get()
                if frame is None:
                    return
                yield frame
        finally:
            self._queues.discard(queue)
            reader.cancel()
            ticker.cancel()

    async def _tick(self, queue) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.steps += self.script.streams
            if not self.script.hang:
                queue.put_nowait(pb.WorkerFrame(status=self._status()))

    async def _listen(self, frames) -> None:
        async for frame in frames:
            match frame.WhichOneof("frame"):
                case "submit":
                    self._begin(frame.submit)
                case "cancel":
                    self._cancel(frame.cancel)
                case "resume":
                    self._resume(frame.resume)
                case "replacement":
                    self.replacements.append(frame.replacement)
                    job = self.jobs.get(frame.replacement.request_id)
                    if job and job.replacement and not job.replacement.done():
                        job.replacement.set_result(frame.replacement)

    def _status(self, first: bool = False) -> common.WorkerStatus:
        running = sum(1 for job in self.jobs.values() if job.task and not job.task.done())
        status = common.WorkerStatus(
            identity=common.WorkerIdentity(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                epoch=self.epoch,
                role=self.role,
                host="testhost",
                address=self.address,
                pid=os.getpid(),
            ),
            state=self.state,
            kv_blocks=common.BlockCounts(total=self.script.kv_blocks, free=500, cached=8, leased=4),
            running=running + self.script.streams,
            threads=1,
            steps=self.steps,
            transfers=common.TransferTotals(
                count=self.transfer_count, bytes=self.transfer_count * 1000
            ),
            prefill_tokens_per_s=self.script.prefill_tokens_per_s,
            decode_step_s=self.script.decode_step_s,
            highest_ticket=max((s.ticket for s in self.submissions), default=0),
        )
        if first:
            status.capabilities.CopyFrom(
                common.Capabilities(
                    wire=common.WireRange(min=2, max=2),
                    kv_groups=[KV_GROUP],
                    numerics_id=self.script.numerics_id,
                    weights_digest=b"w" * 16,
                    max_context_tokens=8192,
                )
            )
        return status

    # --- requests -------------------------------------------------------------------------------

    def _begin(self, submission: pb.Submission) -> None:
        self.submissions.append(submission)
        job = self.jobs[submission.request_id] = Job(submission)
        job.task = asyncio.create_task(self._run(job))

    def _cancel(self, cancel: pb.Cancel) -> None:
        self.cancels.append(cancel)
        job = self.jobs.get(cancel.request_id)
        if job is None or job.task is None:
            return
        if cancel.choices:
            job.ended_choices |= set(cancel.choices)
        else:
            job.task.cancel()
            self._end(job.submission, error=("cancelled", "cancelled", False))

    def _resume(self, resume: pb.Resume) -> None:
        self.resumes.append(resume)
        job = self.jobs.get(resume.request_id)
        if job is None:
            return
        for choice, tokens in job.tokens.items():
            begin = resume.next_index[choice]
            # One token too early on purpose: the router must drop what it has.
            begin = max(begin - 1, 0)
            self._send_run(job, choice, begin, tokens[begin:], job.finish.get(choice, ""))

    async def _run(self, job: Job) -> None:
        submission, script = job.submission, self.script
        if script.hang:
            await asyncio.sleep(3600)
        prefill = submission.prefill if submission.HasField("prefill") else None
        if script.need_prefill and prefill is not None:
            job.replacement = asyncio.get_running_loop().create_future()
            self._push(
                pb.WorkerFrame(
                    prefill_needed=[
                        pb.PrefillNeeded(
                            request_id=submission.request_id,
                            attempt=submission.attempt,
                            failed=prefill,
                            reason=common.Error(code="transfer_failed", message="it broke"),
                            peer_died=script.peer_died,
                        )
                    ]
                )
            )
            answer = await job.replacement
            if answer.HasField("refuse"):
                self._end(submission, (answer.refuse.code, answer.refuse.message, False))
                return
            prefill = answer.prefill if answer.HasField("prefill") else None
        await asyncio.sleep(script.prefill_s)
        if script.fail is not None:
            self._end(submission, script.fail)
            return
        route = pb.RequestRoute(
            request_id=submission.request_id,
            attempt=submission.attempt,
            prefill_worker_id=prefill.worker_id if prefill else self.worker_id,
            decode_worker_id=self.worker_id,
            mode="disaggregated" if prefill else "colocated",
            cached_tokens=script.cached_tokens,
        )
        if prefill:
            self.transfer_count += 1
        self._push(pb.WorkerFrame(routes=[route]))
        if submission.pooling:
            self._embed(submission)
        else:
            self._score(submission)
            await self._generate(job)
        if not script.lose_end:
            self._end(submission)

    def _embed(self, submission) -> None:
        """(3, 4, length of the prompt, 0): a vector whose direction tells the prompt."""
        vector = struct.pack("<4f", 3, 4, len(submission.prompt_tokens) // 4, 0)
        self._push_run(submission, embedding=vector, finish_reason="stop")

    def _score(self, submission) -> None:
        """-i / 8 for token i; alternatives are the token itself and those behind it."""
        wide = submission.sampling.prompt_logprobs - 1
        if wide < 0:
            return
        count = len(submission.prompt_tokens) // 4
        ids = struct.unpack(f"<{count}I", submission.prompt_tokens)
        slice_rows = self.script.scores_slice or count
        for begin in range(0, max(count - 1, 1), slice_rows):
            rows = range(begin + 1, min(begin + 1 + slice_rows, count))
            top = [ids[i] + k for i in rows for k in range(wide)]
            values = [-i / 8 - k for i in rows for k in range(wide)]
            part = common.PromptLogprobs(
                begin=begin,
                alternatives=wide,
                logprobs=struct.pack(f"<{len(rows)}f", *(-i / 8 for i in rows)),
                ranks=struct.pack(f"<{len(rows)}I", *(1 for _ in rows)),
                top_ids=struct.pack(f"<{len(top)}I", *top),
                top_logprobs=struct.pack(f"<{len(values)}f", *values),
            )
            self._push_run(submission, prompt_logprobs=part)

    def _push_run(self, submission, **fields) -> None:
        run = pb.TokenRun(request_id=submission.request_id, attempt=submission.attempt, **fields)
        self._push(pb.WorkerFrame(tokens=[run]))

    async def _generate(self, job: Job) -> None:
        script, sampling = self.script, job.submission.sampling
        job.tokens = {choice: [] for choice in range(sampling.n)}
        emitted = [0] * sampling.n
        for choice, begun in enumerate(job.submission.emitted):
            emitted[choice] = len(begun.token_ids) // 4
            job.tokens[choice] = list(struct.unpack(f"<{emitted[choice]}I", begun.token_ids))
            if begun.finish_reason:
                job.ended_choices.add(choice)
        length = sampling.max_tokens
        if script.answer is not None:
            length = min(length, len(script.answer))
        for index in range(min(emitted), length):
            if script.die_at_index == index:
                os.kill(os.getpid(), signal.SIGKILL)
            if script.cut_stream_at == index and not self._cut:
                self._cut = True
                for queue in list(self._queues):
                    queue.put_nowait(None)
                self._queues.clear()
            for choice in range(sampling.n):
                if choice in job.ended_choices or index < emitted[choice]:
                    continue
                if script.answer is not None:
                    token = script.answer[index]
                else:
                    token = answer_token(sampling.seed, choice, index)
                job.tokens[choice].append(token)
                last = index == length - 1
                reason = "length" if last and script.stop_token is None else ""
                if last and script.stop_token is not None:
                    reason = "length" if index == sampling.max_tokens - 1 else "stop"
                job.finish[choice] = reason
                if script.skip_index == index and not self._skipped:
                    self._skipped = True
                    continue
                self._send_run(job, choice, index, [token], reason)
            if len(job.ended_choices) == sampling.n:
                return
            await asyncio.sleep(script.step_s + (0 if index else script.second_s))

    def _send_run(self, job: Job, choice: int, index: int, ids: list[int], reason: str) -> None:
        sampling = job.submission.sampling
        run = pb.TokenRun(
            request_id=job.submission.request_id,
            attempt=job.submission.attempt,
            choice=choice,
            index=index,
            token_ids=struct.pack(f"<{len(ids)}I", *ids),
            finish_reason=reason,
        )
        if reason == "stop":
            run.has_stop_token, run.stop_token_id = True, self.script.stop_token
        if self.script.bad_seed == sampling.seed:
            run.logprobs.append(common.TokenLogprob(top_ids=b"\0\0\0\0"))
        if sampling.logprobs >= 0:
            for token in ids:
                top = [token + k for k in range(sampling.logprobs)]
                run.logprobs.append(
                    common.TokenLogprob(
                        logprob=self.script.logprob,
                        top_ids=struct.pack(f"<{len(top)}I", *top),
                        top_logprobs=[self.script.logprob - k for k in range(len(top))],
                    )
                )
        self._push(pb.WorkerFrame(tokens=[run]))

    def _end(self, submission, error: tuple[str, str, bool] | None = None) -> None:
        end = pb.RequestEnd(
            request_id=submission.request_id,
            attempt=submission.attempt,
            times=pb.RequestTimes(
                queue_ns=1000,
                prefill_ns=int(self.script.prefill_s * 1e9) + 2_000_000,
                decode_ns=1000,
                input_ns=max(int(self.script.prefill_s * 1e9), 3_000_000),
                output_ns=500_000,
            ),
        )
        if error is not None:
            code, message, retryable = error
            end.error.CopyFrom(common.Error(code=code, message=message, retryable=retryable))
        self._push(pb.WorkerFrame(ends=[end]))

    def _push(self, frame: pb.WorkerFrame) -> None:
        for queue in self._queues:
            queue.put_nowait(frame)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--role", default="decode")
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--prefill-s", type=float, default=0.0)
    parser.add_argument("--die-at-index", type=int)
    arguments = parser.parse_args()
    script = Script(
        step_s=arguments.step_s,
        prefill_s=arguments.prefill_s,
        die_at_index=arguments.die_at_index,
    )
    worker = EmulatedWorker(arguments.id, arguments.role, script)
    await worker.start(arguments.port)
    print(worker.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
