"""Endpoints that run the model: chat completions, completions, embeddings."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

from fastapi import Request, Response
from opentelemetry.trace import Span

from baton.telemetry.logs import request_context
from baton.types.errors import BatonError, DeadlineError, InternalError
from router.frontend.api.answer import Answer
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.common import ModelBody
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.bodies.fields import Ignored
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.bodies.parse import parse
from router.frontend.api.call_headers import client_id_of, ignored_of
from router.frontend.api.call_response import AnswerContext
from router.frontend.api.caller import Caller, read_headers
from router.frontend.api.embeddings import EmbeddingAnswer
from router.frontend.api.endpoints import Endpoints, read_body
from router.frontend.api.formats.openai import AnswerHead, ChatFormat, CompletionFormat
from router.frontend.api.images import Images, read_images
from router.frontend.api.prepare import NO_GRAMMAR, AnswerGrammar, Preparer
from router.frontend.api.relaxation import Relaxations
from router.frontend.api.structured_output import grammar_bytes, requested_grammar
from router.frontend.api.tracing import embedding_span, ended_on_error, gateway_span, traceparent_of
from router.frontend.errors import OPENAI_ERRORS, ErrorShape, refused_id
from router.frontend.http.connection import Deliveries
from router.frontend.http.departure import ended_by_departure
from router.frontend.http.intake import arrived_ns_of
from router.frontend.off_loop import off_loop
from router.lane import Lane
from router.process import Process
from router.request import GenerationRequest, Routed
from router.routing.requests.call import Call

_Body = TypeVar("_Body", bound=ModelBody)
_Generation = TypeVar("_Generation", bound=GenerationBody)
_Prepared = TypeVar("_Prepared")


def routes(router: Process) -> Endpoints:
    """Return ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``."""
    api = Endpoints()
    calls = Calls(router)

    calls.serve(api, "/v1/chat/completions", ChatBody, "chat", Calls.chat_completions)
    calls.serve(api, "/v1/completions", CompletionBody, "completions", Calls.completions)
    calls.serve(api, "/v1/embeddings", EmbeddingBody, "embeddings", Calls.embeddings)
    return api


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Caller, lane, size and time of a call, which are known before its images are read."""

    lane: Lane
    caller: Caller
    size_bytes: int
    at_ns: int
    images: Images = field(default_factory=dict, repr=False)

    @property
    def preparer(self) -> Preparer:
        """Converter of bodies to requests of the lane."""
        lane = self.lane
        pool_tokens = lane.gateway.workers.pool_tokens
        chain_of = lane.gateway.placer.chain_of
        return Preparer(lane.model, lane.settings, lane.core, pool_tokens, self.images, chain_of)

    async def with_images(self, body: ModelBody) -> Self:
        """Return the arrival with the images of a chat."""
        if not isinstance(body, ChatBody):
            return self
        return replace(self, images=await read_images(body, self.lane, self.caller.tenant))

    def traced(self, span: Span) -> Self:
        """Return the arrival with ``span`` as the parent of the workers' spans."""
        return replace(self, caller=traceparent_of(span, self.caller))


class Calls:
    """Handlers that validate a request and return the response that runs it."""

    def __init__(self, router: Process, errors: ErrorShape = OPENAI_ERRORS) -> None:
        self._router = router
        self._errors = errors
        self._deliveries = Deliveries()
        self._relaxations = {lane: Relaxations(lane.grammars) for lane in router.lanes}

    def serve(
        self,
        api: Endpoints,
        path: str,
        kind: type[_Body],
        endpoint: str,
        respond: Callable[[Self, _Body, Arrival], Awaitable[Response]],
    ) -> None:
        """Register ``respond``, whose name and docstring describe the call in OpenAPI."""

        async def call(request: Request) -> Response:
            return await self._answer(request, endpoint, kind, respond)

        call.__name__ = respond.__name__
        call.__doc__ = respond.__doc__
        api.post_body(path, kind)(call)

    async def _answer(
        self,
        request: Request,
        endpoint: str,
        kind: type[_Body],
        respond: Callable[[Self, _Body, Arrival], Awaitable[Response]],
    ) -> Response:
        """Check caller and body, then ``respond(calls, body, arrival)``."""
        now_ns = arrived_ns_of(request.scope)
        router = self._router
        ignored = ignored_of(request)
        with self._refusals(request, endpoint, now_ns):
            caller = read_headers(request.headers, router, ignored)
        with self._refusals(request, endpoint, now_ns, caller):
            raw = await read_body(request, router, deadline_s=caller.timeout_s)
            first = router.lanes.first.model.names[0]
            body = await off_loop(len(raw), lambda: parse(kind, raw, ignored, model=first))
            async with ended_by_departure(request.scope):
                lane, caller, name = await self._routed(body, caller)
                if body.model != name:
                    body = body.model_copy(update={"model": name})
                arrival = Arrival(lane=lane, caller=caller, size_bytes=len(raw), at_ns=now_ns)
                response = await respond(self, body, arrival)
                if isinstance(response, Answer) and caller.shadow:
                    response.call.shadow = caller.shadow
                    response.call.copied = partial(self._copied, respond, body, arrival)
                return response

    async def _copied(
        self,
        respond: Callable[[Self, _Body, Arrival], Awaitable[Response]],
        body: _Body,
        arrival: Arrival,
    ) -> Sequence[GenerationRequest]:
        """Return the requests of a call for the shadow, with its own tokenizer and template."""
        caller = arrival.caller
        body = body.model_copy(update={"model": caller.shadow})
        lane = self._router.lanes.of(caller.shadow)
        caller = replace(caller, routed=None, models=None, shadow="", ignored=Ignored())
        copied = replace(arrival, lane=lane, caller=caller, at_ns=time.monotonic_ns())
        response = await respond(self, body, copied)
        return response.call.requests if isinstance(response, Answer) else ()

    async def _routed(self, body: ModelBody, caller: Caller) -> tuple[Lane, Caller, str]:
        """Return the lane that answers a call, the caller with the reason, and the model.

        A caller whose models are limited may use the models of an alias that it may name.
        """
        router = self._router
        name = body.model
        text = ""
        if router.routes.needs_conversation(name):
            text = await self.conversation(body, caller)
        route = router.lanes.route(
            router.routes.table,
            name,
            caller.tenant,
            caller.models,
            text,
            may_fall_back=caller.may_fall_back,
        )
        lane = router.lanes.of(route.model, caller.tenant)
        model = lane.model.own_name(route.model)
        version = lane.model.version_of(route.model)
        routed = Routed(model, version, route.why, route.rollback_to, name)
        models = caller.models if route.model == name else None
        caller = replace(caller, routed=routed, models=models, shadow=route.shadow)
        return lane, caller, route.model

    async def conversation(self, body: ModelBody, caller: Caller) -> str:
        """Return the text that the requests of a conversation have in common."""
        return body.opening()

    @contextlib.contextmanager
    def _refusals(
        self, request: Request, endpoint: str, now_ns: int, caller: Caller | None = None
    ) -> Iterator[None]:
        """Let observers know of calls that are refused before an answer exists."""
        try:
            yield
        except Exception as error:
            refusal = error if isinstance(error, BatonError) else InternalError(str(error))
            call = Call(
                id=refused_id(request),
                endpoint=endpoint,
                arrived_ns=now_ns,
                tenant=caller.tenant if caller is not None else "",
                key_id=caller.key_id if caller is not None else "",
                client_id=client_id_of(request.headers),
            )
            observers = self._router.observers
            with request_context(call.id, caller.traceparent if caller is not None else ""):
                observers.refuse(call, refusal, self._errors.status(refusal))
                observers.end(call)
            raise

    async def embeddings(self, body: EmbeddingBody, arrival: Arrival) -> Response:
        """Compute a vector for each input."""
        context, requests = await self.embedding_requests("embeddings", body, arrival)
        return EmbeddingAnswer(context, requests, body)

    async def embedding_requests(
        self, endpoint: str, body: EmbeddingBody, arrival: Arrival
    ) -> tuple[AnswerContext, list[GenerationRequest]]:
        """Return the context of an embeddings call, and a request for each input."""
        span = embedding_span(self._router.tracing, body, arrival.caller)
        arrival = arrival.traced(span)
        preparer = arrival.preparer
        with ended_on_error(span):
            requests = await off_loop(
                arrival.size_bytes,
                lambda: preparer.embeddings(body, arrival.caller, arrival.at_ns),
            )
        return self.context(endpoint, requests[0].answer_id, arrival, span), requests

    async def chat_completions(self, body: ChatBody, arrival: Arrival) -> Response:
        """Generate answers to a conversation."""
        prepared, span = await self.chat_request(body, arrival)
        layout = ChatFormat(
            n=prepared.sampling.n,
            custom=body.custom_tools,
            functions=bool(body.functions),
            **format_parts(prepared.request_id, body, arrival.lane),
        )
        context = self.context("chat", prepared.request_id, arrival, span)
        return Answer(context, [prepared], layout, stream=bool(body.stream))

    async def chat_request(
        self, body: ChatBody, arrival: Arrival
    ) -> tuple[GenerationRequest, Span]:
        """Return the request of a chat and the span of its call, which the answer ends."""
        return await self._requests_of("chat", body, arrival, Preparer.chat)

    async def prompt_tokens(self, endpoint: str, body: ChatBody, arrival: Arrival) -> int:
        """Return the number of prompt tokens of a chat, for a call that only counts them."""
        caller = arrival.caller
        arrival = await arrival.with_images(body)
        preparer = arrival.preparer
        prepared = await off_loop(
            arrival.size_bytes, lambda: preparer.chat(body, caller, arrival.at_ns)
        )
        self._router.observer.answered(endpoint, 200, caller.tenant)
        return len(prepared.prompt)

    async def completions(self, body: CompletionBody, arrival: Arrival) -> Response:
        """Generate continuations of prompts."""
        requests, span = await self.completion_requests(body, arrival)
        answer_id = requests[0].answer_id
        decode = arrival.lane.model.tokenizer.decode
        echoes = None
        if body.echo:
            echoes = await off_loop(arrival.size_bytes, lambda: _echoes(body, decode))
        layout = CompletionFormat(
            n=requests[0].sampling.n,
            echoes=echoes,
            echo_logprobs=body.logprobs,
            **format_parts(answer_id, body, arrival.lane),
        )
        context = self.context("completions", answer_id, arrival, span)
        return Answer(context, requests, layout, stream=bool(body.stream))

    async def completion_requests(
        self, body: CompletionBody, arrival: Arrival
    ) -> tuple[list[GenerationRequest], Span]:
        """Return a request for each prompt, and the span of the call, which the answer ends."""
        return await self._requests_of("text_completion", body, arrival, Preparer.completions)

    async def _requests_of(
        self,
        operation: str,
        body: _Generation,
        arrival: Arrival,
        prepare: Callable[[Preparer, _Generation, Caller, int, AnswerGrammar], _Prepared],
    ) -> tuple[_Prepared, Span]:
        span = gateway_span(self._router.tracing, operation, body, arrival.caller)
        arrival = arrival.traced(span)
        with ended_on_error(span):
            grammar = await self.grammar(body, arrival)
            arrival = await arrival.with_images(body)
            call = (arrival.preparer, body, arrival.caller, arrival.at_ns, grammar)
            prepared = await off_loop(arrival.size_bytes, lambda: prepare(*call))
        return prepared, span

    async def grammar(self, body: GenerationBody, arrival: Arrival) -> AnswerGrammar:
        """Return the grammar of the answer after checking it."""
        caller = arrival.caller
        request = partial(requested_grammar, body, arrival.lane.model)
        size_bytes = grammar_bytes(body, arrival.size_bytes)
        try:
            async with asyncio.timeout(
                caller.timeout_s - (time.monotonic_ns() - arrival.at_ns) / 1e9
            ):
                grammar = await self._relaxations[arrival.lane].check(
                    lambda levels: off_loop(size_bytes, lambda: request(levels)),
                    caller.tenant,
                )
        except TimeoutError as error:
            self._router.metrics.inc("baton_timeouts", phase="grammar")
            raise DeadlineError.at(
                "x-baton-timeout-ms",
                f"checking the grammar took longer than {caller.timeout_s:g} s",
            ) from error
        if grammar is None:
            return NO_GRAMMAR
        for item in grammar.requested.ignored:
            caller.ignored.leave_out(item, "tools[]")
        return AnswerGrammar(grammar.compiled, grammar.requested.checked)

    def context(
        self, endpoint: str, request_id: str, arrival: Arrival, span: Span
    ) -> AnswerContext:
        """Return the context of the answer ``request_id``."""
        return AnswerContext(
            router=self._router,
            lane=arrival.lane,
            deliveries=self._deliveries,
            span=span,
            endpoint=endpoint,
            request_id=request_id,
            errors=self._errors,
        )


def _echoes(body: CompletionBody, decode: Callable[[list[int]], str]) -> list[str]:
    return [item if isinstance(item, str) else decode(item) for item in body.prompts()]


def format_parts(answer_id: str, body: GenerationBody, lane: Lane) -> dict[str, Any]:
    """Return the arguments that all formats of OpenAI's kind have in common."""
    fingerprint = _fingerprint(lane.model.artifact.weights_digest, lane.settings.emulated)
    return {
        "head": AnswerHead(answer_id, int(time.time()), body.model, fingerprint),
        "tokenizer": lane.model.tokenizer,
        "include_usage": body.include_usage,
        "continuous_usage": body.continuous_usage,
        "prompt_logprobs": body.prompt_logprobs,
        "token_ids": bool(body.return_token_ids),
    }


def _fingerprint(weights_digest: bytes, emulated: str) -> str:
    """Return OpenAI's ``system_fingerprint``, which identifies the weights or the emulation."""
    return f"baton-emulated-{emulated}" if emulated else f"baton-{weights_digest.hex()[:12]}"
