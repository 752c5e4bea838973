"""Cuts the deltas of one answer into the parts that newer APIs send: thinking, text, calls.

    deltas   "Let me" "…" │ <call 0> {"ci │ ty": "Paris"} │ <call 1> {}
    events   Begin More More End │ Begin More More End    │ Begin More End

Within a delta thinking stands before text, and text before calls. Pure: no I/O, no clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from router.routing.choice import Delta, ShownLogprob

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True, kw_only=True)
class Part:
    """One part of an answer.

    Attributes:
        index: The how-many-th of its answer.
        id: As the API names it; made by `AnswerParts.new_id`.
        call_id: Of a call, as its result will name it.
        name: Of the function that is called.
        text: What is written of it so far, in pieces; of a call its arguments.
    """

    index: int
    kind: Kind
    id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ShownLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


class Begin(NamedTuple):
    """A part begins."""

    part: Part


class More(NamedTuple):
    """A part goes on; ``text`` is among its pieces already."""

    part: Part
    text: str
    logprobs: list[ShownLogprob]


class End(NamedTuple):
    """A part is complete, or the answer was cut within it."""

    part: Part


Event = Begin | More | End


class AnswerParts:
    """The parts of one answer, as its deltas come.

    Args:
        new_id: Makes the id of a part of a kind.
    """

    def __init__(self, new_id: Callable[[Kind], str]) -> None:
        self.parts: list[Part] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._new_id = new_id
        self._open: Part | None = None
        self._call_index = -1  # of the open part, as the deltas count calls
        self._events: list[Event] = []

    def push(self, delta: Delta) -> list[Event]:
        """What a delta adds."""
        if delta.reasoning:
            self._add("thinking", delta.reasoning, [])
        if delta.text:
            self._add("text", delta.text, delta.logprobs)
        for call in delta.calls:
            if self._call_index != call.index:
                self._begin("call", call.id or "", call.name or "")
                self._call_index = call.index
            if call.arguments:
                self._add("call", call.arguments, [])
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
        return self._taken()

    def finish(self, *, never_empty: bool = False) -> list[Event]:
        """No more deltas come.

        Args:
            never_empty: An answer without parts gets an empty text.
        """
        if never_empty and not self.parts:
            self._begin("text")
        self._end()
        return self._taken()

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

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Part:
        self._end()
        index = len(self.parts)
        part_id = self._new_id(kind)
        part = Part(index=index, kind=kind, id=part_id, call_id=call_id, name=name)
        self._open = part
        self.parts.append(part)
        self._events.append(Begin(part))
        return part

    def _end(self) -> None:
        if self._open is not None:
            self._events.append(End(self._open))
        self._open = None
        self._call_index = -1
