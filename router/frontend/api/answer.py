"""HTTP responses of generation calls, in one piece or as server-sent events.

The response starts with the first token or with an error. Until then the status code can still
report an error, and the headers the route. Therefore no keep-alive comment is sent before the first
token, since it would fix the status at 200. A slow client receives the tokens of several steps in
one chunk; its backlog is limited by ``max_tokens``. The server disconnects clients that do not read
(``router/frontend/http/protocol.py``).

After the first token the handler task sleeps, and tokens are written directly to the connection
that the server provides (``router/frontend/http/connection.py``).
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Any

import msgspec
from opentelemetry.trace import Span, Status, StatusCode
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.telemetry.logs import request_context
from baton.types.errors import BatonError, InternalError
from router.frontend.api.formats.answer_format import AnswerFormat, usage
from router.frontend.api.parts import RouterParts
from router.frontend.api.tracing import part_spans
from router.frontend.errors import ErrorShape, Refusal, error_response
from router.frontend.http.connection import Connection, connection_of
from router.frontend.off_loop import off_loop
from router.frontend.rate_limits import Headers
from router.lanes.gate import Outcome
from router.lanes.shadow import outcome_of
from router.request import GenerationRequest
from router.routing.reports.refusals import RefusedRequest
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.choice import Delta
from router.routing.requests.gateway import Gateway
from router.routing.requests.slo_outcome import slo_header
from router.tenants.quota import Reservation

_AT_ONCE = 32  # requests of one call that are handled before other events of the loop


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContext:
    """Context of an answer: parts of the router, the call's span, and the format of its errors."""

    router: RouterParts
    span: Span
    endpoint: str
    request_id: str
    errors: ErrorShape


class Exchange(Response):
    """HTTP response that runs requests, from their submission to the last byte.

    Attributes:
        requests: Requests that it runs.
        on_answered: Receives the requests once the client has a complete answer; None: nothing.
    """

    def __init__(self, context: AnswerContext, requests: Sequence[GenerationRequest]) -> None:
        super().__init__()
        self._context = context
        self._router = context.router
        self.requests = requests
        self.on_answered: Callable[[Sequence[ActiveRequest]], None] | None = None
        self._wakeup = asyncio.Event()
        self._gone = False
        self._has_chunks = True  # HTTP/1.0 has none
        self._connection: Connection | None = None
        self._active: list[ActiveRequest] = []
        self._reservation: Reservation | None = None
        self._refused = ""  # code of the error in place of an answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the requests to their ends and write the response."""
        with request_context(self._context.request_id, self.requests[0].traceparent):
            await self._call(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499
        self._connection = connection_of(scope)
        self._has_chunks = scope.get("http_version", "1.1") >= "1.1"
        try:
            if self._connection is not None:
                self._connection.follow(self)
                status = await self._run(scope, receive, send)
            else:
                async with self._router.tasks.beside(self._watch(receive), "watch for disconnect"):
                    status = await self._run(scope, receive, send)
        except Exception as fault:
            status = 499 if isinstance(fault, OSError) else 500
            if status == 500:
                self._refused = InternalError.code
            raise
        finally:
            if self._connection is not None:
                self._connection.unfollow(self)
            self._copy(status)
            for number, active in enumerate(self._active, 1):
                self._close(active, status)
                if number % _AT_ONCE == 0:
                    with contextlib.suppress(asyncio.CancelledError):  # the others end, too
                        await asyncio.sleep(0)
            if self._reservation is not None:
                self._settle(self._reservation)
            self._count(status)
            self._report(status)

    def _close(self, active: ActiveRequest, status: int) -> None:
        active.status = status
        self._router.gateway.cancel(active)
        self._router.request_log.write(active, self._context.endpoint, status)
        self._router.answer_checks.follow(active.record)
        self._router.gateway.on_response_sent(active)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.on_lost()

    def on_lost(self) -> None:
        """Handle the client's disconnect."""
        self._gone = True
        self._wakeup.set()

    def on_writable(self) -> None:
        """Do nothing: `send` itself waits until the client has read."""

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> int:
        try:
            if self._router.quotas.quotas.has_limits(self.requests[0].tenant):
                await self._reserve()
            if self._gone:  # while its prompt was prepared, or its tokens were reserved
                return 499
            if not await self._submit_all(self._router.gateway):
                return 499
            for active in self._active:
                if active.record.error is not None:
                    raise active.record.error
        except BatonError as error:
            tenant = self.requests[0].tenant
            self._refused = error.code
            self._router.observer.rejected(error.code, tenant)
            if not self._active:  # otherwise the log entry is written at the end
                self._router.request_log.refused(error, self._context.endpoint, tenant)
            status = self._context.errors.status(Refusal.of(error))
            if not any(active.id in self._router.gateway.kept for active in self._active):
                self._keep_refused(error, status)
            response = error_response(
                error, self._context.request_id, self._context.errors, self._limit_headers()
            )
            await response(scope, receive, send)
            return response.status_code
        return await self._respond(send)

    def _keep_refused(self, error: BatonError, status: int) -> None:
        request = self.requests[0]
        self._router.refused.add(
            RefusedRequest(
                id=self._context.request_id,
                client_id=request.client_id,
                tenant=request.tenant,
                endpoint=self._context.endpoint,
                status=status,
                code=error.code,
                reason=error.message,
                arrived_ns=request.arrived_ns,
                refused_ns=monotonic_ns(),
            )
        )

    async def _reserve(self) -> None:
        """Reserve the tokens of all prompts, each once, and of all answers."""
        requests = self.requests
        answer_tokens = [
            0 if one.pooling or one.prompt_logprobs_only else one.sampling.max_tokens
            for one in requests
        ]
        self._reservation = await self._router.quotas.reserve(
            requests[0].tenant,
            sum(len(one.prompt) for one in requests),
            sum(one.sampling.n for one in requests),
            max(answer_tokens),
        )

    def _settle(self, reservation: Reservation) -> None:
        """Correct the reservation by the usage; a prompt that no worker received is free."""
        placed = [active.record for active in self._active if active.record.attempt]
        self._router.quotas.quotas.settle(
            reservation,
            sum(record.prompt_tokens for record in placed),
            sum(record.completion_tokens for record in placed),
            monotonic_ns(),
        )

    def _count(self, status: int) -> None:
        """Count the call in the usage of its tenant, by what the answer's ``usage`` contains.

        A client that has left pays for what workers had received and generated until then.
        """
        counter = self._router.gateway.usage
        if self._refused:
            counter.failed(self.requests[0], self._refused)
            return
        placed = [active for active in self._active if active.record.attempt]
        if placed or status == 200:
            counter.answered(self.requests[0], usage(placed))

    def _limit_headers(self) -> Headers:
        feed = self._router.quotas
        standings = feed.quotas.standing(self.requests[0].tenant, monotonic_ns())
        if not standings:
            return []
        headers = self._context.errors.limit_headers(standings)
        return [*headers, (b"x-baton-quota", b"degraded")] if feed.is_degraded else headers

    async def _submit_all(self, gateway: Gateway) -> bool:
        """Submit all requests and wait for the response to start; False after a disconnect."""
        for number, request in enumerate(self.requests, 1):
            self._active.append(gateway.submit(request, self._wakeup))
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
                if self._gone:
                    return False
        return await self._wait(self._may_start)

    async def _wait(self, ready: Callable[[], bool], idle: Callable[[], Any] | None = None) -> bool:
        """Wait until ``ready()``. Return False if the client disconnects first."""
        while not self._gone:
            self._wakeup.clear()
            if ready():
                return True
            try:
                async with asyncio.timeout(self._router.settings.keep_alive_s if idle else None):
                    await self._wakeup.wait()
            except TimeoutError:
                if idle is not None:
                    await idle()
        return False

    def _may_start(self) -> bool:
        failed = any(active.record.error is not None for active in self._active)
        return failed or all(active.record.ended for active in self._active)

    async def _respond(self, send: Send) -> int:
        """Write the response. Return its status code."""
        return await self._write_whole(send)

    async def _finish(self) -> None:
        """Prepare the end of the response after all requests have ended without errors."""

    def _whole(self) -> dict[str, Any]:
        """Return the body after all requests have ended."""
        raise NotImplementedError

    def _start_headers(self, kind: bytes, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        begun = [active for active in self._active if active.record.begun] or self._active
        begun[0].record.sent = True  # its route is in the headers, so it cannot be placed again
        timing = self._router.settings.emulated
        routed = begun[0].request.routed
        slo = slo_header(begun, monotonic_ns())
        return [
            (b"content-type", kind),
            *([(b"x-baton-emulated", timing.encode())] if timing else []),
            *([(b"x-baton-slo", slo.encode())] if slo else []),
            *self._context.errors.id_headers(self._context.request_id),
            (b"x-baton-route", begun[0].route_header().encode()),
            *([(b"x-baton-model", routed.header().encode())] if routed is not None else []),
            *self._limit_headers(),
            *more,
        ]

    async def _write_whole(self, send: Send) -> int:
        for active in self._active:
            active.record.sent = True
        await self._finish()
        size = sum(map(_bulk_bytes, self._active))
        body = await off_loop(size, lambda: msgspec.json.encode(self._whole()))
        length = (b"content-length", str(len(body)).encode())
        headers = self._start_headers(b"application/json", length)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        for active in self._active:
            if active.record.first_token_ns:
                self._router.observer.first_content(active, active.record.first_token_ns)
        return 200

    def _report(self, status: int) -> None:
        context = self._context
        errors = any(active.record.error is not None for active in self._active)
        self._router.observer.answered(
            context.endpoint,
            status,
            self.requests[0].tenant,
            failed_stream=status == 200 and errors,
        )
        self._weigh(status)
        if context.span.is_recording():
            self._describe(context.span, status)
        context.span.end()

    def _copy(self, status: int) -> None:
        """Let a shadow run a copy of an answered call, before the tokens are dropped."""
        failed = any(active.record.error is not None for active in self._active)
        if self.on_answered is not None and status == 200 and not failed:
            self.on_answered(self._active)

    def _weigh(self, status: int) -> None:
        """Pass the outcome to the gate of a canary, unless the client caused it."""
        routed = self.requests[0].routed
        gate = self._router.gates.get(routed.requested) if routed is not None else None
        if gate is None or routed is None or 400 <= status < 500:
            return
        errors = [active.record.error for active in self._active]
        failed = status >= 500 or any(one is not None and one.status >= 500 for one in errors)
        if failed or not self._active:
            gate.ended(routed.model, Outcome(failed))
        else:
            gate.ended(routed.model, outcome_of(self._active[0]))

    def _describe(self, span: Span, status: int) -> None:
        counted = usage(self._active)
        reasons = [
            choice.finish_reason or "error"
            for active in self._active
            for choice in active.record.choices
        ]
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        span.set_attribute("gen_ai.response.id", self._context.request_id)
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("gen_ai.usage.input_tokens", counted["prompt_tokens"])
        span.set_attribute("gen_ai.usage.output_tokens", counted["completion_tokens"])
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached)
        span.set_attribute("http.response.status_code", status)
        codes = [active.record.error.code for active in self._active if active.record.error]
        if code := self._refused or next(iter(codes), ""):
            span.set_attribute("error.type", code)
        if status >= 500 or (status == 200 and codes):
            span.set_status(Status(StatusCode.ERROR, code))
        for active in self._active:
            if active.record.first_token_ns:
                waited_ns = active.record.first_token_ns - active.request.arrived_ns
                span.set_attribute("gen_ai.response.time_to_first_chunk", waited_ns / 1e9)
                span.set_attribute("baton.route", active.route_header())
            part_spans(self._router.tracing, span, active)


class Answer(Exchange):
    """Response to a generation call in the format ``layout``, with one request per prompt."""

    def __init__(
        self,
        context: AnswerContext,
        requests: Sequence[GenerationRequest],
        layout: AnswerFormat,
        *,
        stream: bool,
    ) -> None:
        super().__init__(context, requests)
        self._layout = layout
        self._stream = stream
        self._with_logprobs: set[int] = set()  # prompts whose logprobs were sent
        self._shown: set[int] = set()  # prompts with output that was sent
        self._fault: Exception | None = None
        self._is_direct = False  # whether `_deliver` may write; otherwise the handler does
        self._written_s = 0.0
        self._text = Delta(0)  # reused for each token of a plain answer

    def _may_start(self) -> bool:
        """Return whether the first token of any prompt, or everything, is available."""
        begun = self._stream and any(active.record.begun for active in self._active)
        return begun or super()._may_start()

    async def _respond(self, send: Send) -> int:
        return await (self._write_stream(send) if self._stream else self._write_whole(send))

    async def _finish(self) -> None:
        await self._layout.finish(self._active)

    def _whole(self) -> dict[str, Any]:
        return self._layout.whole(self._active)

    async def _write_stream(self, send: Send) -> int:
        headers = self._start_headers(
            b"text/event-stream; charset=utf-8",
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would buffer the tokens
        )
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = self._layout.opening(self._active)
        if not self._wants_prompt_logprobs:  # otherwise they come first
            opening += self._collect()
        await self._write(send, opening)
        keep_alive = self._layout.keep_alive
        direct = self._has_chunks and not self._wants_prompt_logprobs
        if self._connection is not None and direct:
            await self._stream_directly(self._connection)
        while True:
            await self._write_prompt_logprobs(send)
            news = self._collect()
            if news:
                await self._write(send, news)
            failed = next((f.record.error for f in self._active if f.record.error), None)
            if failed is not None:
                await self._end(send, self._layout.failed(failed))
                return 200
            if all(active.record.ended for active in self._active) and not self._has_news():
                break
            if not await self._wait(self._has_news, lambda: self._write(send, keep_alive)):
                return 499
        await self._finish()
        await self._end(send, self._layout.ended(self._active))
        return 200

    async def _stream_directly(self, connection: Connection) -> None:
        """Sleep until all requests have ended or the client disconnects; `_deliver` writes.

        The last tokens, which arrive with the end of a request, remain to be written.
        """
        loop = asyncio.get_running_loop()
        keep_alive_s = self._router.settings.keep_alive_s
        self._wakeup.clear()
        for active in self._active:
            active.wakeup = self
        self._written_s = loop.time()
        self._is_direct = True
        self._deliver()
        while not (self._gone or self._over or self._fault):
            silent_s = loop.time() - self._written_s
            if silent_s >= keep_alive_s:
                self._written_s = loop.time()
                if connection.writable:
                    connection.write_piece(self._layout.keep_alive)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(keep_alive_s - silent_s):
                    await self._wakeup.wait()
        self._is_direct = False
        for active in self._active:
            active.wakeup = self._wakeup
        if self._fault is not None:
            raise self._fault

    def set(self) -> None:
        """Schedule a delivery. Replaces the event that wakes the handler."""
        self._router.deliveries.add(self._deliver)

    def on_writable(self) -> None:
        """Schedule a delivery of the tokens that waited."""
        self._router.deliveries.add(self._deliver)

    def _deliver(self) -> None:
        """Write new tokens as one piece, unless the client is too slow."""
        connection = self._connection
        if connection is None or self._gone or not self._is_direct:
            return
        try:
            if self._over:
                self._wakeup.set()
            elif connection.writable and (news := self._collect()):
                connection.write_piece(news)
                self._written_s = asyncio.get_running_loop().time()
        except Exception as fault:  # noqa: BLE001 - raised in the handler
            self._fault = fault
            self._wakeup.set()

    @property
    def _over(self) -> bool:
        """True if all requests have ended, or one has failed."""
        over = True
        for active in self._active:
            if active.record.error is not None:
                return True
            over = over and active.record.ended
        return over

    @property
    def _wants_prompt_logprobs(self) -> bool:
        return any(active.request.wants_prompt_logprobs for active in self._active)

    def _has_news(self) -> bool:
        return any(active.record.has_news for active in self._active)

    async def _write_prompt_logprobs(self, send: Send) -> None:
        """Write new prompt logprobs, which precede all deltas of their request."""
        for prompt, active in enumerate(self._active):
            if active.record.prompt_logprobs is None or prompt in self._with_logprobs:
                continue
            active.record.sent = True  # set before encoding, so that it is not placed again
            work = partial(self._layout.prompt_logprobs, prompt, active)
            chunks = await off_loop(_bulk_bytes(active), work)
            self._with_logprobs.add(prompt)
            await self._write(send, chunks)

    def _collect(self) -> bytes:
        if len(self._active) == 1 and 0 in self._shown:
            record = self._active[0].record
            if record.is_plain:
                return b"".join(map(self._text_event, record.take_texts()))
        pieces = []
        for prompt, active in enumerate(self._active):
            if active.request.wants_prompt_logprobs and prompt not in self._with_logprobs:
                continue  # its prompt logprobs come first
            deltas = [Delta(0, text=text) for text in active.record.take_texts()]
            for delta in deltas + active.record.take():
                active.record.sent = True  # from now on it cannot be placed again
                if prompt not in self._shown and (delta.text or delta.calls or delta.reasoning):
                    self._shown.add(prompt)
                    self._router.observer.first_content(active, monotonic_ns())
                pieces.append(self._layout.delta(prompt, delta))
        return b"".join(pieces)

    def _text_event(self, text: str) -> bytes:
        self._text.text = text
        return self._layout.delta(0, self._text)

    async def _write(self, send: Send, body: bytes) -> None:
        if body and not self._gone:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self, send: Send, body: bytes) -> None:
        if not self._gone:
            await send({"type": "http.response.body", "body": body, "more_body": False})


def _bulk_bytes(active: ActiveRequest) -> int:
    """Estimate the size of embeddings and prompt logprobs; see ``off_loop``."""
    logprobs = active.record.prompt_logprobs
    embedding_bytes = len(active.record.embedding)
    if logprobs is None:
        return embedding_bytes
    return len(logprobs.logprobs) * (2 + 2 * logprobs.alternatives)
