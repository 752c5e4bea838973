"""Endpoints that run the model: chat completions, completions, embeddings."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

from fastapi import Request, Response
from opentelemetry.trace import Span

from baton.telemetry.logs import request_context
from baton.types.errors import BatonError, DeadlineError, InternalError
from router.frontend.api.answer import Answer, AnswerContext
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.common import ModelBody
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.bodies.fields import Ignored
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.bodies.parse import parse
from router.frontend.api.call_headers import client_id_of, ignored_of
from router.frontend.api.embeddings import EmbeddingAnswer
from router.frontend.api.formats.answer_format import ChunkFormat, DataEvents
from router.frontend.api.formats.openai import ChatFormat, CompletionFormat
from router.frontend.api.parts import Endpoints, RouterParts, read_body
from router.frontend.api.prepare import (
    NO_GRAMMAR,
    AnswerGrammar,
    Caller,
    read_headers,
)
from router.frontend.api.relaxation import Relaxations
from router.frontend.api.structured_output import requested_grammar
from router.frontend.api.tracing import embedding_span, ended_on_error, gateway_span, traceparent_of
from router.frontend.conversation import opening_of
from router.frontend.errors import OPENAI_ERRORS, ErrorShape, Refusal, refused_id
from router.frontend.http.departure import ended_by_departure
from router.frontend.http.intake import arrived_ns_of
from router.frontend.off_loop import off_loop
from router.lanes.shadow import Shadow
from router.request import GenerationRequest, Routed
from router.routing.reports.refusals import RefusedRequest
from router.served_model import ServedModel

_Body = TypeVar("_Body", bound=ModelBody)


def routes(router: RouterParts) -> Endpoints:
    """Return ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``."""
    api = Endpoints()
    calls = Calls(router)

    @api.post_body("/v1/chat/completions", ChatBody)
    async def chat_completions(request: Request) -> Response:
        """Generate answers to a conversation."""
        return await calls.answer(request, "chat", ChatBody, Calls.chat)

    @api.post_body("/v1/completions", CompletionBody)
    async def completions(request: Request) -> Response:
        """Generate continuations of prompts."""
        return await calls.answer(request, "completions", CompletionBody, Calls.completions)

    @api.post_body("/v1/embeddings", EmbeddingBody)
    async def embeddings(request: Request) -> Response:
        """Compute a vector for each input."""
        return await calls.answer(request, "embeddings", EmbeddingBody, Calls.embeddings)

    return api


class Calls:
    """Handlers that validate a request and return the response that runs it."""

    def __init__(self, router: RouterParts, errors: ErrorShape = OPENAI_ERRORS) -> None:
        self.serve(router)
        self._errors = errors
        self._of_lanes: WeakKeyDictionary[ServedModel, Self] = WeakKeyDictionary()

    async def answer(
        self,
        request: Request,
        endpoint: str,
        kind: type[_Body],
        respond: Callable[[Self, _Body, int, Caller, int], Awaitable[Response]],
    ) -> Response:
        """Check caller and body, then ``respond(calls, body, size_bytes, caller, now_ns)``.

        ``calls`` are those of the lane that serves the model.
        """
        now_ns = arrived_ns_of(request.scope)
        router = self._router
        ignored = ignored_of(request)
        with self._counted(request, endpoint, now_ns):
            caller = read_headers(request.headers, router.settings, ignored)
        with self._counted(request, endpoint, now_ns, caller):
            raw = await read_body(request, router, deadline_s=caller.timeout_s)
            body = await off_loop(
                len(raw), lambda: parse(kind, raw, ignored, model=router.model.names[0])
            )
            async with ended_by_departure(request.scope):
                lane, caller, name = await self._routed(body, caller)
                if body.model != name:
                    body = body.model_copy(update={"model": name})
                response = await respond(self._of(lane), body, len(raw), caller, now_ns)
                if isinstance(response, Answer):
                    self._follow(response, caller, partial(self._again, respond, body, len(raw)))
                return response

    def _follow(
        self,
        response: Answer,
        caller: Caller,
        again: Callable[[Caller], Awaitable[Sequence[GenerationRequest]]],
    ) -> None:
        """Let the shadow of a name, if it has one, run a copy of an answered call."""
        router = self._router
        if caller.routed is None or not router.lanes.serves(caller.shadow):
            return
        gateway = router.lanes.of(caller.shadow).gateway
        shadow = Shadow(caller.routed.requested, caller.shadow, gateway)
        response.on_answered = lambda ended: router.shadows.copy(
            shadow, ended, lambda: again(caller)
        )

    async def _again(
        self,
        respond: Callable[[Self, _Body, int, Caller, int], Awaitable[Response]],
        body: _Body,
        size: int,
        caller: Caller,
    ) -> Sequence[GenerationRequest]:
        """Return the requests of a call for the shadow, with its own tokenizer and template."""
        calls = self._of(self._router.lanes.of(caller.shadow))
        body = body.model_copy(update={"model": caller.shadow})
        caller = replace(caller, routed=None, models=None, shadow="", ignored=Ignored())
        response = await respond(calls, body, size, caller, time.monotonic_ns())
        return response.requests if isinstance(response, Answer) else ()

    async def _routed(self, body: ModelBody, caller: Caller) -> tuple[RouterParts, Caller, str]:
        """Return the lane that answers a call, the caller with the reason, and the model.

        A caller whose models are limited may use the models of an alias that it may name.
        """
        router = self._router
        name = body.model
        text = ""
        if router.routes.needs_conversation(name):
            text = await self.conversation(body, caller)
        found = router.lanes.route(
            router.routes.table,
            name,
            caller.tenant,
            caller.models,
            text,
            may_fall_back=caller.may_fall_back,
        )
        lane = router.lanes.of(found.model, caller.tenant)
        model = lane.model.own_name(found.model)
        routed = Routed(
            model, lane.model.version_of(found.model), found.why, found.rollback_to, name
        )
        models = caller.models if found.model == name else None
        caller = replace(caller, routed=routed, models=models, shadow=found.shadow)
        return lane, caller, found.model

    async def conversation(self, body: ModelBody, caller: Caller) -> str:
        """Return the text that the requests of a conversation have in common."""
        return opening_of(body)

    def _of(self, lane: RouterParts) -> Self:
        """Return the handlers of another lane."""
        if lane is self._router:
            return self
        found = self._of_lanes.get(lane.model)
        if found is None:
            found = self._of_lanes[lane.model] = copy(self)
            found.serve(lane)
        return found

    def serve(self, lane: RouterParts) -> None:
        """Handle the calls of a lane."""
        self._router = lane
        self._relaxations = Relaxations(lane.grammars)

    @contextlib.contextmanager
    def _counted(
        self, request: Request, endpoint: str, now_ns: int, caller: Caller | None = None
    ) -> Iterator[None]:
        """Count and keep requests that are rejected before an answer exists."""
        try:
            yield
        except Exception as error:
            refusal = error if isinstance(error, BatonError) else InternalError(str(error))
            if caller is not None:
                self._router.gateway.usage.refused(caller.tenant, caller.key_id, refusal.code)
            self._router.observer.rejected(refusal.code, "all")
            status = self._errors.status(Refusal.of(refusal))
            self._router.observer.answered(endpoint, status, "all")
            name = refused_id(request)
            with request_context(name, caller.traceparent if caller is not None else ""):
                self._router.request_log.refused(refusal, endpoint, "all")
            self._router.refused.add(
                RefusedRequest(
                    id=name,
                    client_id=client_id_of(request.headers),
                    tenant=caller.tenant if caller is not None else "",
                    endpoint=endpoint,
                    status=status,
                    code=refusal.code,
                    reason=refusal.message,
                    arrived_ns=now_ns,
                    refused_ns=time.monotonic_ns(),
                )
            )
            raise

    async def embeddings(
        self, body: EmbeddingBody, size: int, caller: Caller, now_ns: int
    ) -> Response:
        """Return the response to an embeddings call."""
        context, requests = await self.embedding_requests("embeddings", body, size, caller, now_ns)
        return EmbeddingAnswer(context, requests, body)

    async def embedding_requests(
        self, endpoint: str, body: EmbeddingBody, size: int, caller: Caller, now_ns: int
    ) -> tuple[AnswerContext, list[GenerationRequest]]:
        """Return the context of an embeddings call, and a request for each input."""
        preparer = self._router.preparer
        span = embedding_span(self._router.tracing, body, caller)
        caller = traceparent_of(span, caller)
        with ended_on_error(span):
            requests = await off_loop(size, lambda: preparer.embeddings(body, caller, now_ns))
        return self.context(endpoint, requests[0].answer_id, span), requests

    async def chat(self, body: ChatBody, size: int, caller: Caller, now_ns: int) -> Response:
        """Return the response to a chat."""
        prepared, span = await self.chat_request(body, size, caller, now_ns)
        chunks = ChatFormat(
            n=prepared.sampling.n,
            custom=body.custom_tools,
            functions=bool(body.functions),
            **self._format_parts(prepared.request_id, body),
        )
        return Answer(
            self.context("chat", prepared.request_id, span),
            [prepared],
            self._events(chunks, body),
            stream=bool(body.stream),
        )

    def _events(self, chunks: ChunkFormat, body: GenerationBody) -> DataEvents:
        return DataEvents(
            chunks, include_usage=body.include_usage, continuous_usage=body.continuous_usage
        )

    async def chat_request(
        self, body: ChatBody, size: int, caller: Caller, now_ns: int
    ) -> tuple[GenerationRequest, Span]:
        """Return the request of a chat and the span of its call, which the answer ends."""
        router = self._router
        span = gateway_span(router.tracing, "chat", body, caller)
        caller = traceparent_of(span, caller)
        with ended_on_error(span):
            grammar = await self._grammar(body, size, caller, now_ns)
            prepared = await off_loop(
                size, lambda: router.preparer.chat(body, caller, now_ns, grammar)
            )
        return prepared, span

    async def prompt_tokens(
        self, endpoint: str, body: ChatBody, size: int, caller: Caller, now_ns: int
    ) -> int:
        """Return the number of prompt tokens of a chat, for a call that only counts them."""
        preparer = self._router.preparer
        prepared = await off_loop(size, lambda: preparer.chat(body, caller, now_ns))
        self._router.observer.answered(endpoint, 200, caller.tenant)
        return len(prepared.prompt)

    async def completions(
        self, body: CompletionBody, size: int, caller: Caller, now_ns: int
    ) -> Response:
        """Return the response to a completion of one or more prompts."""
        router = self._router
        span = gateway_span(router.tracing, "text_completion", body, caller)
        caller = traceparent_of(span, caller)
        with ended_on_error(span):
            grammar = await self._grammar(body, size, caller, now_ns)
            requests = await off_loop(
                size, lambda: router.preparer.completions(body, caller, now_ns, grammar)
            )
        answer_id = requests[0].answer_id
        echoes = await off_loop(size, lambda: self._echoes(body)) if body.echo else None
        chunks = CompletionFormat(
            n=requests[0].sampling.n,
            echoes=echoes,
            echo_logprobs=body.logprobs,
            **self._format_parts(answer_id, body),
        )
        return Answer(
            self.context("completions", answer_id, span),
            requests,
            self._events(chunks, body),
            stream=bool(body.stream),
        )

    async def _grammar(
        self, body: GenerationBody, size: int, caller: Caller, now_ns: int
    ) -> AnswerGrammar:
        """Return the grammar of the answer after checking it."""
        request = partial(requested_grammar, body, self._router.model)
        try:
            async with asyncio.timeout(caller.timeout_s - (time.monotonic_ns() - now_ns) / 1e9):
                found = await self._relaxations.check(
                    lambda levels: off_loop(size, lambda: request(levels)),
                    caller.tenant,
                )
        except TimeoutError as error:
            self._router.metrics.inc("baton_timeouts", phase="grammar")
            raise DeadlineError.at(
                "x-baton-timeout-ms",
                f"checking the grammar took longer than {caller.timeout_s:g} s",
            ) from error
        if found is None:
            return NO_GRAMMAR
        for item in found.requested.ignored:
            caller.ignored.leave_out(item, "tools[]")
        return AnswerGrammar(found.compiled, found.requested.checked)

    def _echoes(self, body: CompletionBody) -> list[str]:
        decode = self._router.model.tokenizer.decode
        return [item if isinstance(item, str) else decode(item) for item in body.prompts()]

    def _format_parts(self, answer_id: str, body: GenerationBody) -> dict[str, Any]:
        model = self._router.model
        return {
            "answer_id": answer_id,
            "created": int(time.time()),
            "model": body.model,
            "fingerprint": _fingerprint(
                model.artifact.weights_digest, self._router.settings.emulated
            ),
            "tokenizer": model.tokenizer,
            "include_usage": body.include_usage,
            "prompt_logprobs": body.prompt_logprobs,
            "token_ids": bool(body.return_token_ids),
        }

    def context(self, endpoint: str, request_id: str, span: Span) -> AnswerContext:
        """Return the context of the answer ``request_id``."""
        return AnswerContext(
            router=self._router,
            span=span,
            endpoint=endpoint,
            request_id=request_id,
            errors=self._errors,
        )


def _fingerprint(weights_digest: bytes, emulated: str) -> str:
    """Return OpenAI's ``system_fingerprint``, which identifies the weights or the emulation."""
    return f"baton-emulated-{emulated}" if emulated else f"baton-{weights_digest.hex()[:12]}"
