"""Request at the decode worker, from submission to its end."""

import asyncio
import time
from typing import Any

from batonpb import decode_pb2 as pb

from baton.engine.core.sequence import Kind
from baton.engine.process import messages
from baton.telemetry.metrics import count_cached
from baton.telemetry.tracing import extract, inject, tracestate_of
from baton.types import events as ev
from baton.types.errors import BatonError, DeadlineError, UnavailableError, from_code
from baton.types.geometry import BLOCK_TOKENS
from baton.types.params import SampledToken, finish_reason
from baton.wire.codecs import error_from_wire, error_to_wire, sampling_from_wire
from baton.wire.submission import replace_prefix, submit_from_wire
from baton.wire.tokens import count_tokens, unpack_tokens
from decode_worker.handoff import HandoffListener, ReceivedHandoff
from decode_worker.parts import WorkerParts
from decode_worker.prefix_pull import PrefixPull, begin_pull
from decode_worker.session import RouterSession


class DecodeRequest(HandoffListener):
    """Drives engine and hand-off for one submission and reports to its router."""

    def __init__(
        self, submission: pb.Submission, session: RouterSession, parts: WorkerParts
    ) -> None:
        self.submission = submission
        self.session = session
        self.ended = False
        self.resumed = True  # False: its stream was lost and the router has not resumed it yet
        self.ended_ns = 0
        self._parts = parts
        of = f"d/{submission.request_id}/{submission.attempt}"
        self._engine_id = parts.engine.unused_name(of)
        self._params = sampling_from_wire(submission.sampling)
        choices = range(self._params.n)
        self._tokens: list[list[SampledToken]] = [[] for _ in choices]
        self._finish: list[tuple[str, int | None]] = [("", None) for _ in choices]
        for choice, emitted in zip(choices, submission.emitted, strict=False):  # by other workers
            self._tokens[choice] += map(SampledToken, unpack_tokens(emitted.token_ids))
            self._finish[choice] = (emitted.finish_reason, None)
        self._prompt_outputs: ev.PromptOutputsReady | None = None
        self._route: pb.RequestRoute | None = None
        self._end: pb.RequestEnd | None = None
        self._error: BatonError | None = None
        self._began_ns = time.monotonic_ns()
        self._first_ns = 0
        self._committed_ns = 0  # Unix time
        self._times = pb.RequestTimes()
        self._span = parts.tracing.tracer.start_span(
            "baton.decode", context=extract(submission.traceparent, submission.tracestate)
        )
        self._span.set_attribute("baton.worker_id", parts.identity.worker_id)
        if traceparent := inject(self._span):
            submission.traceparent = traceparent
            submission.tracestate = tracestate_of(self._span)
        self._handoff: ReceivedHandoff | None = None
        self._needed: pb.PrefillNeeded | None = None  # the last one sent
        if submission.HasField("prefill"):
            self._handoff = ReceivedHandoff(submission, self._engine_id, parts, self)
        self._prefix: PrefixPull | None = None  # delays the submission to the engine
        self._deadline: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Set the deadline, pull the prefix, if any, and submit the request to the engine."""
        request = self.submission
        if self._handoff is None:
            self._prefix = begin_pull(self._parts, request, self._on_prefix)
        if self._prefix is None:
            self._submit()
        if request.deadline_remaining_ns:
            self._deadline = asyncio.get_running_loop().call_later(
                request.deadline_remaining_ns / 1e9,
                lambda: self.stop(DeadlineError("the deadline passed at the decode worker")),
            )

    def _submit(self) -> None:
        kind = Kind.REMOTE if self._handoff is not None else Kind.FULL
        command = submit_from_wire(self.submission, self._engine_id, kind)
        self._parts.engine.submit(command, self._on_report)

    def _on_prefix(self, pulled_tokens: int) -> None:
        self._prefix = None
        self._span.set_attribute("baton.pulled_prefix_tokens", pulled_tokens)
        if self._error is None:
            self._submit()
        else:
            self._close(self._error, None)

    def stop(self, error: BatonError) -> None:
        """End the request with an error (cancel, deadline, lapsed lease)."""
        if self.ended or self._error is not None:
            return
        self._error = error
        if self._prefix is not None:
            self._prefix.stop()
        elif self._handoff is not None:
            self._handoff.cancel()
        else:
            self.on_drained()

    def close(self) -> None:
        """Cancel the timers of a worker that exits and whose engine reports nothing more."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._prefix is not None:
            self._prefix.close()

    def forget(self) -> None:
        """Drop the hand-off, after the end: request and hand-off refer to each other."""
        if self._handoff is not None:
            self._handoff.forget()
            self._handoff = None

    def end_choices(self, choices: list[int]) -> None:
        """End choices in which the router found a stop string."""
        if self._handoff is None or self._handoff.end_choices(choices):
            self._parts.engine.client.send(messages.Cancel(self._engine_id, tuple(choices)))

    def replace_prefill(self, message: pb.PrefillReplacement) -> None:
        """Handle the router's answer to ``PrefillNeeded``."""
        if self._handoff is None or self.ended or not self._handoff.needs_peer:
            return  # the second answer to a repeated request
        if message.HasField("refuse"):
            self.stop(error_from_wire(message.refuse))
        elif message.compute_locally:
            self._handoff.compute_locally()
            self._route = None
        else:
            replace_prefix(self.submission, message)
            self._handoff.replace_peer(message.prefill)

    def resume(self, next_index: list[int]) -> None:
        """Send what the router lacks, on its new stream."""
        self.resumed = True
        if self._route is not None:
            self.session.route(self._route)
        if self._prompt_outputs is not None and not any(next_index):
            self.session.prompt_outputs(self.submission, self._prompt_outputs)
        for choice, tokens in enumerate(self._tokens):
            begin = next_index[choice] if choice < len(next_index) else 0
            reason, stop = self._finish[choice]
            if begin < len(tokens) or reason:
                part = self._run(choice, begin, tuple(tokens[begin:]), reason, stop)
                self.session.tokens(self.submission, part, repeated=True)
        if self._end is not None:
            self.session.end(self._end)
        elif self._handoff is not None:
            self._handoff.ask_again()

    def tick(self, now_ns: int) -> None:
        """Watch the hand-off's progress."""
        if self._handoff is not None and not self.ended:
            self._handoff.tick(now_ns)

    def on_first_tokens(
        self, done: ev.PromptDone, outputs: ev.PromptOutputsReady | None, worker_id: str
    ) -> None:
        """Send the route and the first tokens to the router."""
        self._times.prefill_ns = done.prefill_ns
        if self._times.reserve_ns:
            reserved_ns = self._began_ns + self._times.reserve_ns
            self._times.first_ns = time.monotonic_ns() - reserved_ns
        self._times.queue_ns = done.queue_ns
        self._times.cached_tokens = done.cached_tokens
        self._times.input_ns += done.computed_ns
        self._send_route("disaggregated", worker_id, done.cached_tokens)
        if self.submission.emitted:
            return  # the client has them from another worker
        if outputs is not None:
            self._on_prompt_outputs(outputs)
        ended: list[int] = []
        eos = frozenset(self._parts.eos_token_ids)
        for choice, token in enumerate(done.first):
            reason, stop = finish_reason(self._params, eos, token.token, 1)
            tokens = () if stop is not None else (token,)
            self._emit(self._run(choice, 0, tokens, reason, stop))
            if reason:
                ended.append(choice)
        if self._handoff is None:
            return
        if self.submission.pooling:
            self._handoff.cancel()
        else:
            self._handoff.end_choices(ended)

    def on_committed(self, payload_bytes: int) -> None:
        """Count the transfer and report it to the router."""
        self._committed_ns = time.time_ns()
        self._parts.transfers.count += 1
        self._parts.transfers.bytes += payload_bytes
        self.session.transfers(self._parts.transfers)

    def on_drained(self) -> None:
        """Cancel the request at the engine."""
        self._parts.engine.client.send(messages.Cancel(self._engine_id))

    def on_peer_needed(self, failed: pb.PrefillTarget, error: BatonError, peer_died: bool) -> None:
        """Request another prefill worker from the router."""
        if self._error is not None:
            return
        self._parts.transfers.failures += error.code != UnavailableError.code
        self._needed = pb.PrefillNeeded(
            request_id=self.submission.request_id,
            attempt=self.submission.attempt,
            failed=failed,
            reason=error_to_wire(error),
            peer_died=peer_died,
        )
        self.session.ask(self._needed)

    def on_peer_still_needed(self) -> None:
        """Repeat the request for another prefill worker."""
        if self._needed is not None and self._error is None:
            self.session.ask(self._needed)

    def _on_report(self, report: Any) -> None:
        match report:
            case ev.Admitted():
                if self._handoff is None or not self._times.queue_ns:
                    self._times.queue_ns = report.queue_ns
                    self._note_cached(report.cached_tokens)
            case ev.PromptOutputsReady():
                self._send_route("colocated", "", self._times.cached_tokens)
                self._on_prompt_outputs(report)
            case ev.Tokens():
                if self._route is None:
                    self._send_route("colocated", "", self._times.cached_tokens)
                self._emit(report)
            case ev.Ended():
                self._ended(report)
            case _:
                if self._handoff is not None:
                    if isinstance(report, ev.Reserved) and not self._times.reserve_ns:
                        self._times.reserve_ns = time.monotonic_ns() - self._began_ns
                    self._handoff.on_report(report)

    def _note_cached(self, tokens: int) -> None:
        """Correct the route, which an engine behind HTTP reports only with its last tokens."""
        is_corrected = tokens != self._times.cached_tokens and self._handoff is None
        self._times.cached_tokens = tokens
        if is_corrected and self._route is not None:
            self._send_route("colocated", "", tokens)

    def _send_route(self, mode: str, prefill_worker_id: str, cached_tokens: int) -> None:
        own_id = self._parts.identity.worker_id
        self._route = pb.RequestRoute(
            request_id=self.submission.request_id,
            attempt=self.submission.attempt,
            prefill_worker_id=prefill_worker_id or own_id,
            decode_worker_id=own_id,
            mode=mode,
            cached_tokens=cached_tokens,
        )
        self.session.route(self._route)

    def _on_prompt_outputs(self, prompt_outputs: ev.PromptOutputsReady) -> None:
        self._prompt_outputs = prompt_outputs
        if prompt_outputs.vector:
            self._first_ns = time.monotonic_ns()
            self._finish = [("stop", None)]
        self.session.prompt_outputs(self.submission, prompt_outputs)

    def _run(
        self,
        choice: int,
        index: int,
        tokens: tuple[SampledToken, ...],
        reason: str,
        stop: int | None,
    ) -> ev.Tokens:
        return ev.Tokens(
            request_id=self.submission.request_id,
            choice=choice,
            index=index,
            tokens=tokens,
            finish_reason=reason,
            stop_token=stop,
        )

    def _emit(self, new: ev.Tokens) -> None:
        self._first_ns = self._first_ns or time.monotonic_ns()
        self._tokens[new.choice] += new.tokens
        self._finish[new.choice] = (new.finish_reason, new.stop_token)
        self.session.tokens(self.submission, new)

    def _ended(self, report: ev.Ended) -> None:
        if self.ended:
            return
        error = self._error
        finished = bool(self._finish) and all(reason for reason, _ in self._finish)
        if error is None and report.error_code and not finished:
            error = from_code(report.error_code, report.error_message)
        self._close(error, report)

    def _close(self, error: BatonError | None, report: ev.Ended | None) -> None:
        self.ended = True
        self.ended_ns = time.monotonic_ns()
        if self._deadline is not None:
            self._deadline.cancel()
        if report is not None:
            self._note_times(report)
        self._end = pb.RequestEnd(
            request_id=self.submission.request_id,
            attempt=self.submission.attempt,
            error=error_to_wire(error) if error else None,
            times=self._times,
        )
        self.session.end(self._end)
        self._span.set_attribute("baton.generated_tokens", sum(map(len, self._tokens)))
        if error is not None:
            self._span.set_attribute("error.type", error.code)
        self._span.end()

    def _trace_transfer(self, duration_ns: int) -> None:
        if not self._committed_ns:
            return
        span = self._parts.tracing.tracer.start_span(
            "baton.transfer",
            context=extract(self.submission.traceparent, self.submission.tracestate),
            start_time=self._committed_ns - duration_ns,
        )
        span.set_attribute("baton.transfer_bytes", self._times.transfer_bytes)
        span.set_attribute("baton.repaired_chunks", self._times.repaired_chunks)
        span.end(self._committed_ns)

    def _note_times(self, report: ev.Ended) -> None:
        times = self._times
        parts = self._parts
        if self._first_ns:
            times.decode_ns = self.ended_ns - self._first_ns
        times.preemptions = report.preemptions
        times.input_ns += report.input_ns
        times.output_ns += report.output_ns
        prompt_tokens = count_tokens(self.submission.prompt_tokens)
        times.computed_tokens = prompt_tokens - times.cached_tokens
        transfer = self._handoff.figures if self._handoff is not None else None
        if transfer is not None:
            times.transfer_ns = transfer.duration_ns
            times.transfer_bytes = transfer.payload_bytes
            times.repaired_chunks = transfer.repaired_frames
            self._trace_transfer(transfer.duration_ns)
        elif self._handoff is None:
            times.prefill_ns = report.prefill_ns
        if self.submission.probe:
            return
        if transfer is not None:
            local_tokens = min(transfer.skip_blocks * BLOCK_TOKENS, prompt_tokens)
            count_cached(parts.metrics, report.tier_tokens, local_tokens)
            parts.metrics.inc("baton_prefix_tokens", prompt_tokens - local_tokens, source="pulled")
        elif report.computed_tokens:
            parts.metrics.inc("baton_prefix_tokens", report.computed_tokens, source="computed")
            count_cached(parts.metrics, report.tier_tokens, report.cached_tokens)
