"""Responses in the format of Anthropic's Messages API: messages of content blocks."""

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
from pydantic_core import from_json

from baton.types.errors import BatonError
from router.frontend.api.formats.answer_format import AnswerFormat, TextEvent, named_event, usage
from router.frontend.api.formats.answer_parts import (
    AnswerPart,
    AnswerParts,
    Begin,
    End,
    Event,
    Kind,
    More,
)
from router.frontend.api.formats.numbers import encodable
from router.frontend.api.messages.errors import MESSAGES_ERRORS
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.choice import CUT, Delta


class MessagesFormat(AnswerFormat):
    """Writer of one message.

    Args:
        message_id: ``msg_…``.
        model: Name that the client sent.
        fills_context: Whether the model's context limits the answer, instead of ``max_tokens``.
        applied_edits: Edits of the conversation; None if the client requested none.
    """

    keep_alive = named_event("ping", {"type": "ping"})

    def __init__(
        self,
        *,
        message_id: str,
        model: str,
        fills_context: bool,
        applied_edits: list[dict[str, Any]] | None = None,
    ) -> None:
        self._id = message_id
        self._model = model
        self._fills_context = fills_context
        self._edits: dict[str, Any] = {}
        if applied_edits is not None:
            self._edits = {"context_management": {"applied_edits": applied_edits}}
        self._answer = AnswerParts(_new_id)

    def opening(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Return the message without content, with the usage of the prompt."""
        message = self._message([], active_requests, ended=False)
        return named_event("message_start", {"type": "message_start", "message": message})

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Return the events of the blocks that a delta belongs to."""
        return b"".join(map(_event, self._answer.push(delta)))

    def failed(self, error: BatonError) -> bytes:
        """Return the event that ends a stream with an error."""
        return named_event("error", MESSAGES_ERRORS.body(error, self._id))

    def ended(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Return the end of the last block, the stop reason and the usage."""
        last_block = b"".join(map(_event, self._answer.finish()))
        fields = {"delta": self._stop(), "usage": _usage(active_requests), **self._edits}
        delta = {"type": "message_delta", **fields}
        stop = {"type": "message_stop"}
        return last_block + named_event("message_delta", delta) + named_event("message_stop", stop)

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """Return the message as JSON."""
        for delta in active_requests[0].record.take():
            self._answer.push(delta)
        self._answer.finish()
        content = [_block(part) for part in self._answer.parts]
        return self._message(content, active_requests, ended=True)

    def _message(
        self,
        content: list[dict[str, Any]],
        active_requests: Sequence[ActiveRequest],
        *,
        ended: bool,
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **(self._stop() if ended else {"stop_reason": None, "stop_sequence": None}),
            "usage": _usage(active_requests),
            **(self._edits if ended else {}),
        }

    def _stop(self) -> dict[str, Any]:
        reason = self._answer.finish_reason
        by = self._answer.stop_reason
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason in CUT:
            limit = "model_context_window_exceeded" if self._fills_context else "max_tokens"
            return {"stop_reason": limit, "stop_sequence": None}
        if isinstance(by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": by}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _new_id(kind: Kind | Literal["custom"], _: int) -> str:
    return f"toolu_{secrets.token_hex(12)}" if kind == "call" else ""


def _event(event: Event) -> bytes:
    index = event.part.index
    match event:
        case Begin(part):
            fields = {"content_block": _begun(part)}
            return _block_event("content_block_start", index, fields)
        case More(part, text):
            return _delta_event(part.kind, index).of(text)
        case End(part):
            return _block_event("content_block_stop", index, {})


def _block_event(name: str, index: int, fields: dict[str, Any]) -> bytes:
    return named_event(name, {"type": name, "index": index, **fields})


def _begun(part: AnswerPart) -> dict[str, Any]:
    """Return a block before its first delta."""
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    return {"type": "text", "text": ""}


@lru_cache(maxsize=256)
def _delta_event(kind: Kind, index: int) -> TextEvent:
    delta = _more(kind, TextEvent.SAMPLE)
    return TextEvent(_block_event("content_block_delta", index, {"delta": delta}))


def _more(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "thinking_delta", "thinking": text}
    if kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": "text_delta", "text": text}


def _block(part: AnswerPart) -> dict[str, Any]:
    block = _begun(part)
    if part.kind == "call":
        # Arguments that `max_tokens` cut off are returned as far as they go.
        try:
            given = from_json(part.text or "{}", allow_partial="trailing-strings")
        except ValueError:
            given = {}
        return {**block, "input": _input(part.text, given) if isinstance(given, dict) else {}}
    return {**block, part.kind: part.text}


def _input(text: str, given: dict[str, Any]) -> Any:
    """Return complete arguments as they are written, and cut ones as far as they go."""
    try:
        from_json(text, allow_inf_nan=False)  # `NaN` is no JSON
    except ValueError:
        return encodable(given)
    return msgspec.Raw(text)


def _usage(active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
    """Return the usage; ``input_tokens`` does not include cached tokens in this API."""
    counted = usage(active_requests)
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {
            "thinking_tokens": sum(active.record.reasoning_tokens for active in active_requests)
        },
    }
