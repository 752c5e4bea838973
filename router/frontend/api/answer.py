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
from collections.abc import Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

from starlette.types import Send

from router.frontend.api.call_response import AnswerContext, CallResponse, bulk_bytes
from router.frontend.api.formats.answer_format import AnswerFormat
from router.frontend.http.protocol import LimitedProtocol
from router.frontend.off_loop import off_loop
from router.request import GenerationRequest
from router.routing.requests.choice import Delta


class Answer(CallResponse):
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

    def _may_start(self) -> bool:
        """Return whether the first token of any prompt, or everything, is available."""
        begun = self._stream and any(active.record.begun for active in self.call.active)
        return begun or super()._may_start()

    async def _respond(self, send: Send) -> int:
        return await (self._write_stream(send) if self._stream else self._write_whole(send))

    async def _finish(self) -> None:
        await self._layout.finish(self.call.active)

    def _whole(self) -> dict[str, Any]:
        return self._layout.whole(self.call.active)

    async def _write_stream(self, send: Send) -> int:
        headers = self._start_headers(
            b"text/event-stream; charset=utf-8",
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would buffer the tokens
        )
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = self._layout.opening(self.call.active)
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
            failed = next((f.record.error for f in self.call.active if f.record.error), None)
            if failed is not None:
                await self._end(send, self._layout.failed(failed))
                return 200
            if all(active.record.ended for active in self.call.active) and not self._has_news():
                break
            if not await self._wait(self._has_news, lambda: self._write(send, keep_alive)):
                return 499
        await self._finish()
        await self._end(send, self._layout.ended(self.call.active))
        return 200

    async def _stream_directly(self, connection: LimitedProtocol) -> None:
        """Sleep until all requests have ended or the client disconnects; `_deliver` writes.

        The last tokens, which arrive with the end of a request, remain to be written.
        """
        loop = asyncio.get_running_loop()
        keep_alive_s = self._context.lane.core.settings.keep_alive_s
        self._wakeup.clear()
        for active in self.call.active:
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
        for active in self.call.active:
            active.wakeup = self._wakeup
        if self._fault is not None:
            raise self._fault

    def set(self) -> None:
        """Schedule a delivery. Replaces the event that wakes the handler."""
        self._context.deliveries.add(self._deliver)

    def on_writable(self) -> None:
        """Schedule a delivery of the tokens that waited."""
        self._context.deliveries.add(self._deliver)

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
        for active in self.call.active:
            if active.record.error is not None:
                return True
            over = over and active.record.ended
        return over

    @property
    def _wants_prompt_logprobs(self) -> bool:
        return any(active.request.wants_prompt_logprobs for active in self.call.active)

    def _has_news(self) -> bool:
        return any(active.record.has_news for active in self.call.active)

    async def _write_prompt_logprobs(self, send: Send) -> None:
        """Write new prompt logprobs, which precede all deltas of their request."""
        for prompt, active in enumerate(self.call.active):
            if active.record.prompt_logprobs is None or prompt in self._with_logprobs:
                continue
            active.record.sent = True  # set before encoding, so that it is not placed again
            work = partial(self._layout.prompt_logprobs, prompt, active)
            chunks = await off_loop(bulk_bytes(active), work)
            self._with_logprobs.add(prompt)
            await self._write(send, chunks)

    def _collect(self) -> bytes:
        if len(self.call.active) == 1 and 0 in self._shown:
            record = self.call.active[0].record
            if record.is_plain:
                return self._layout.texts(record.take_texts())
        pieces = []
        for prompt, active in enumerate(self.call.active):
            if active.request.wants_prompt_logprobs and prompt not in self._with_logprobs:
                continue  # its prompt logprobs come first
            deltas = [Delta(0, text=text) for text in active.record.take_texts()]
            for delta in deltas + active.record.take():
                active.record.sent = True  # from now on it cannot be placed again
                if prompt not in self._shown and (delta.text or delta.calls or delta.reasoning):
                    self._shown.add(prompt)
                    self._context.lane.observer.first_content(active, monotonic_ns())
                pieces.append(self._layout.delta(prompt, delta))
        return b"".join(pieces)

    async def _write(self, send: Send, body: bytes) -> None:
        if body and not self._gone:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self, send: Send, body: bytes) -> None:
        if not self._gone:
            await send({"type": "http.response.body", "body": body, "more_body": False})
