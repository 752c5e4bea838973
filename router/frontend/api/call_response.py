"""HTTP response to a call that runs requests, from their submission to the last byte."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import msgspec
from opentelemetry.trace import Span
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.telemetry.logs import request_context
from baton.types.errors import BatonError, InternalError
from router.frontend.api.tracing import end_span
from router.frontend.errors import ErrorShape, error_response
from router.frontend.http.connection import Deliveries
from router.frontend.http.protocol import LimitedProtocol, connection_of
from router.frontend.off_loop import off_loop
from router.frontend.rate_limits import Headers
from router.lane import Lane
from router.process import Process
from router.request import GenerationRequest
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.call import Call
from router.routing.requests.gateway import Gateway
from router.routing.requests.slo_outcome import slo_header

_AT_ONCE = 32  # requests of one call that are handled before other events of the loop


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContext:
    """Context of an answer: the call's lane, its span, and the format of its errors."""

    router: Process
    lane: Lane
    deliveries: Deliveries
    span: Span
    endpoint: str
    request_id: str
    errors: ErrorShape


class CallResponse(Response):
    """Response that runs the requests of a `Call`."""

    def __init__(self, context: AnswerContext, requests: Sequence[GenerationRequest]) -> None:
        super().__init__()
        first = requests[0]
        self.call = Call(
            id=context.request_id,
            endpoint=context.endpoint,
            arrived_ns=first.arrived_ns,
            tenant=first.tenant,
            key_id=first.key_id,
            client_id=first.client_id,
            model=context.lane.model.names[0],
            requests=requests,
        )
        self._context = context
        self._wakeup = asyncio.Event()
        self._gone = False
        self._has_chunks = True  # HTTP/1.0 has none
        self._connection: LimitedProtocol | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the requests to their ends and write the response."""
        with request_context(self.call.id, self.call.requests[0].traceparent):
            await self._call(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.call
        status = call.status
        self._connection = connection_of(scope)
        self._has_chunks = scope.get("http_version", "1.1") >= "1.1"
        try:
            if self._connection is not None:
                self._connection.follow(self)
                status = await self._run(scope, receive, send)
            else:
                tasks = self._context.router.tasks
                async with tasks.beside(self._watch(receive), "watch for disconnect"):
                    status = await self._run(scope, receive, send)
        except Exception as fault:
            status = 499 if isinstance(fault, OSError) else 500
            if status == 500:
                call.error = InternalError(str(fault))
            raise
        finally:
            call.status = status
            if self._connection is not None:
                self._connection.unfollow(self)
            await self._close()

    async def _close(self) -> None:
        """End all requests, and let the observers know."""
        call = self.call
        observers = self._context.router.observers
        gateway = self._context.lane.gateway
        if call.status == 200 and not call.errors:
            for answered in observers.answered:
                answered(call)
        for number, active in enumerate(call.active, 1):
            active.status = call.status
            gateway.cancel(active)
            for closed in observers.closed:
                closed(call, active)
            gateway.on_response_sent(active)
            if number % _AT_ONCE == 0:
                with contextlib.suppress(asyncio.CancelledError):  # the others end, too
                    await asyncio.sleep(0)
        observers.end(call)
        end_span(self._context.router.tracing, self._context.span, call)

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
        call = self.call
        gateway = self._context.lane.gateway
        observers = self._context.router.observers
        try:
            for begun in observers.begun:
                await begun(call)
            if self._gone:  # while its prompt was prepared, or its tokens were reserved
                return 499
            if not await self._submit_all(gateway):
                return 499
            if call.errors:
                raise call.errors[0]
        except BatonError as error:
            errors = self._context.errors
            call.is_kept = any(active.id in gateway.kept for active in call.active)
            observers.refuse(call, error, errors.status(error))
            response = error_response(error, call.id, errors, self._limit_headers())
            await response(scope, receive, send)
            return response.status_code
        return await self._respond(send)

    def _limit_headers(self) -> Headers:
        feed = self._context.router.quotas
        standings = feed.quotas.standing(self.call.tenant, monotonic_ns())
        if not standings:
            return []
        headers = self._context.errors.limit_headers(standings)
        return [*headers, (b"x-baton-quota", b"degraded")] if feed.is_degraded else headers

    async def _submit_all(self, gateway: Gateway) -> bool:
        """Submit all requests and wait for the response to start; False after a disconnect."""
        for number, request in enumerate(self.call.requests, 1):
            self.call.active.append(gateway.submit(request, self._wakeup))
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
                if self._gone:
                    return False
        return await self._wait(self._may_start)

    async def _wait(self, ready: Callable[[], bool], idle: Callable[[], Any] | None = None) -> bool:
        """Wait until ``ready()``. Return False if the client disconnects first."""
        keep_alive_s = self._context.lane.core.settings.keep_alive_s
        while not self._gone:
            self._wakeup.clear()
            if ready():
                return True
            try:
                async with asyncio.timeout(keep_alive_s if idle else None):
                    await self._wakeup.wait()
            except TimeoutError:
                if idle is not None:
                    await idle()
        return False

    def _may_start(self) -> bool:
        failed = any(active.record.error is not None for active in self.call.active)
        return failed or all(active.record.ended for active in self.call.active)

    async def _respond(self, send: Send) -> int:
        """Write the response. Return its status code."""
        return await self._write_whole(send)

    async def _finish(self) -> None:
        """Prepare the end of the response after all requests have ended without errors."""

    def _whole(self) -> dict[str, Any]:
        """Return the body after all requests have ended."""
        raise NotImplementedError

    def _start_headers(self, kind: bytes, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        begun = [active for active in self.call.active if active.record.begun] or self.call.active
        begun[0].record.sent = True  # its route is in the headers, so it cannot be placed again
        timing = self._context.lane.settings.emulated
        routed = begun[0].request.routed
        slo = slo_header(begun, monotonic_ns())
        return [
            (b"content-type", kind),
            *([(b"x-baton-emulated", timing.encode())] if timing else []),
            *([(b"x-baton-slo", slo.encode())] if slo else []),
            *self._context.errors.id_headers(self.call.id),
            (b"x-baton-route", begun[0].route_header().encode()),
            *([(b"x-baton-model", routed.header().encode())] if routed is not None else []),
            *self._limit_headers(),
            *more,
        ]

    async def _write_whole(self, send: Send) -> int:
        for active in self.call.active:
            active.record.sent = True
        await self._finish()
        size = sum(map(bulk_bytes, self.call.active))
        body = await off_loop(size, lambda: msgspec.json.encode(self._whole()))
        length = (b"content-length", str(len(body)).encode())
        headers = self._start_headers(b"application/json", length)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        for active in self.call.active:
            if active.record.first_token_ns:
                self._context.lane.observer.first_content(active, active.record.first_token_ns)
        return 200


def bulk_bytes(active: ActiveRequest) -> int:
    """Estimate the size of embeddings and prompt logprobs; see ``off_loop``."""
    logprobs = active.record.prompt_logprobs
    embedding_bytes = len(active.record.embedding)
    if logprobs is None:
        return embedding_bytes
    return len(logprobs.logprobs) * (2 + 2 * logprobs.alternatives)
