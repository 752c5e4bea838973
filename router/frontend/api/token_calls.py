"""vLLM's calls for token ids: ``/inference/v1/generate``, and the calls that render prompts."""

import re
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
from fastapi import Request, Response

from router.frontend.api.answer import Answer
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.generate import GenerateBody, GenerateSampling, TokensBody
from router.frontend.api.call_headers import client_id_of
from router.frontend.api.endpoints import Endpoints
from router.frontend.api.formats.generate import GenerateFormat, rendered
from router.frontend.api.generation import Arrival, Calls, events_of
from router.frontend.api.translation import Translation
from router.frontend.off_loop import off_loop
from router.process import Process

_SAMPLING = "|".join(map(re.escape, GenerateSampling.model_fields))
_NAMES = {r"prompt\b": "token_ids", rf"({_SAMPLING})\b": r"sampling_params.\1"}
_FIELDS = Translation(fields={}, places=(), names=_NAMES)


def routes(router: Process) -> Endpoints:
    """Return the endpoints of vLLM's calls for token ids."""
    api = Endpoints()
    calls = _TokenCalls(router)

    @api.post_body("/inference/v1/generate", GenerateBody)
    async def generate(request: Request) -> Response:
        """Continue token ids with token ids."""
        return await calls.answer(request, "generate", GenerateBody, _TokenCalls.generate)

    @api.post_body("/v1/chat/completions/render", ChatBody)
    async def render_chat(request: Request) -> Response:
        """Convert a chat to a body of ``/inference/v1/generate``, without running the model."""
        return await calls.answer(request, "render", ChatBody, _TokenCalls.rendered_chat)

    @api.post_body("/v1/completions/render", CompletionBody)
    async def render_completion(request: Request) -> Response:
        """Convert each prompt to a body of ``/inference/v1/generate``."""
        return await calls.answer(
            request, "render", CompletionBody, _TokenCalls.rendered_completion
        )

    return api


class _TokenCalls(Calls):
    async def generate(self, body: GenerateBody, arrival: Arrival) -> Response:
        caller = arrival.caller
        if not caller.client_id and body.request_id:
            client_id = client_id_of({"x-request-id": body.request_id})
            arrival = replace(arrival, caller=replace(caller, client_id=client_id))
        completion = body.completion()
        with _FIELDS.named():
            (request,), span = await self.completion_requests(completion, arrival)
        client_id = arrival.caller.client_id
        chunks = GenerateFormat(
            request_id=f"{TokensBody.id_prefix}-{client_id}" if client_id else request.answer_id,
            model=body.model,
            created=int(time.time()),
            prompt_ids=bool(body.return_token_ids),
            tokenizer=arrival.lane.model.tokenizer,
        )
        context = self.context("generate", request.answer_id, arrival, span)
        events = events_of(chunks, completion)
        return Answer(context, [request], events, stream=bool(body.stream))

    async def rendered_chat(self, body: ChatBody, arrival: Arrival) -> Response:
        grammar = await self.grammar(body, arrival)
        preparer = arrival.preparer

        def render() -> bytes:
            request = preparer.chat(body, arrival.caller, arrival.at_ns, grammar)
            return msgspec.json.encode(rendered(body, request))

        return await self._rendered(render, arrival)

    async def rendered_completion(self, body: CompletionBody, arrival: Arrival) -> Response:
        grammar = await self.grammar(body, arrival)
        preparer = arrival.preparer

        def render() -> bytes:
            requests = preparer.completions(body, arrival.caller, arrival.at_ns, grammar)
            return msgspec.json.encode([rendered(body, request) for request in requests])

        return await self._rendered(render, arrival)

    async def _rendered(self, render: Callable[[], bytes], arrival: Arrival) -> Response:
        content = await off_loop(arrival.size_bytes, render)
        self._router.observer.answered("render", 200, arrival.caller.tenant)
        return Response(content, media_type="application/json")
