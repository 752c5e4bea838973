"""Receives the KV of one prompt: carries out what ``HandoffReceiver`` decides.

DecodeRequest ──verbs──▶ Handoff ──▶ HandoffReceiver (decides)
      ▲                   │  ├─────▶ PrefillStream (control: one per prefill worker tried)
      └─HandoffListener───┘  └─────▶ FramePuller   (bytes, into the pool)
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from batonpb import decode_pb2
from batonpb import prefill_pb2 as pb

from baton.engine.process import messages
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.tasks import BackgroundTasks
from baton.types import events as ev
from baton.types.errors import BatonError, TransferError, UnavailableError
from baton.types.params import SampledToken
from baton.types.prompt_outputs import PromptLogprobsIntake
from baton.wire.codecs import first_tokens_from_wire, prompt_logprobs_from_wire
from baton.wire.submission import prefill_start
from baton.wire.tokens import count_tokens
from decode_worker.frame_puller import FramePuller
from decode_worker.parts import WorkerParts
from decode_worker.prefill_stream import PrefillStream
from kvtransfer import receiver_actions
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import HandoffReceiver, ReceiverState

_ENGINE_WAY = "engine"  # transport name of what an engine loads by itself, for rates of edges


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFigures:
    """Figures of a complete hand-off. Decode already had ``skip_blocks``.

    If the engine loaded the KV by itself, ``payload_bytes`` are those of all other tokens of the
    prompt, and the duration includes the first decode step.
    """

    duration_ns: int
    payload_bytes: int
    repaired_frames: int
    skip_blocks: int


class HandoffListener:
    """Owner of the request that a hand-off is for; it need not handle everything."""

    def on_first_tokens(
        self, done: ev.PromptDone, outputs: ev.PromptOutputsReady | None, worker_id: str
    ) -> None:
        """Handle the first tokens. Called once, even if several prefill workers send them."""

    def on_peer_needed(
        self, failed: decode_pb2.PrefillTarget, error: BatonError, peer_died: bool
    ) -> None:
        """Request another prefill worker; ``peer_died``: the incarnation is gone."""

    def on_peer_still_needed(self) -> None:
        """Repeat the request for another prefill worker, which nothing has answered."""

    def on_committed(self, payload_bytes: int) -> None:
        """Note that all KV has arrived and the engine decodes."""

    def on_drained(self) -> None:
        """Note that nothing writes into the pages any more, after ``cancel``."""


class ReceivedHandoff:
    """Receiving side of one hand-off."""

    def __init__(
        self,
        submission: decode_pb2.Submission,
        engine_id: str,
        parts: WorkerParts,
        listener: HandoffListener,
    ) -> None:
        self._submission = submission
        self._target: decode_pb2.PrefillTarget = submission.prefill
        self._engine_id = engine_id
        self._parts = parts
        self._listener = listener
        prompt_tokens = count_tokens(submission.prompt_tokens)
        pool = parts.pool
        self._machine = HandoffReceiver(pool.geometry, prompt_tokens, parts=pool.parts)
        self._puller = FramePuller(submission, self._machine, parts, self._perform)
        self._stream: PrefillStream | None = None
        self._tasks = BackgroundTasks("hand-off", parts.count_task_failure)
        self._first: tuple[SampledToken, ...] | None = None
        self._ended_choices = {
            choice for choice, emitted in enumerate(submission.emitted) if emitted.finish_reason
        }
        self._taken_over = False
        self._engine_transfer = b""  # of the prefill worker's engine
        self._load_ns = 0  # when our engine began to load
        self.figures: TransferFigures | None = None  # once all KV is here and the engine has it
        self._cancelled = False
        self._unavailable = False  # the prefill worker is well, but takes no prompts now
        # Then the first token or the embedding is the whole response, and no KV is needed.
        self._one_token = submission.sampling.max_tokens == 1 or bool(submission.pooling)
        self._prompt_logprobs = PromptLogprobsIntake(prompt_tokens - 1)

    def on_report(self, report: object) -> None:
        """Handle an engine report on the request's reservation."""
        match report:
            case ev.Reserved():
                now_ns = ALIVE.now_ns()
                self._perform(self._machine.reserved(report.generation, report.skip_blocks, now_ns))
            case ev.Bound():
                self._perform(self._machine.bound(report.generation, report.blocks))
            case ev.Revoked():
                self.figures = None  # the engine had not seen the commit
                self._perform(self._machine.revoked(report.generation))
            case ev.Loaded():
                self._perform(self._machine.loaded(report.generation))
            case ev.LoadFailed():
                self._perform(self._machine.load_failed(report.generation, report.reason))

    @property
    def credit_wait_s(self) -> float:
        """Total time that pulls have waited for credit, in seconds; infinite while one waits."""
        return math.inf if self._puller.waits else self._puller.waited_s

    @property
    def needs_peer(self) -> bool:
        """True while the hand-off waits for the router to name a prefill worker."""
        return self._machine.state is ReceiverState.NO_PEER

    def replace_peer(self, target: decode_pb2.PrefillTarget) -> None:
        """Continue with the prefill worker that the router named."""
        if self.needs_peer:
            self._target = target
            self._perform(self._machine.replaced(ALIVE.now_ns()))

    def ask_again(self) -> None:
        """Repeat a request for a prefill worker that the lost stream may have dropped."""
        self._perform(self._machine.ask_again())

    def compute_locally(self) -> None:
        """Compute the prompt here: the router gave disaggregation up."""
        self._perform(self._machine.compute_locally())

    def tick(self, now_ns: int) -> None:
        """Detect a peer without progress, unless this worker lacks the credit."""
        if self._puller.waits:
            self._machine.held_back(now_ns)
        self._perform(self._machine.tick(now_ns))

    def end_choices(self, choices: Iterable[int]) -> bool:
        """Note ended choices; when all end before any KV is needed, cancel the hand-off.

        Returns:
            Whether the engine already decodes and must be notified.
        """
        self._ended_choices.update(choices)
        loads = self._machine.state is ReceiverState.LOADING
        decodes = self.figures is not None or self._taken_over or loads
        if not decodes and len(self._ended_choices) == self._submission.sampling.n:
            self.cancel()
        return decodes

    def cancel(self) -> None:
        """Cancel; ``on_drained`` is called as soon as nothing writes into the pages."""
        self._cancelled = True
        if self._stream is not None and self.figures is None and not self._submission.probe:
            self._parts.metrics.inc("baton_transfers", outcome="abandoned")
        self._perform(self._machine.cancel())

    def forget(self) -> None:
        """Drop the puller's reference to this object, unless a task still runs."""
        if not self._tasks:
            self._puller.forget()

    def _perform(self, actions: list[receiver_actions.Action]) -> None:
        for action in actions:
            self._carry_out(action)
        if self._cancelled and not self._machine.writing:
            self._cancelled = False
            self._listener.on_drained()

    def _carry_out(self, action: receiver_actions.Action) -> None:
        send = self._parts.engine.client.send
        match action:
            case receiver_actions.OpenStream():
                self._open_stream(action)
            case receiver_actions.BindPages():
                send(messages.Bind(self._engine_id, action.generation))
            case receiver_actions.Pull():
                self._pull(action)
            case receiver_actions.CommitKv():
                self._commit(action.generation)
            case receiver_actions.LoadKv():
                self._load(action.generation)
            case receiver_actions.KvLoaded():
                self._note_loaded()
            case receiver_actions.CloseStream(release=True):
                self._close_stream(pb.PrefillControl(release=pb.Release()))
            case receiver_actions.CloseStream():
                self._puller.drop()
                self._close_stream(pb.PrefillControl(cancel=pb.PrefillCancel()))
            case receiver_actions.AskForPeer(again=True):
                self._listener.on_peer_still_needed()
            case receiver_actions.AskForPeer():
                self._ask_for_peer(action)
            case receiver_actions.Drained():
                send(messages.PagesDrained(self._engine_id, action.generation))
            case receiver_actions.TakeOver():
                self._taken_over = True
                send(messages.ComputeLocally(self._engine_id, self._first_ids()))

    def _first_ids(self) -> tuple[int | None, ...] | None:
        if self._first is None:
            return None
        return tuple(
            None if choice in self._ended_choices else token.token
            for choice, token in enumerate(self._first)
        )

    def _commit(self, generation: int) -> None:
        began_ns = self._puller.began_ns
        duration_ns = time.monotonic_ns() - began_ns if began_ns else 0
        self._parts.engine.client.send(
            messages.Commit(self._engine_id, generation, self._first_ids() or ())
        )
        self._note_committed(duration_ns, self._machine.payload_bytes)

    def _load(self, generation: int) -> None:
        """Let the engine load the KV by itself."""
        self._load_ns = time.monotonic_ns()
        first = self._first_ids() or ()
        self._parts.engine.client.send(
            messages.Commit(self._engine_id, generation, first, self._engine_transfer)
        )

    def _note_loaded(self) -> None:
        duration_ns = time.monotonic_ns() - self._load_ns
        geometry = self._parts.pool.geometry
        skipped_tokens = self._machine.skip_blocks * geometry.block_tokens
        tokens = count_tokens(self._submission.prompt_tokens) - skipped_tokens
        payload_bytes = tokens * geometry.block_bytes // geometry.block_tokens
        # small probes measure latency; `baton doctor` names a transport and sends large ones
        if self._target.transport or not self._submission.probe:
            moving_s = duration_ns / 1e9 - self._parts.engine.rates.decode_step_s
            edge = self._parts.peers.edge(self._target.worker_id)
            edge.note(_ENGINE_WAY, payload_bytes, moving_s)
        self._note_committed(duration_ns, payload_bytes)

    def _note_committed(self, duration_ns: int, payload_bytes: int) -> None:
        self.figures = figures = TransferFigures(
            duration_ns=duration_ns,
            payload_bytes=payload_bytes,
            repaired_frames=self._machine.repairs,
            skip_blocks=self._machine.skip_blocks,
        )
        if not self._submission.probe:
            self._listener.on_committed(figures.payload_bytes)
            metrics = self._parts.metrics
            metrics.inc("baton_transfers", outcome="committed")
            metrics.inc("baton_transfer_bytes", figures.payload_bytes, direction="received")
            metrics.observe("baton_transfer_seconds", figures.duration_ns / 1e9)

    def _open_stream(self, opened: receiver_actions.OpenStream) -> None:
        self._close_stream(None)
        start = prefill_start(
            self._submission,
            self._target,
            self._parts.identity,
            generation=opened.generation,
            skip_blocks=opened.skip_blocks,
        )
        stream = PrefillStream(self._target, start, self._parts.peers, self, self._tasks)
        self._stream = stream
        self._tasks.vital(stream.run(), "prefill stream", stream.broke)

    def _close_stream(self, last_message: pb.PrefillControl | None) -> None:
        stream = self._stream
        self._stream = None
        if stream is None:
            return
        stream.close()
        if last_message is None:
            stream.cancel()
        else:
            self._tasks.spawn(stream.send_last(last_message), "last message")

    def _pull(self, pull: receiver_actions.Pull) -> None:
        def broke(error: Exception) -> None:
            reason = f"a pull failed: {type(error).__name__}: {error}"
            self._perform(self._machine.pull_failed(pull.kv_slices, reason, pull.epoch))

        work = self._puller.pull(pull, self._target, self._machine.generation)
        self._tasks.vital(work, "pull", broke)

    def on_stream_lost(self, peer_gone: bool, reason: str) -> None:
        """Handle the loss of the control stream."""
        self._perform(self._machine.stream_lost(peer_gone, reason))

    def on_refused(self, reason: str) -> None:
        """Handle the refusal of the prefill worker."""
        self._perform(self._machine.prefill_failed(reason))

    def on_event(self, event: pb.PrefillEvent) -> None:
        """Handle an event of the prefill worker."""
        now_ns = ALIVE.now_ns()
        match event.WhichOneof("event"):
            case "accepted":
                frame_bytes = self._parts.peers.frame_bytes(self._target, time.monotonic_ns())
                self._machine.frame_bytes = frame_bytes
                self._perform(self._machine.accepted(event.accepted.resumed, now_ns))
            case "heartbeat":
                self._perform(self._machine.peer_lives(now_ns))
            case "published" if not self._one_token:
                heads = self._parts.pool.geometry.num_kv_heads
                kv_slice = KvSlice.from_published(event.published, heads)
                self._perform(self._machine.published(kv_slice, now_ns))
            case "first_tokens":
                self._on_first_tokens(event.first_tokens)
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
            case "published" | "commit":  # not needed, but a sign of life
                self._perform(self._machine.peer_lives(now_ns))
            case "failed":
                self._unavailable = event.failed.code == UnavailableError.code
                self._perform(self._machine.prefill_failed(event.failed.message))
                self._unavailable = False

    def _ask_for_peer(self, ask: receiver_actions.AskForPeer) -> None:
        error: BatonError = TransferError(ask.reason)
        if self._unavailable:
            error = UnavailableError(ask.reason)
        else:
            self._parts.metrics.inc("baton_transfers", outcome="failed")
        self._listener.on_peer_needed(self._target, error, ask.peer_died)

    def _on_first_tokens(self, message: pb.FirstTokens) -> None:
        if message.HasField("prompt_logprobs"):
            part = message.prompt_logprobs
            self._prompt_logprobs.put(part.begin, prompt_logprobs_from_wire(part))
        if not (message.choices or message.embedding):
            return  # slices of the log-probabilities; the first tokens are still to come
        self._engine_transfer = message.engine_transfer
        self._pass_first_on(message)
        if self._engine_transfer and not self._one_token:
            self._perform(self._machine.handed_over())

    def _pass_first_on(self, message: pb.FirstTokens) -> None:
        if self._first is not None:
            return
        wanted = self._submission.sampling.n
        if message.choices and len(message.choices) != wanted:
            reason = f"{len(message.choices)} first tokens arrived for {wanted} choices"
            self._perform(self._machine.prefill_failed(reason))
            return
        done = first_tokens_from_wire(self._engine_id, message)
        self._first = done.first
        logprobs = self._prompt_logprobs.complete
        outputs = None
        if message.embedding or logprobs is not None:
            outputs = ev.PromptOutputsReady(self._engine_id, logprobs, message.embedding)
        self._listener.on_first_tokens(done, outputs, self._target.worker_id)
