"""OpenAI's Responses API: ``/v1/responses`` and access to stored responses."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from opentelemetry.trace import Span

from baton.types.errors import InvalidRequestError, PromptTooLongError
from router.frontend.api.answer import Answer
from router.frontend.api.bodies.common import ModelBody
from router.frontend.api.caller import Caller
from router.frontend.api.endpoints import Endpoints, page_of
from router.frontend.api.generation import Arrival, Calls
from router.frontend.api.responses.body import InputTokensBody, ResponsesBody, ResponsesItem
from router.frontend.api.responses.format import ResponsesFormat
from router.frontend.api.responses.head import head_of, kept_input
from router.frontend.api.responses.store import EarlierResponses, ResponseStore
from router.frontend.api.responses.tools import offered_tools
from router.frontend.api.responses.translate import chat_of
from router.frontend.api.tracing import ended_on_error
from router.frontend.api.translation import Translation, as_answer
from router.frontend.off_loop import off_loop
from router.process import Process
from router.request import GenerationRequest

_PAGE = 20
_MAX_PAGE = 100


def routes(router: Process) -> Endpoints:
    """Return the endpoints of the Responses API."""
    api = Endpoints()
    calls = _ResponsesCalls(router)

    calls.serve(api, "/v1/responses", ResponsesBody, "responses", _ResponsesCalls.responses)
    count = "/v1/responses/input_tokens", InputTokensBody, "input_tokens"
    calls.serve(api, *count, _ResponsesCalls.input_tokens)

    @api.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> dict[str, Any]:
        """Return a response that is stored, or running on this router."""
        return await calls.found(request, response_id)

    @api.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
        """Delete a stored response."""
        await calls.store.delete(router.access.tenant(request.headers), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @api.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> dict[str, Any]:
        """Cancel a response that is running on this router."""
        return await calls.cancel(request, response_id)

    @api.get("/v1/responses/{response_id}/input_items")
    async def response_input_items(request: Request, response_id: str) -> dict[str, Any]:
        """List the input items of a stored response."""
        kept = await calls.store.get(router.access.tenant(request.headers), response_id)
        return _page(kept.input, request.query_params)

    return api


class _ResponsesCalls(Calls):
    def __init__(self, router: Process) -> None:
        super().__init__(router)
        limits = router.settings.clients.stored_responses
        self.store = ResponseStore(
            router.sources.responses if router.sources is not None else None,
            limits.max_response_bytes,
            router.metrics,
            router.policies,
        )
        # Running responses by tenant and id.
        self._open: WeakValueDictionary[tuple[str, str], ResponsesFormat] = WeakValueDictionary()

    async def responses(self, body: ResponsesBody, arrival: Arrival) -> Response:
        """Answer a conversation with a list of items."""
        caller = arrival.caller
        translation, given, arrival = await self._translated(body, arrival)
        prepared, span = await self._prepared(body, translation, arrival)
        answer_id = f"resp_{secrets.token_hex(16)}"
        request = as_answer(prepared, answer_id=answer_id, most_tokens=body.max_output_tokens)
        if body.max_output_tokens is not None:
            span.set_attribute("gen_ai.request.max_tokens", body.max_output_tokens)
        size_bytes = arrival.size_bytes
        kept = (
            await off_loop(size_bytes, lambda: kept_input(answer_id, given)) if body.keeps else []
        )

        policies = self._router.policies
        deletion = policies.deletion_of(caller.tenant)

        async def keep(response: dict[str, Any]) -> str:
            if policies.deletion_of(caller.tenant) != deletion:
                return "the tenant's data was deleted while the response was generated"
            return await self.store.keep(caller.tenant, response, kept)

        with ended_on_error(span):
            head = head_of(body, answer_id, request)
        tokenizer = arrival.lane.model.tokenizer
        forms = {tool.name: tool.form for tool in offered_tools(body.tools)}
        layout = ResponsesFormat(head, tokenizer, forms, keep if body.keeps else None)
        self._open[caller.tenant, answer_id] = layout
        context = self.context("responses", answer_id, arrival, span)
        return Answer(context, [request], layout, stream=bool(body.stream))

    async def conversation(self, body: ModelBody, caller: Caller) -> str:
        """Return the opening of the conversation, which may begin in a stored response."""
        if not isinstance(body, InputTokensBody):
            return await super().conversation(body, caller)
        kept = EarlierResponses(self.store, caller.tenant, self._router.settings.max_body_bytes)
        earlier = await kept.conversation(body.previous_response_id)
        return body.opening_after(earlier)

    async def input_tokens(self, body: InputTokensBody, arrival: Arrival) -> Response:
        """Count the prompt tokens of a response."""
        translation, _, arrival = await self._translated(body, arrival)
        chat = await off_loop(arrival.size_bytes, translation.chat)
        with translation.named():
            count = await self.prompt_tokens("input_tokens", chat, arrival)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def found(self, request: Request, response_id: str) -> dict[str, Any]:
        """Return a stored response, or the current state of one that is running here."""
        if request.query_params.get("stream") == "true":
            raise InvalidRequestError.at(
                "stream", "the events of a response are not stored; leave it out"
            )
        tenant = self._router.access.tenant(request.headers)
        running = self._running(tenant, response_id)
        if running is not None:
            return running.snapshot("in_progress")
        return (await self.store.get(tenant, response_id)).response

    async def cancel(self, request: Request, response_id: str) -> dict[str, Any]:
        tenant = self._router.access.tenant(request.headers)
        running = self._running(tenant, response_id)
        in_flight = self._router.lanes.find(response_id)
        if running is not None and in_flight is not None:
            gateway, active = in_flight
            gateway.cancel(active, "the response was cancelled")
            return running.snapshot("cancelled")
        kept = await self.store.get(tenant, response_id)
        raise InvalidRequestError.at(
            "response_id",
            f"the response has already ended ({kept.response.get('status')}); only "
            "its own router can cancel a running one",
        )

    def _running(self, tenant: str, response_id: str) -> ResponsesFormat | None:
        in_flight = self._router.lanes.find(response_id)
        if in_flight is None or in_flight[1].record.ended:
            return None
        return self._open.get((tenant, response_id))

    async def _translated(
        self, body: InputTokensBody, arrival: Arrival
    ) -> tuple[Translation, list[ResponsesItem], Arrival]:
        """Return the chat of a body and earlier responses, the body's items, and bytes of all."""
        caller = arrival.caller
        kept = EarlierResponses(self.store, caller.tenant, self._router.settings.max_body_bytes)
        earlier = await kept.conversation(body.previous_response_id)
        given = await kept.resolve(body.items())
        arrival = replace(arrival, size_bytes=arrival.size_bytes + kept.bytes_read)
        translation = await off_loop(
            arrival.size_bytes, lambda: chat_of(body, earlier, given, caller.ignored)
        )
        return translation, given, arrival

    async def _prepared(
        self, body: ResponsesBody, translation: Translation, arrival: Arrival
    ) -> tuple[GenerationRequest, Span]:
        size_bytes = arrival.size_bytes
        chat = await off_loop(size_bytes, translation.chat)
        with translation.named():
            try:
                return await self.chat_request(chat, arrival)
            except PromptTooLongError:
                if body.truncation != "auto":
                    raise
            with_images = await arrival.with_images(chat)
            shorter = await off_loop(size_bytes, lambda: _truncated(translation, with_images))
            return await self.chat_request(shorter.chat(), arrival)


def _truncated(whole: Translation, arrival: Arrival) -> Translation:
    """Return the conversation without as many of the first turns as necessary."""
    preparer = arrival.preparer
    cuts = whole.turns()
    fits = len(cuts) - 1
    first = 0
    while first < fits:  # the last turn is kept even if it does not fit
        middle = (first + fits) // 2
        try:
            preparer.chat(whole.from_turn(cuts[middle]).chat(), arrival.caller, arrival.at_ns)
        except PromptTooLongError:
            first = middle + 1
        else:
            fits = middle
    return whole.from_turn(cuts[fits])


def _page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a list, newest first by default."""
    order = query.get("order", "desc")
    limit = query.get("limit", str(_PAGE))
    if order not in ("asc", "desc"):
        raise InvalidRequestError.at("order", f"must be asc or desc (got {order[:40]!r})")
    if not (limit.isdecimal() and len(limit) <= 9 and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidRequestError.at("limit", f"must be 1 to {_MAX_PAGE} (got {limit[:40]!r})")
    listed = list(items) if order == "asc" else list(reversed(items))
    return page_of(listed, int(limit), query.get("after", ""))
