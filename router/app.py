"""The router's HTTP face: one FastAPI application over one gateway."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, HTTPException, Request, Response
from opentelemetry.trace import Span
from pydantic import BaseModel

from engine.core.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    PayloadTooLargeError,
)
from router.adapter_table import AdapterSharedTable
from router.api import errors as problems
from router.api.answer import Answer, AnswerContext
from router.api.embeddings import EmbeddingAnswer
from router.api.lora_endpoints import add_adapter_calls
from router.api.prepare import Caller, Preparer, off_loop, read_headers, tenant_of
from router.api.responses import ChatFormat, CompletionFormat
from router.api.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    GenerationBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
    parse,
)
from router.api.structured_output import wanted_grammar
from router.api.tools import messages_of, offered
from router.api.tracing import embedding_span, ended_on_error, gateway_span, traceparent_of
from router.placement.index_feed import EventSource, MirrorFeeder
from router.placement.prefix_index import PrefixIndex
from router.requests.gateway import Gateway
from router.requests.grammar_checker import GrammarChecker
from router.requests.observer import Observer
from router.requests.readiness import Prober
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.workers.directory import WorkerDirectory
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing

_Body = TypeVar("_Body", ChatBody, CompletionBody, EmbeddingBody)


class Router:
    """Everything that one router process holds.

    Args:
        settings: Its configuration.
        model: The model it serves.
        directory: Which workers there are.
        events: KV events for the mirror, or None to route without an index.
        shelf: Where routers share the adapters loaded at run time, or None to keep them here.
    """

    def __init__(
        self,
        settings: RouterSettings,
        model: ServedModel,
        directory: WorkerDirectory,
        events: EventSource | None = None,
        shelf: AdapterSharedTable | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.metrics = Metrics("router", model=model.names[0])
        self.tracing = Tracing("router")
        self.observer = Observer(self.metrics)
        self.prefix_index = PrefixIndex()
        self.gateway = Gateway(
            settings, model.tokenizer, directory, self.prefix_index, self.observer
        )
        self.preparer = Preparer(model, settings)
        self.grammars = GrammarChecker(model.vocabulary, self.metrics)
        self.prober = Prober(self.gateway, settings)
        self.created = int(time.time())
        self._shelf = shelf
        self._feeder = MirrorFeeder(self.prefix_index, events, self.metrics)

    @contextlib.asynccontextmanager
    async def running(self, _: object = None) -> AsyncIterator[None]:
        """Connected to the workers, for as long as the context lasts."""
        state_dir = self.settings.state_dir
        file = Path(state_dir) / "adapters.json" if state_dir else None
        self.model.adapters.start(self._shelf, file)
        self.gateway.start()
        self._feeder.start()
        try:
            yield
        finally:
            await self._feeder.close()
            await self.model.adapters.close()
            await self.grammars.close()
            await self.gateway.close()
            self.tracing.shutdown()

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(
            title="Baton router",
            summary="OpenAI's API over a disaggregated fleet",
            lifespan=self.running,
            redoc_url=None,
        )
        problems.install(app)
        self._add_generation(app)
        self._add_models(app)
        add_adapter_calls(app, self.model.adapters, self.settings, self._body, _documented)
        self._add_text(app)
        self._add_operations(app)
        _describe_bodies(app)
        return app

    # --- generation -----------------------------------------------------------------------------

    def _add_generation(self, app: FastAPI) -> None:
        @app.post("/v1/chat/completions", **_documented(ChatBody))
        async def chat_completions(request: Request) -> Response:
            """Answer a conversation."""
            return await self._called(request, "chat", ChatBody, self._chat)

        @app.post("/v1/completions", **_documented(CompletionBody))
        async def completions(request: Request) -> Response:
            """Continue a text."""
            return await self._called(request, "completions", CompletionBody, self._completions)

        @app.post("/v1/embeddings", **_documented(EmbeddingBody))
        async def embeddings(request: Request) -> Response:
            """One vector for each input."""
            return await self._called(request, "embeddings", EmbeddingBody, self._embeddings)

    async def _called(
        self,
        request: Request,
        endpoint: str,
        kind: type[_Body],
        answer: Callable[[_Body, int, Caller, int], Awaitable[Response]],
    ) -> Response:
        """Check who calls and what is asked, then ``answer(body, its bytes, caller, now_ns)``."""
        now_ns = time.monotonic_ns()
        with self._counted(endpoint):
            caller = read_headers(request.headers, self.settings)
            raw = await self._body(request)
            body = await off_loop(len(raw), lambda: parse(kind, raw))
            self.model.check_name(body.model)
            return await answer(body, len(raw), caller, now_ns)

    async def _embeddings(
        self, body: EmbeddingBody, size: int, caller: Caller, now_ns: int
    ) -> Response:
        span = embedding_span(self.tracing, body, caller)
        caller = traceparent_of(span, caller)
        with ended_on_error(span):
            requests = await off_loop(size, lambda: self.preparer.embeddings(body, caller, now_ns))
        context = self._context("embeddings", requests[0].answer_id, span)
        return EmbeddingAnswer(context, requests, body, at_once=self.settings.window_requests)

    async def _chat(self, body: ChatBody, size: int, caller: Caller, now_ns: int) -> Response:
        span = gateway_span(self.tracing, "chat", body, caller)
        caller = traceparent_of(span, caller)
        with ended_on_error(span):
            grammar = await self._grammar(body, size, caller, now_ns)
            prepared = await off_loop(
                size, lambda: self.preparer.chat(body, caller, now_ns, grammar)
            )
        layout = ChatFormat(n=prepared.sampling.n, **self._format_parts(prepared.request_id, body))
        context = self._context("chat", prepared.request_id, span)
        return Answer(
            context,
            [prepared],
            layout,
            stream=bool(body.stream),
            include_usage=body.include_usage,
        )

    async def _completions(
        self, body: CompletionBody, size: int, caller: Caller, now_ns: int
    ) -> Response:
        span = gateway_span(self.tracing, "text_completion", body, caller)
        caller = traceparent_of(span, caller)
        with ended_on_error(span):
            grammar = await self._grammar(body, size, caller, now_ns)
            requests = await off_loop(
                size, lambda: self.preparer.completions(body, caller, now_ns, grammar)
            )
        answer_id = requests[0].answer_id
        echoes = await off_loop(size, lambda: self._echoes(body)) if body.echo else None
        layout = CompletionFormat(
            n=requests[0].sampling.n,
            echoes=echoes,
            echo_logprobs=body.logprobs,
            **self._format_parts(answer_id, body),
        )
        return Answer(
            self._context("completions", answer_id, span),
            requests,
            layout,
            stream=bool(body.stream),
            include_usage=body.include_usage,
        )

    async def _grammar(self, body: GenerationBody, size: int, caller: Caller, now_ns: int) -> str:
        """What the answer must follow, tried and found good; empty = free."""
        wanted = await off_loop(size, lambda: wanted_grammar(body))
        if wanted is None:
            return ""
        try:
            async with asyncio.timeout(caller.timeout_s - (time.monotonic_ns() - now_ns) / 1e9):
                return await self.grammars.check(*wanted, caller.tenant)
        except TimeoutError as error:
            self.metrics.inc("baton_timeouts", phase="grammar")
            said = f"the grammar could not be checked within {caller.timeout_s:g} s"
            raise DeadlineError(said, param="x-baton-timeout-ms") from error

    def _echoes(self, body: CompletionBody) -> list[str]:
        decode = self.model.tokenizer.decode
        return [item if isinstance(item, str) else decode(item) for item in body.prompts()]

    def _format_parts(self, answer_id: str, body: GenerationBody) -> dict[str, Any]:
        return {
            "answer_id": answer_id,
            "created": int(time.time()),
            "model": body.model,
            "fingerprint": f"baton-{self.model.artifact.weights_digest.hex()[:12]}",
            "tokenizer": self.model.tokenizer,
            "include_usage": body.include_usage,
            "prompt_logprobs": body.prompt_logprobs,
        }

    def _context(self, endpoint: str, request_id: str, span: Span) -> AnswerContext:
        return AnswerContext(
            gateway=self.gateway,
            observer=self.observer,
            span=span,
            endpoint=endpoint,
            request_id=request_id,
            keep_alive_s=self.settings.keep_alive_s,
        )

    @contextlib.contextmanager
    def _counted(self, endpoint: str) -> Any:
        """Count what is refused before there is an answer to count."""
        try:
            yield
        except Exception as error:
            known = error if isinstance(error, BatonError) else InternalError(str(error))
            self.observer.rejected(known.code, "all")
            self.observer.answered(endpoint, known.status, "all")
            raise

    async def _body(self, request: Request) -> bytes:
        """The request's body, read no further than the limit."""
        limit = self.settings.max_body_bytes
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise _too_large(limit)
        return bytes(body)

    # --- the model ------------------------------------------------------------------------------

    def _add_models(self, app: FastAPI) -> None:
        @app.get("/v1/models")
        async def models(request: Request) -> dict[str, Any]:
            """The model that this fleet serves, under each of its names, and its adapters."""
            tenant_of(request.headers, self.settings)
            names = [*self.model.names, *(entry.name for entry in self.model.adapters.served())]
            return {"object": "list", "data": [self._record(name) for name in names]}

        @app.get("/v1/models/{model_id:path}")
        async def model(request: Request, model_id: str) -> dict[str, Any]:
            """The artifact record: what exactly is served."""
            tenant_of(request.headers, self.settings)
            return self._record(self.model.check_name(model_id))

    def _record(self, name: str) -> dict[str, Any]:
        dtypes = {
            group.dtype
            for slot in self.gateway.workers.usable
            if slot.link is not None
            for group in slot.link.capabilities.kv_groups
        }
        return self.model.record(name, self.created, ",".join(sorted(dtypes)))

    def _add_text(self, app: FastAPI) -> None:
        @app.post("/tokenize", **_documented(TokenizeBody))
        async def tokenize(request: Request) -> Response:
            """Token ids of a prompt, or of the prompt that a conversation makes."""
            tenant_of(request.headers, self.settings)
            raw = await self._body(request)
            answer = await off_loop(len(raw), lambda: self._tokenized(raw))
            return Response(answer, media_type="application/json")

        @app.post("/detokenize", **_documented(DetokenizeBody))
        async def detokenize(request: Request) -> Response:
            """The text of token ids, special ones included."""
            tenant_of(request.headers, self.settings)
            raw = await self._body(request)
            answer = await off_loop(len(raw), lambda: self._detokenized(raw))
            return Response(answer, media_type="application/json")

    def _tokenized(self, raw: bytes) -> bytes:
        body = parse(TokenizeBody, raw)
        tokens = self._tokens_of(body)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self.model.max_context_tokens,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = [self.model.tokenizer.token_text(i) for i in tokens]
        return orjson.dumps(answer)

    def _detokenized(self, raw: bytes) -> bytes:
        body = parse(DetokenizeBody, raw)
        if body.model is not None:
            self.model.check_name(body.model)
        self.model.check_ids(body.tokens, "tokens")
        text = self.model.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return orjson.dumps({"prompt": text})

    def _tokens_of(self, body: TokenizeBody) -> list[int]:
        if body.model is not None:
            self.model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            return self.model.encode_chat(
                messages_of(body.messages),
                offered(body.tools),
                add_generation_prompt=body.add_generation_prompt,
            )
        if body.tools is not None:
            raise InvalidRequestError("tools: only with messages", param="tools")
        return self.model.tokenizer.encode(
            body.prompt or "", add_special_tokens=body.add_special_tokens
        )

    # --- operations -----------------------------------------------------------------------------

    def _add_operations(self, app: FastAPI) -> None:
        @app.get("/health/live")
        async def live() -> dict[str, str]:
            """This process answers."""
            return {"status": "live"}

        @app.get("/health/ready")
        async def ready(response: Response) -> dict[str, Any]:
            """A real short request went through every live pair of workers."""
            result = await self.prober.check()
            response.status_code = 200 if result["status"] == "ready" else 503
            return result

        @app.get("/metrics")
        async def metrics() -> Response:
            """Prometheus' text format."""
            self._set_gauges()
            return Response(self.metrics.render(), media_type=self.metrics.content_type)

        @app.get("/fleet")
        async def fleet() -> dict[str, Any]:
            """The workers as they last reported, ``age_s`` ago: half a second at most."""
            return self.gateway.workers.describe()

        @app.get("/fleet/targets")
        async def targets(request: Request) -> list[dict[str, Any]]:
            """Prometheus' HTTP service discovery."""
            return self._targets(request.url.netloc)

        @app.get("/fleet/requests/{request_id}")
        async def explain(request: Request, request_id: str) -> dict[str, Any]:
            """What was decided for a request, and why."""
            tenant_of(request.headers, self.settings)
            found = self.gateway.explain(request_id)
            if found is None:
                raise HTTPException(404, "this router does not know the request (any more)")
            return found

    def _set_gauges(self) -> None:
        counts: dict[tuple[str, str], int] = {}
        for slot in self.gateway.workers:
            counts[slot.role, slot.state] = counts.get((slot.role, slot.state), 0) + 1
        for role in ("prefill", "decode"):
            for state in ("starting", "ready", "draining", "dead"):
                count = counts.get((role, state), 0)
                self.metrics.set("baton_workers", count, role=role, state=state)
        self.metrics.set("baton_mirror_names", self.prefix_index.total_names)
        self.metrics.set("baton_adapters_served", len(self.model.adapters.served()))

    def _targets(self, own: str) -> list[dict[str, Any]]:
        fleet = self.settings.fleet
        found = [{"targets": [own], "labels": {"component": "router", "fleet": fleet}}]
        found += [
            {
                "targets": [slot.record.metrics_address],
                "labels": {
                    "component": "worker",
                    "fleet": fleet,
                    "worker": slot.worker_id,
                    "role": slot.role,
                },
            }
            for slot in self.gateway.workers
            if slot.record.metrics_address and slot.state != "dead"
        ]
        return found


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than {limit} bytes")


def _documented(kind: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's description of a body that the endpoint parses itself."""
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    content = {"application/json": {"schema": reference}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def _describe_bodies(app: FastAPI) -> None:
    """Add the schemas of the bodies to what FastAPI knows of the endpoints."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        kinds = (ChatBody, CompletionBody, EmbeddingBody, TokenizeBody, DetokenizeBody)
        for kind in (*kinds, LoadAdapterBody, UnloadAdapterBody):
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]
