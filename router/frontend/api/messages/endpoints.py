"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Response
from fastapi.responses import JSONResponse

from router.frontend.api.answer import Answer
from router.frontend.api.endpoints import Endpoints
from router.frontend.api.generation import Arrival, Calls
from router.frontend.api.messages.body import CountTokensBody, MessagesBody, MessagesTurn
from router.frontend.api.messages.context_edits import Edited
from router.frontend.api.messages.context_edits import edited as apply_edits
from router.frontend.api.messages.errors import MESSAGES_ERRORS
from router.frontend.api.messages.format import MessagesFormat
from router.frontend.api.messages.translate import chat_of
from router.frontend.api.translation import as_answer
from router.frontend.off_loop import off_loop
from router.process import Process

_Counted = TypeVar("_Counted", bound=CountTokensBody)


def routes(router: Process) -> Endpoints:
    """Return the endpoints of the Messages API."""
    api = Endpoints()
    calls = _MessagesCalls(router, MESSAGES_ERRORS)

    calls.serve(api, "/v1/messages", MessagesBody, "messages", _MessagesCalls.messages)
    count = "/v1/messages/count_tokens", CountTokensBody, "count_tokens"
    calls.serve(api, *count, _MessagesCalls.count_tokens)
    return api


class _MessagesCalls(Calls):
    async def messages(self, body: MessagesBody, arrival: Arrival) -> Response:
        """Answer a conversation in Anthropic's format."""
        body, edited = await self._edited(body, arrival)
        ignored = arrival.caller.ignored
        translation = await off_loop(arrival.size_bytes, lambda: chat_of(body, ignored))
        chat = await off_loop(arrival.size_bytes, translation.chat)
        with translation.named():
            prepared, span = await self.chat_request(chat, arrival)
        span.set_attribute("gen_ai.request.max_tokens", body.max_tokens)
        answer_id = f"msg_{secrets.token_hex(16)}"
        request = as_answer(prepared, answer_id=answer_id, most_tokens=body.max_tokens)
        layout = MessagesFormat(
            message_id=answer_id,
            model=body.model,
            fills_context=request.sampling.max_tokens < body.max_tokens,
            applied_edits=edited.applied if edited is not None else None,
        )
        context = self.context("messages", answer_id, arrival, span)
        return Answer(context, [request], layout, stream=bool(body.stream))

    async def count_tokens(self, body: CountTokensBody, arrival: Arrival) -> Response:
        """Count the prompt tokens of a message."""
        body, edited = await self._edited(body, arrival)
        ignored = arrival.caller.ignored
        translation = await off_loop(arrival.size_bytes, lambda: chat_of(body, ignored))
        chat = await off_loop(arrival.size_bytes, translation.chat)
        with translation.named():
            count = await self.prompt_tokens("count_tokens", chat, arrival)
        answer: dict[str, Any] = {"input_tokens": count}
        if edited is not None:
            original = count if edited.original_tokens is None else edited.original_tokens
            answer["context_management"] = {"original_input_tokens": original}
        return JSONResponse(answer)

    async def _edited(self, body: _Counted, arrival: Arrival) -> tuple[_Counted, Edited | None]:
        """Return the body with edited messages; None if the client requests no edits."""
        given = body.context_management
        if given is None:
            return body, None
        whole = await off_loop(arrival.size_bytes, lambda: chat_of(body))
        with whole.named():
            arrival = await arrival.with_images(whole.chat())

        def count(messages: Sequence[MessagesTurn]) -> int:
            translation = chat_of(body.model_copy(update={"messages": messages}))
            chat = translation.chat()
            with translation.named():
                return len(arrival.preparer.chat_prompt(chat, arrival.caller))

        edited = await off_loop(
            arrival.size_bytes,
            lambda: apply_edits(body.messages, given.edits, count, arrival.caller.ignored),
        )
        return body.model_copy(update={"messages": edited.messages}), edited
