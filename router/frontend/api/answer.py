"""Writes one HTTP answer, whole or as server-sent events, and watches for the client going away.

The response starts with the first token or with the error, whichever comes first: until then the
status can still say what happened, and the headers can say where the request ran. So there is
nothing to keep a connection alive with before the first token (a comment would fix the status at
200); after it, silence is broken by comments. A client that reads slowly gets the tokens of
several steps in one chunk; what waits for it is bounded by its own ``max_tokens``. One that does
not read at all is dropped by the server (``router/frontend/http_server.py``), which here is a
disconnect.

Where the server lends its connection (``router/frontend/http/connection.py``), the tokens of a
stream are written from there, without waking the handler: it sleeps from the first token to the
end.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Any

import orjson
from opentelemetry.trace import Span
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.telemetry.logs import request_context
from baton.telemetry.tasks import BackgroundTasks
from baton.telemetry.tracing import Tracing
from baton.types.errors import BatonError
from router.frontend.api.errors import OPENAI_ERRORS, ErrorShape, error_response
from router.frontend.api.formats.answer_format import AnswerFormat, usage
from router.frontend.api.prepare import off_loop
from router.frontend.api.tracing import part_spans
from router.frontend.http.connection import Connection, Deliveries, connection_of
from router.request import GenerationRequest
from router.routing.choice import Delta
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.gateway import Gateway
from router.routing.requests.observer import Observer
from router.routing.watch.request_log import RequestLog


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContext:
    """What an answer needs besides the requests.

    Attributes:
        emulated: The timing model of emulated workers, or "".
        errors: How the API writes an error, and names a request in its headers.
    """

    gateway: Gateway
    observer: Observer
    request_log: RequestLog
    tracing: Tracing
    span: Span
    endpoint: str
    request_id: str
    emulated: str
    keep_alive_s: float
    tasks: BackgroundTasks
    deliveries: Deliveries
    errors: ErrorShape = OPENAI_ERRORS


class Exchange(Response):
    """One HTTP call and its requests, from submission to the last byte.

    Args:
        context: Shared parts.
        requests: One for each prompt.
    """

    def __init__(self, context: AnswerContext, requests: Sequence[GenerationRequest]) -> None:
        super().__init__()
        self._context = context
        self._requests = requests
        self._wakeup = asyncio.Event()
        self._gone = False
        self._connection: Connection | None = None
        self._active: list[ActiveRequest] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the requests to their ends and write the answer."""
        with request_context(self._context.request_id, self._requests[0].traceparent):
            await self._call(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499
        self._connection = connection_of(scope)
        try:
            if self._connection is not None:
                self._connection.follow(self)
                status = await self._run(scope, receive, send)
            else:
                async with self._context.tasks.beside(self._watch(receive), "watch for disconnect"):
                    status = await self._run(scope, receive, send)
        except Exception as fault:
            status = 499 if isinstance(fault, OSError) else 500
            raise
        finally:
            if self._connection is not None:
                self._connection.unfollow(self)
            context = self._context
            for active in self._active:
                context.gateway.cancel(active)
                context.request_log.write(active, context.endpoint, status)
                context.gateway.on_response_sent(active)
            self._report(status)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.on_lost()

    def on_lost(self) -> None:
        """The client has gone."""
        self._gone = True
        self._wakeup.set()

    def on_writable(self) -> None:
        """The client has read what waited for it; `send` waits for that by itself."""

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> int:
        gateway = self._context.gateway
        try:
            if not await self._submit_all(gateway):
                return 499
            self._raise_early_error()
        except BatonError as error:
            tenant = self._requests[0].tenant
            self._context.observer.rejected(error.code, tenant)
            if not self._active:  # the others have their line when they are over
                self._context.request_log.refused(error, self._context.endpoint, tenant)
            response = error_response(error, self._context.request_id, self._context.errors)
            await response(scope, receive, send)
            return response.status_code
        return await self._respond(send)

    async def _submit_all(self, gateway: Gateway) -> bool:
        """Begin all requests and wait until the answer may start; False if the client left."""
        for request in self._requests:
            self._active.append(gateway.submit(request, self._wakeup))
        return await self._wait(self._may_start)

    async def _wait(self, ready: Callable[[], bool], idle: Callable[[], Any] | None = None) -> bool:
        """Wait until ``ready()``. Returns False when the client went away instead."""
        while not self._gone:
            self._wakeup.clear()
            if ready():
                return True
            try:
                async with asyncio.timeout(self._context.keep_alive_s if idle else None):
                    await self._wakeup.wait()
            except TimeoutError:
                if idle is not None:
                    await idle()
        return False

    def _may_start(self) -> bool:
        """Whether the response can begin: with an error, or with everything."""
        failed = any(active.record.error is not None for active in self._active)
        return failed or all(active.record.ended for active in self._active)

    async def _respond(self, send: Send) -> int:
        """Write the response; returns its status."""
        return await self._write_whole(send)

    async def _finish(self) -> None:
        """Every request has ended well, and nothing of the end is written yet."""

    def _whole(self) -> dict[str, Any]:
        """The body, once every request has ended."""
        raise NotImplementedError

    def _raise_early_error(self) -> None:
        for active in self._active:
            if active.record.error is not None:
                raise active.record.error

    def _start_headers(self, kind: bytes, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        begun = [active for active in self._active if active.record.begun] or self._active
        begun[0].record.sent = True  # its route is in the headers: it cannot be placed again
        timing = self._context.emulated
        return [
            (b"content-type", kind),
            *([(b"x-baton-emulated", timing.encode())] if timing else []),
            *self._context.errors.id_headers(self._context.request_id),
            (b"x-baton-route", begun[0].route_header().encode()),
            *more,
        ]

    async def _write_whole(self, send: Send) -> int:
        for active in self._active:
            active.record.sent = True
        await self._finish()
        size = sum(map(_bulk_bytes, self._active))
        body = await off_loop(size, lambda: orjson.dumps(self._whole()))
        length = (b"content-length", str(len(body)).encode())
        headers = self._start_headers(b"application/json", length)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        for active in self._active:
            self._context.observer.first_byte(active, monotonic_ns())
        return 200

    def _report(self, status: int) -> None:
        context = self._context
        context.observer.answered(context.endpoint, status, self._requests[0].tenant)
        if context.span.is_recording():
            self._describe(context.span, status)
        context.span.end()

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
        for active in self._active:
            if active.record.first_token_ns:
                waited_ns = active.record.first_token_ns - active.request.arrived_ns
                span.set_attribute("gen_ai.response.time_to_first_chunk", waited_ns / 1e9)
                span.set_attribute("baton.route", active.route_header())
            if active.record.error is not None:
                span.set_attribute("error.type", active.record.error.code)
            part_spans(self._context.tracing, span, active)


class Answer(Exchange):
    """The answer to one generation call.

    Args:
        context: Shared parts.
        requests: One for each prompt.
        layout: How to write them.
        stream: As server-sent events.
    """

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
        self._shown: set[int] = set()  # prompts of whose answer something was sent
        self._fault: Exception | None = None
        self._written_s = 0.0
        self._text = Delta(0)  # filled anew for each token of a plain answer

    def _may_start(self) -> bool:
        """A stream begins with the first token of any of its prompts."""
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
            (b"x-accel-buffering", b"no"),  # nginx would hold the tokens back
        )
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = self._layout.opening(self._active)
        if not self._wants_prompt_logprobs:  # else those come first
            opening += self._collect()
        await self._write(send, opening)
        keep_alive = self._layout.keep_alive
        if self._connection is not None and not self._wants_prompt_logprobs:
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
        """Sleep while others write, until all requests have ended or the client has left.

        What came with an end is not written yet.
        """
        loop = asyncio.get_running_loop()
        keep_alive_s = self._context.keep_alive_s
        self._wakeup.clear()
        for active in self._active:
            active.wakeup = self
        self._written_s = loop.time()
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
        for active in self._active:
            active.wakeup = self._wakeup
        if self._fault is not None:
            raise self._fault

    def set(self) -> None:
        """There is news, or an end: as the event that wakes a handler."""
        self._context.deliveries.add(self._deliver)

    def on_writable(self) -> None:
        """See ``router.frontend.http.connection.Follower``."""
        self._context.deliveries.add(self._deliver)

    def _deliver(self) -> None:
        """Write what is new; while the client is behind it waits, and then is one piece."""
        connection = self._connection
        if connection is None or self._gone:
            return
        try:
            if self._over:
                self._wakeup.set()
            elif connection.writable and (news := self._collect()):
                connection.write_piece(news)
                self._written_s = asyncio.get_running_loop().time()
        except Exception as fault:  # noqa: BLE001 - raised in the handler, whose answer it breaks
            self._fault = fault
            self._wakeup.set()

    @property
    def _over(self) -> bool:
        """Whether every request has ended, or one with an error."""
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
        """Prompt logprobs that have come since; each stands before all deltas of its request."""
        for prompt, active in enumerate(self._active):
            if active.record.prompt_logprobs is None or prompt in self._with_logprobs:
                continue
            active.record.sent = True  # while they are encoded it must not be placed again
            work = partial(self._layout.prompt_logprobs, prompt, active)
            chunks = await off_loop(_bulk_bytes(active), work)
            self._with_logprobs.add(prompt)
            await self._write(send, chunks)

    def _collect(self) -> bytes:
        """All that is new, as one piece: one write, however far the client is behind."""
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
                active.record.sent = True  # not before: until then it may be placed again
                if prompt not in self._shown and (delta.text or delta.calls or delta.reasoning):
                    self._shown.add(prompt)
                    self._context.observer.first_byte(active, monotonic_ns())
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
    """Roughly what of an answer takes time to write; see ``off_loop``."""
    logprobs = active.record.prompt_logprobs
    embedding_bytes = len(active.record.embedding)
    if logprobs is None:
        return embedding_bytes
    return len(logprobs.logprobs) * (2 + 2 * logprobs.alternatives)
