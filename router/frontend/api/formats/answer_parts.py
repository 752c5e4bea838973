"""Parts of an answer as newer APIs send them: thinking, text and calls. No I/O, no clock.

    deltas   "Let me" "…" │ <call 0> {"ci │ ty": "Paris"} │ <call 1> {}
    events   Begin More More End │ Begin More More End    │ Begin More End

Within a delta, the rest of an open call precedes thinking, then text and other calls in the order
in which the model wrote them.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from baton.text.tool_calls import CallDelta
from router.frontend.api.tool_use.custom import InputReader
from router.routing.requests.choice import Delta, ShownLogprob

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True, kw_only=True)
class AnswerPart:
    """A part of an answer.

    Attributes:
        index: Position in the answer.
        id: Id in the format of the API.
        call_id: Id of a call, which its result refers to.
        name: Name of the called function.
        custom: Whether the called tool is a custom one.
        pieces: Text so far; arguments in the case of a call, input in that of a custom tool.
    """

    index: int
    kind: Kind
    id: str
    call_id: str = ""
    name: str = ""
    custom: bool = False
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ShownLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Complete text so far."""
        return "".join(self.pieces)


class Begin(NamedTuple):
    """Event: a part begins."""

    part: AnswerPart


class More(NamedTuple):
    """Event: a part continues; ``text`` is already in its pieces."""

    part: AnswerPart
    text: str
    logprobs: list[ShownLogprob]


class End(NamedTuple):
    """Event: a part is complete or was cut off."""

    part: AnswerPart


Event = Begin | More | End


class AnswerParts:
    """Splitter of an answer's deltas into parts.

    Args:
        new_id: Function that returns an id for a part of this kind, or ``custom``, and index.
        custom: Names of custom tools, whose parts contain the input instead of arguments.
    """

    def __init__(
        self, new_id: Callable[[Kind | Literal["custom"], int], str], custom: Collection[str] = ()
    ) -> None:
        self.parts: list[AnswerPart] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._new_id = new_id
        self._custom = custom
        self._reader: InputReader | None = None  # of the open part
        self._open: AnswerPart | None = None
        self._waiting: list[ShownLogprob] = []  # of tokens whose text is not known
        self._call_index = -1  # of the open part, as the deltas count calls
        self._events: list[Event] = []

    def push(self, delta: Delta) -> list[Event]:
        """Add a delta. Return its events."""
        calls = delta.calls
        if calls and calls[0].id is None and calls[0].index == self._call_index:
            self._add_call(calls[0])  # the rest of the open call precedes the text behind it
            calls = calls[1:]
        if delta.reasoning:
            self._add("thinking", delta.reasoning, [])
        text_at = 0
        logprobs_at = 0
        for call in calls:
            text_end = len(delta.text) if call.text_before is None else call.text_before
            shown = len(delta.logprobs) if call.logprobs_before is None else call.logprobs_before
            self._add_text(delta.text[text_at:text_end], delta.logprobs[logprobs_at:shown])
            text_at = text_end
            logprobs_at = shown
            if self._call_index != call.index:
                self._begin("call", call.id or "", call.name or "")
                self._call_index = call.index
            self._add_call(call)
        self._add_text(delta.text[text_at:], delta.logprobs[logprobs_at:])
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
        return self._taken()

    def finish(self, *, never_empty: bool = False) -> list[Event]:
        """End the answer. Return the last events. ``never_empty`` adds an empty text."""
        if never_empty and not self.parts:
            self._begin("text")
        self._end()
        return self._taken()

    def _add_text(self, text: str, logprobs: list[ShownLogprob]) -> None:
        """Add text. Log-probabilities of tokens without text belong to the text that follows."""
        self._waiting += logprobs
        if text:
            waiting = self._waiting
            self._waiting = []
            self._add("text", text, waiting)

    def _add_call(self, call: CallDelta) -> None:
        arguments = call.arguments
        if self._reader is not None:
            arguments = self._reader.push(arguments)
        if arguments:
            self._add("call", arguments, [])

    def _taken(self) -> list[Event]:
        events = self._events
        self._events = []
        return events

    def _add(self, kind: Kind, text: str, logprobs: list[ShownLogprob]) -> None:
        part = self._open
        if part is None or part.kind != kind:
            part = self._begin(kind)
        part.pieces.append(text)
        part.logprobs += logprobs
        self._events.append(More(part, text, logprobs))

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> AnswerPart:
        self._end()
        custom = kind == "call" and name in self._custom
        index = len(self.parts)
        part_id = self._new_id("custom" if custom else kind, index)
        part = AnswerPart(
            index=index, kind=kind, id=part_id, call_id=call_id, name=name, custom=custom
        )
        if custom:
            self._reader = InputReader()
        self._open = part
        self.parts.append(part)
        self._events.append(Begin(part))
        return part

    def _end(self) -> None:
        if self._open is not None and self._reader is not None:
            rest = self._reader.finish()
            self._reader = None
            if rest:
                self._add("call", rest, [])
        if self._open is not None and self._open.kind == "text" and self._waiting:
            waiting = self._waiting
            self._waiting = []
            self._add("text", "", waiting)
        if self._open is not None:
            self._events.append(End(self._open))
        self._open = None
        self._call_index = -1
