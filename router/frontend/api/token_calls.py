"""vLLM's calls for token ids: ``/inference/v1/generate``, and the calls that render prompts."""

import re
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from pydantic import ConfigDict, Field

from router.frontend.api.answer import Answer
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.common import OperatorBody
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.generate import GenerateBody, GenerateSampling, TokensBody
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.bodies.parse import parse_operators
from router.frontend.api.call_headers import client_id_of
from router.frontend.api.endpoints import Endpoints, read_body
from router.frontend.api.formats.openai import TokensFormat
from router.frontend.api.generation import Arrival, Calls, format_parts
from router.frontend.api.translation import Translation
from router.frontend.off_loop import off_loop
from router.process import Process
from router.request import GenerationRequest

_Id = Annotated[str, Field(max_length=256)]
_SAMPLING = "|".join(map(re.escape, GenerateSampling.model_fields))
_NAMES = {r"prompt\b": "token_ids", rf"({_SAMPLING})\b": r"sampling_params.\1"}
_FIELDS = Translation(fields={}, places=(), names=_NAMES)


def routes(router: Process) -> Endpoints:
    """Return the endpoints of vLLM's calls for token ids."""
    api = Endpoints()
    calls = _TokenCalls(router)

    chat = "/v1/chat/completions/render", ChatBody, "render"
    completions = "/v1/completions/render", CompletionBody, "render"
    calls.serve(api, "/inference/v1/generate", GenerateBody, "generate", _TokenCalls.generate)
    calls.serve(api, *chat, _TokenCalls.render_chat)
    calls.serve(api, *completions, _TokenCalls.render_completion)

    @api.post("/inference/v1/abort_requests", include_in_schema=False)
    async def abort_requests(request: Request) -> Response:
        """End requests of the caller's key, or for operators of any, with the tokens they have."""
        access = router.access.of(request.headers)
        raw = await read_body(request, router)
        names = (await off_loop(len(raw), lambda: parse_operators(_AbortBody, raw))).request_ids
        wanted = {names} if isinstance(names, str) else set(names)
        for lane in router.lanes:
            for active in list(lane.gateway.active.values()):
                of = active.request
                is_own = (of.tenant, of.key_id) == (access.tenant, access.key_id)
                if (is_own or access.operator) and not wanted.isdisjoint(_names(of)):
                    lane.gateway.abort(active)
        return Response()

    return api


class _AbortBody(OperatorBody):
    model_config = ConfigDict(extra="ignore")

    request_ids: _Id | Annotated[list[_Id], Field(max_length=4096)]


def _names(request: GenerationRequest) -> set[str]:
    """Return the ids by which a client knows a request."""
    names = {request.request_id, request.answer_id}
    if request.client_id:
        names |= {request.client_id, f"{TokensBody.id_prefix}-{request.client_id}"}
    return names


class _TokenCalls(Calls):
    async def generate(self, body: GenerateBody, arrival: Arrival) -> Response:
        """Continue token ids with token ids."""
        caller = arrival.caller
        if not caller.client_id and body.request_id:
            client_id = client_id_of({"x-request-id": body.request_id})
            arrival = replace(arrival, caller=replace(caller, client_id=client_id))
        completion = body.completion()
        with _FIELDS.named():
            (request,), span = await self.completion_requests(completion, arrival)
        client_id = arrival.caller.client_id
        answer_id = f"{TokensBody.id_prefix}-{client_id}" if client_id else request.answer_id
        parts = format_parts(answer_id, completion, arrival.lane)
        layout = TokensFormat(**parts | {"token_ids": bool(body.return_token_ids)})
        context = self.context("generate", request.answer_id, arrival, span)
        return Answer(context, [request], layout, stream=bool(body.stream))

    async def render_chat(self, body: ChatBody, arrival: Arrival) -> Response:
        """Convert a chat to a body of ``/inference/v1/generate``, without running the model."""
        return await self._rendered(body, arrival)

    async def render_completion(self, body: CompletionBody, arrival: Arrival) -> Response:
        """Convert each prompt to a body of ``/inference/v1/generate``."""
        return await self._rendered(body, arrival)

    async def _rendered(self, body: ChatBody | CompletionBody, arrival: Arrival) -> Response:
        grammar = await self.grammar(body, arrival)
        preparer, caller = arrival.preparer, arrival.caller

        def render() -> bytes:
            if isinstance(body, ChatBody):
                request = preparer.chat(body, caller, arrival.at_ns, grammar)
                return msgspec.json.encode(_rendered(body, request))
            requests = preparer.completions(body, caller, arrival.at_ns, grammar)
            return msgspec.json.encode([_rendered(body, request) for request in requests])

        content = await off_loop(arrival.size_bytes, render)
        self._router.observer.answered("render", 200, caller.tenant)
        return Response(content, media_type="application/json")


def _rendered(body: GenerationBody, request: GenerationRequest) -> dict[str, Any]:
    """Return the body of ``POST /inference/v1/generate`` that is the same request."""
    sampling = msgspec.structs.asdict(request.sampling) | {
        "seed": body.seed,
        "stop": request.shown.stops,
        "include_stop_str_in_output": request.shown.stop_text,
        "skip_special_tokens": not request.shown.special_tokens,
        "bad_words": body.bad_words,
        "logit_bias": body.logit_bias,
    }
    grammar = sampling.pop("grammar")
    sampling["structured_outputs"] = {"grammar": grammar} if grammar else None
    options = body.stream_options
    return {
        "request_id": request.request_id,
        "token_ids": list(request.prompt),
        "sampling_params": sampling,
        "model": body.model,
        "stream": bool(body.stream),
        "stream_options": options.model_dump() if options is not None else None,
        "cache_salt": body.cache_salt,
        "priority": request.priority,
    }
