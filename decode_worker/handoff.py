"""Takes one prompt's KV over: moves ``HandoffReceiver``'s actions to gRPC, pool and engine."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
from batonpb import decode_pb2
from batonpb import prefill_pb2 as pb

from decode_worker.peers import PeerGoneError, PeerRefusedError, Peers
from decode_worker.prefill_link import SILENCE_S, PrefillStream
from engine.core import events as ev
from engine.core.params import SampledToken
from engine.core.prompt_outputs import PromptLogprobsIntake
from engine.process import messages
from engine.process.handle import EngineHandle
from kvtransfer import chunk, receiver
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import HandoffReceiver, ReceiverState
from telemetry.metrics import Metrics
from wire import codecs


class HandoffIntake:
    """The receiving half of one hand-off.

    Args:
        submission: The request.
        engine_id: Its name at the engine.
        engine: The engine.
        pool: Its KV pool.
        peers: Connections to prefill workers.
        identity: Of this worker.
        metrics: Of this worker.
        on_first: Called once per prefill worker that draws the first tokens.
        on_ask: Called when another prefill worker is needed: (reason, its incarnation is gone).
        on_commit: Called with the payload bytes when all KV has arrived.
    """

    def __init__(
        self,
        submission: decode_pb2.Submission,
        engine_id: str,
        engine: EngineHandle,
        pool: chunk.PoolView,
        peers: Peers,
        identity: Any,
        metrics: Metrics,
        on_first: Callable[[pb.FirstTokens, str], None],
        on_ask: Callable[[str, bool], None],
        on_commit: Callable[[int], None],
    ) -> None:
        self.submission = submission
        self.target: decode_pb2.PrefillTarget = submission.prefill
        self.first: tuple[SampledToken, ...] | None = None
        self.prompt_outputs: ev.PromptOutputsReady | None = (
            None  # with the first tokens, if anything is wanted
        )
        self.ended_choices: set[int] = set()
        self.committed = False
        self.taken_over = False
        self.transfer_ns = 0
        self._engine_id = engine_id
        self._engine = engine
        self._pool = pool
        self._peers = peers
        self._identity = identity
        self._metrics = metrics
        self._on_first = on_first
        self._on_ask = on_ask
        self._on_commit = on_commit
        self._machine = HandoffReceiver(pool.geometry, len(submission.prompt_tokens) // 4)
        self._link: PrefillStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulling_since_ns = 0
        self._when_drained: Callable[[], None] | None = None
        # Then prefill's own word is the whole answer, and no KV is needed here.
        self._one_token = submission.sampling.max_tokens == 1 or bool(submission.pooling)
        self._scores = PromptLogprobsIntake(len(submission.prompt_tokens) // 4 - 1)

    # ---------------------------------------------------------------- events from outside

    def on_report(self, report: Any) -> None:
        """The engine speaks of our claim."""
        match report:
            case ev.Reserved():
                now_ns = time.monotonic_ns()
                self._perform(self._machine.reserved(report.generation, report.skip_blocks, now_ns))
            case ev.Bound():
                self._perform(self._machine.bound(report.generation, report.blocks))
            case ev.Revoked():
                self.committed = False  # the engine had not seen the commit
                self._perform(self._machine.revoked(report.generation))

    def replaced(self, target: decode_pb2.PrefillTarget) -> None:
        """The router named another prefill worker."""
        if self._machine.state is ReceiverState.NO_PEER:
            self.target = target
            self._perform(self._machine.replaced(time.monotonic_ns()))

    def compute_locally(self) -> None:
        """The router gave disaggregation up."""
        self._perform(self._machine.compute_locally())

    def tick(self, now_ns: int) -> None:
        """Notice a peer without progress."""
        self._perform(self._machine.tick(now_ns))

    def cancel(self, when_drained: Callable[[], None]) -> None:
        """Stop; ``when_drained`` is called as soon as nothing writes into the pages."""
        self._perform(self._machine.cancel())
        self._when_drained = when_drained
        self._drained()

    @property
    def payload_bytes(self) -> int:
        """KV bytes stored."""
        return self._machine.payload_bytes

    @property
    def repairs(self) -> int:
        """Frames pulled again."""
        return self._machine.repairs

    @property
    def skip_blocks(self) -> int:
        """Blocks of the prompt that were here already."""
        return self._machine.skip_blocks

    # ---------------------------------------------------------------- actions

    def _perform(self, actions: list[receiver.Action]) -> None:
        send = self._engine.client.send
        for action in actions:
            match action:
                case receiver.Open():
                    self._open_stream(action)
                case receiver.Bind():
                    send(messages.Bind(self._engine_id, action.generation))
                case receiver.Pull():
                    self._spawn(self._pull(action, self.target, self._machine.generation))
                case receiver.Commit():
                    self._commit(action.generation)
                case receiver.CloseStream(release=True):
                    self._close_stream(pb.PrefillControl(release=pb.Release()))
                case receiver.CloseStream():
                    self._close_stream(pb.PrefillControl(cancel=pb.PrefillCancel()))
                case receiver.AskForPeer():
                    self._metrics.inc("baton_transfers", outcome="failed")
                    self._on_ask(action.reason, action.peer_died)
                case receiver.Drained():
                    send(messages.Drained(self._engine_id, action.generation))
                case receiver.TakeOver():
                    self.taken_over = True
                    send(messages.ComputeLocally(self._engine_id, self._first_ids()))

    def _first_ids(self) -> tuple[int | None, ...] | None:
        if self.first is None:
            return None
        return tuple(
            None if choice in self.ended_choices else token.token
            for choice, token in enumerate(self.first)
        )

    def _commit(self, generation: int) -> None:
        self.committed = True
        seconds = 0.0
        if self._pulling_since_ns:
            self.transfer_ns = time.monotonic_ns() - self._pulling_since_ns
            seconds = self.transfer_ns / 1e9
        self._engine.client.send(
            messages.Commit(self._engine_id, generation, self._first_ids() or ())
        )
        if not self.submission.probe:
            self._on_commit(self.payload_bytes)
            self._metrics.inc("baton_transfers", outcome="committed")
            self._metrics.inc("baton_transfer_bytes", self.payload_bytes, direction="received")
            self._metrics.observe("baton_transfer_seconds", seconds)

    # ---------------------------------------------------------------- the control stream

    async def _run_stream(self, link: PrefillStream, opened: receiver.Open) -> None:
        worker_id = link.target.worker_id
        try:
            await self._peers.greet(link.target)
            if link is not self._link:
                return  # cancelled meanwhile
            link.call = self._peers.prefill(link.target)
            await self._talk(link, opened)
            await self._lost(link, f"{worker_id} ended the stream")
        except PeerGoneError as gone:
            self._tell(link, self._machine.stream_lost, True, str(gone))
        except PeerRefusedError as refused:
            self._tell(link, self._machine.prefill_failed, str(refused))
        except TimeoutError:
            reason = f"{worker_id} was silent for {SILENCE_S:.0f} s"
            self._tell(link, self._machine.prefill_failed, reason)
        except grpc.aio.AioRpcError as error:
            await self._lost(link, f"stream to {worker_id} broke: {error.details()}")
        except (asyncio.CancelledError, asyncio.InvalidStateError):
            # We closed the call ourselves, or its channel was closed for another hand-off's sake.
            await self._lost(link, f"the connection to {worker_id} was closed")

    def _tell(
        self, link: PrefillStream, event: Callable[..., list[receiver.Action]], *arguments: Any
    ) -> None:
        """Pass an event of a stream on, unless the stream was given up meanwhile."""
        if link is self._link:
            self._perform(event(*arguments))

    async def _lost(self, link: PrefillStream, reason: str) -> None:
        """A stream broke. Is it the peer, or only the stream?"""
        if link is not self._link:
            return
        try:
            await self._peers.greet(link.target, again=True)
        except PeerGoneError as gone:
            self._tell(link, self._machine.stream_lost, True, str(gone))
        except PeerRefusedError as refused:
            self._tell(link, self._machine.prefill_failed, str(refused))
        else:
            self._tell(link, self._machine.stream_lost, False, reason)

    async def _talk(self, link: PrefillStream, opened: receiver.Open) -> None:
        """Speak and listen until the far end closes the stream."""
        call = link.call
        await link.write(pb.PrefillControl(start=self._start_message(link.target, opened)))
        renewals = asyncio.create_task(link.renew())
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    event = await call.read()
                if event is grpc.aio.EOF:
                    return
                if link is self._link:
                    self._on_event(event)
        finally:
            renewals.cancel()

    def _start_message(
        self, target: decode_pb2.PrefillTarget, opened: receiver.Open
    ) -> pb.PrefillStart:
        request = self.submission
        return pb.PrefillStart(
            request_id=request.request_id,
            attempt=request.attempt,
            ticket=request.ticket,
            priority=request.priority,
            prompt_tokens=request.prompt_tokens,
            sampling=request.sampling,
            tenant=request.tenant,
            hash_seed=request.hash_seed,
            deadline_remaining_ns=request.deadline_remaining_ns,
            traceparent=request.traceparent,
            lease_ms=request.lease_ms,
            skip_blocks=opened.skip_blocks,
            expected_incarnation=target.incarnation,
            decode_incarnation=self._identity.incarnation,
            decode_worker_id=self._identity.worker_id,
            generation=opened.generation,
            probe=request.probe,
            adapter=request.adapter if request.HasField("adapter") else None,
            router_id=request.router_id,
            pooling=request.pooling,
        )

    def _on_event(self, event: pb.PrefillEvent) -> None:
        now_ns = time.monotonic_ns()
        match event.WhichOneof("event"):
            case "accepted":
                self._perform(self._machine.accepted(event.accepted.resumed, now_ns))
            case "heartbeat":
                self._perform(self._machine.peer_lives(now_ns))
            case "published" if not self._one_token:
                message = event.published
                kv_slice = KvSlice(
                    message.layer_begin,
                    message.layer_count,
                    0,
                    self._pool.geometry.num_kv_heads,
                    message.block_begin,
                    message.block_count,
                    message.valid_tokens,
                    message.kv_group,
                )
                self._perform(self._machine.published(kv_slice, now_ns))
            case "first_tokens":
                self._first(event.first_tokens)
            case "commit" if not self._one_token:
                record = event.commit
                self._perform(
                    self._machine.commit_record(
                        record.rectangles,
                        record.payload_bytes,
                        record.valid_tokens,
                        record.manifest_digest,
                    )
                )
            case "published" | "commit":  # not wanted, but prefill says nothing else meanwhile
                self._perform(self._machine.peer_lives(now_ns))
            case "failed":
                self._perform(self._machine.prefill_failed(event.failed.message))

    def _first(self, message: pb.FirstTokens) -> None:
        """First tokens are facts once sent: those of a second prefill worker change nothing."""
        if message.HasField("prompt_logprobs"):
            part = message.prompt_logprobs
            self._scores.put(part.begin, codecs.prompt_logprobs_from_wire(part))
        if not (message.choices or message.embedding):
            return  # slices of the scores; the first tokens are still to come
        if self.first is None:
            scores = self._scores.complete
            if message.embedding or scores is not None:
                self.prompt_outputs = ev.PromptOutputsReady(
                    self._engine_id, scores, message.embedding
                )
            self.first = tuple(
                codecs.logprob_from_wire(c.token_id, c.logprob if c.has_logprob else None)
                for c in message.choices
            )
            self._on_first(message, self.target.worker_id)

    def _open_stream(self, opened: receiver.Open) -> None:
        self._close_stream(None)
        link = self._link = PrefillStream(self.target)
        self._spawn(self._run_stream(link, opened))

    def _close_stream(self, message: pb.PrefillControl | None) -> None:
        """Stop listening. Reading goes on until the far end closes, so that it hears us out."""
        link, self._link = self._link, None
        if link is None or link.call is None:
            return
        if message is None:
            link.call.cancel()
        else:
            self._spawn(link.say_last(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---------------------------------------------------------------- frames

    async def _pull(
        self, pull: receiver.Pull, target: decode_pb2.PrefillTarget, generation: int
    ) -> None:
        self._pulling_since_ns = self._pulling_since_ns or time.monotonic_ns()
        kv_slices, epoch = pull.kv_slices, pull.epoch
        request_id, attempt = self.submission.request_id, self.submission.attempt
        request = pb.PullRequest(
            request_id=request_id,
            attempt=attempt,
            generation=generation,
            source_incarnation=target.incarnation,
            kv_slices=[kv_slice.to_wire() for kv_slice in kv_slices],
        )
        bound = chunk.binding(request_id, attempt, generation, target.incarnation)
        waiting = deque(kv_slices)
        size = sum(kv_slice.payload_bytes(self._pool.geometry) for kv_slice in kv_slices)
        budget_s = 4 * size / self._peers.edge(target.worker_id).bytes_per_s + 1.0
        began_s = asyncio.get_running_loop().time()
        until_s = began_s + budget_s
        call = self._peers.pull(target, request)
        reason = f"{target.worker_id} sent fewer frames than were asked for"
        try:
            while waiting:
                async with asyncio.timeout_at(until_s):
                    frame = await call.read()
                if frame is grpc.aio.EOF:
                    break
                if not await self._take(frame, waiting.popleft(), bound, epoch):
                    break
        except TimeoutError:
            reason = f"a pull from {target.worker_id} outlasted its budget of {budget_s:.1f} s"
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            reason = f"a pull from {target.worker_id} broke: {error}"
        finally:
            call.cancel()
        if waiting:
            self._perform(self._machine.pull_failed(waiting, reason, epoch))
        else:  # while prefill computes, only the time of the pull itself says how fast the edge is
            seconds = asyncio.get_running_loop().time() - began_s
            self._peers.edge(target.worker_id).note(size, seconds)

    async def _take(self, frame: bytes, kv_slice: KvSlice, bound: bytes, epoch: int) -> bool:
        """Verify and store one frame; False ends the pull (it is not wanted any more)."""
        if not self._machine.frame_arrived(kv_slice, epoch):
            return False
        blocks = self._machine.blocks
        try:
            await asyncio.to_thread(self._verify_and_store, frame, kv_slice, bound, blocks)
        except chunk.ChunkError as error:
            self._metrics.inc("baton_chunks_refused", cause=error.cause)
            self._metrics.inc("baton_chunks_repaired")
            actions = self._machine.frame_bad(kv_slice, epoch)
        except _GoneError:
            actions = self._machine.frame_gone(kv_slice, epoch)
        else:
            actions = self._machine.frame_stored(kv_slice, epoch, time.monotonic_ns())
        self._perform(actions)
        self._drained()
        return True

    def _verify_and_store(
        self, frame: bytes, kv_slice: KvSlice, bound: bytes, blocks: tuple[int, ...]
    ) -> None:
        header, payload = chunk.decode(frame)
        if header.HasField("error"):
            raise _GoneError(header.error.message)
        chunk.verify(header, payload, kv_slice, self._pool.geometry, bound)
        self._pool.write(blocks, kv_slice, payload)

    def _drained(self) -> None:
        if self._when_drained is not None and not self._machine.writing:
            when_drained, self._when_drained = self._when_drained, None
            when_drained()


class _GoneError(Exception):
    """The peer does not hold these blocks (any more)."""
