"""Responses in the format of the Responses API: items, and numbered events."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import time
from typing import Any, Literal, NamedTuple

from baton.text.tokenizer import TextTokenizer
from baton.types.errors import BatonError, CancelledError_
from router.frontend.api.formats.answer_format import (
    KEEP_ALIVE_COMMENT,
    AnswerFormat,
    TextEvent,
    named_event,
    usage,
)
from router.frontend.api.formats.answer_parts import (
    AnswerPart,
    AnswerParts,
    Begin,
    End,
    Event,
    Kind,
    More,
)
from router.frontend.api.formats.prompt_logprobs import shown_logprob
from router.frontend.api.responses.tools import CallForm
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.choice import CUT, Delta, ShownLogprob

_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
_ITEM_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})_(in|out)(\d{1,6})")

Keep = Callable[[dict[str, Any]], Awaitable[str]]
"""Stores a response; returns "" or the reason why it is not stored."""


def item_id(response_id: str, prefix: str, place: str, index: int) -> str:
    """Return an item's id, which contains its location: ``msg_<response>_out0``."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{place}{index}"


class ItemPlace(NamedTuple):
    """Location of a stored item."""

    response_id: str
    given: bool  # in the input of the response; otherwise in its output
    position: int


def place_of(name: str) -> ItemPlace | None:
    """Return the location that an item's id contains; None if the id has another format."""
    match = _ITEM_ID.fullmatch(name)
    return None if match is None else ItemPlace(f"resp_{match[1]}", match[2] == "in", int(match[3]))


class _NumberedText:
    """Encoder of events that differ only in their number and one text, `TextEvent.SAMPLE`."""

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        whole = named_event(kind, {"type": kind, "sequence_number": 0, **fields})
        self._before, _, behind = whole.partition(b'"sequence_number":0')
        self._text = TextEvent(behind)

    def of(self, number: int, text: str) -> bytes:
        """Return the event with this number and this text."""
        return b'%b"sequence_number":%d%b' % (self._before, number, self._text.of(text))


def _new_id(response_id: str, kind: Kind | Literal["custom"], index: int) -> str:
    return item_id(response_id, _PREFIXES[kind], "out", index)


class ResponsesFormat(AnswerFormat):
    """Writer of one response; ``head`` is the object without output, status and usage."""

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(
        self,
        head: dict[str, Any],
        tokenizer: TextTokenizer,
        forms: Mapping[str, CallForm],
        keep: Keep | None = None,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._keep = keep
        self._forms = forms
        custom = {name for name, form in forms.items() if form.custom}
        self._answer = AnswerParts(partial(_new_id, head["id"]), custom)
        self._number = 0
        self._deltas: dict[int, _NumberedText] = {}  # by part
        self._tail = b""
        self._final: dict[str, Any] = {}

    def opening(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Return the events ``response.created`` and ``response.in_progress``."""
        response = self.snapshot("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Return the events of the items that a delta belongs to."""
        return b"".join(map(self._events_of, self._answer.push(delta)))

    def failed(self, error: BatonError) -> bytes:
        """Return the event that ends a stream with an error."""
        status = "cancelled" if isinstance(error, CancelledError_) else "failed"
        response = self.snapshot(status, output=self._output())
        # OpenAI's codes of failed responses are a closed list; Baton's own is in `type`.
        fields = {"code": "server_error", "message": error.message, "type": error.code}
        return self._event("response.failed", response={**response, "error": fields})

    async def finish(self, active_requests: Sequence[ActiveRequest]) -> None:
        """Build the response object, and store it if requested."""
        for delta in active_requests[0].record.take():  # of an answer that is not streamed
            self._answer.push(delta)
        self._tail = b"".join(map(self._events_of, self._answer.finish(never_empty=True)))
        cut = self._answer.finish_reason in CUT
        self._final = {
            **self.snapshot("incomplete" if cut else "completed", output=self._output()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time()),
            "usage": _usage(active_requests),
        }
        if self._keep is not None:
            reason = await self._keep(self._final)
            if reason:
                self._final |= {"store": False, "not_stored": reason}

    def ended(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Return the end of the last item and the complete response."""
        return self._tail + self._event(f"response.{self._final['status']}", response=self._final)

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """Return the complete response."""
        return self._final

    def snapshot(self, status: str, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the current state of the response."""
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(output),
            "usage": None,
        }

    def _output(self) -> list[dict[str, Any]]:
        return [self._item(part, self._status(part)) for part in self._answer.parts]

    def _status(self, part: AnswerPart) -> str:
        cut = part is self._answer.parts[-1] and self._answer.finish_reason in (*CUT, None)
        return "incomplete" if cut else "completed"

    def _events_of(self, event: Event) -> bytes:
        match event:
            case Begin(part):
                return self._begun(part)
            case More(part, text, logprobs):
                return self._more(part, text, logprobs)
            case End(part):
                return self._done(part)

    def _begun(self, part: AnswerPart) -> bytes:
        place = {"output_index": part.index}
        item = self._item(part, "in_progress", begun=True)
        added = self._event("response.output_item.added", **place, item=item)
        if part.kind == "call":
            return added
        content = self._content(part, "", [])
        return added + self._event(
            "response.content_part.added", **self._content_place(part), part=content
        )

    def _more(self, part: AnswerPart, text: str, logprobs: Sequence[ShownLogprob]) -> bytes:
        if logprobs:
            place = self._content_place(part)
            shown = [_in_event(shown_logprob(self._tokenizer, entry)) for entry in logprobs]
            return self._event("response.output_text.delta", **place, delta=text, logprobs=shown)
        event = self._deltas.get(part.index)
        if event is None:
            event = self._deltas[part.index] = _NumberedText(*self._delta_of(part))
        return event.of(self._next_number(), text)

    def _delta_of(self, part: AnswerPart) -> tuple[str, dict[str, Any]]:
        """Return type and fields of the event for more text without log-probabilities."""
        if part.kind == "call":
            place: dict[str, Any] = {"item_id": part.id, "output_index": part.index}
            name = "custom_tool_call_input" if part.custom else "function_call_arguments"
            return f"response.{name}.delta", {**place, "delta": TextEvent.SAMPLE}
        fields = {**self._content_place(part), "delta": TextEvent.SAMPLE}
        if part.kind == "thinking":
            return "response.reasoning_text.delta", fields
        return "response.output_text.delta", {**fields, "logprobs": []}

    def _done(self, part: AnswerPart) -> bytes:
        return self._complete(part) + self._event(
            "response.output_item.done",
            output_index=part.index,
            item=self._item(part, self._status(part)),
        )

    def _complete(self, part: AnswerPart) -> bytes:
        """Return the events with an item's complete text or arguments."""
        if part.kind == "call":
            call = {"item_id": part.id, "output_index": part.index}
            if part.custom:
                name = "response.custom_tool_call_input.done"
                return self._event(name, **call, input=part.text)
            name = "response.function_call_arguments.done"
            return self._event(name, **call, name=self._form(part).name, arguments=part.text)
        place = self._content_place(part)
        content = self._content(part, part.text, part.logprobs)
        if part.kind == "thinking":
            whole = self._event("response.reasoning_text.done", **place, text=part.text)
        else:
            logprobs = [_in_event(entry) for entry in content["logprobs"]]
            whole = self._event(
                "response.output_text.done", **place, text=part.text, logprobs=logprobs
            )
        return whole + self._event("response.content_part.done", **place, part=content)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._next_number()
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1

    @staticmethod
    def _content_place(part: AnswerPart) -> dict[str, Any]:
        return {"item_id": part.id, "output_index": part.index, "content_index": 0}

    def _item(self, part: AnswerPart, status: str, *, begun: bool = False) -> dict[str, Any]:
        text = "" if begun else part.text
        item: dict[str, Any] = {"id": part.id, "status": status}
        if part.kind == "call":
            form = self._form(part)
            call = {"call_id": part.call_id, "name": form.name}
            if form.namespace:
                call["namespace"] = form.namespace
            if form.custom:  # it has no status
                return {"id": part.id, "type": "custom_tool_call", **call, "input": text}
            return {**item, "type": "function_call", **call, "arguments": text}
        content = [] if begun else [self._content(part, text, part.logprobs)]
        if part.kind == "thinking":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _form(self, part: AnswerPart) -> CallForm:
        """Return the form of a call; a model may call a function that does not exist."""
        return self._forms.get(part.name) or CallForm(part.name, "", custom=False)

    def _content(
        self, part: AnswerPart, text: str, logprobs: Sequence[ShownLogprob]
    ) -> dict[str, Any]:
        if part.kind == "thinking":
            return {"type": "reasoning_text", "text": text}
        shown = [shown_logprob(self._tokenizer, entry) for entry in logprobs]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}


def _in_event(logprob: dict[str, Any]) -> dict[str, Any]:
    """Return a log-probability as events of text have it: without ``bytes``."""
    shown = {name: value for name, value in logprob.items() if name != "bytes"}
    if "top_logprobs" in logprob:
        shown["top_logprobs"] = [_in_event(entry) for entry in logprob["top_logprobs"]]
    return shown


def _usage(active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
    counted = usage(active_requests)
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": counted["completion_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": counted["total_tokens"],
    }
