"""Rules of streams that schemas cannot hold: numbers, order, and sums of events.

    chat         role ── deltas ── finish reason (each choice) ── [usage] ── [DONE]
    Responses    created ── in_progress ── items ── completed | incomplete
      item       output_item.added ── contents ── output_item.done
      content    content_part.added ── deltas ── text done ── content_part.done
      call       arguments.delta … ── arguments.done
    Messages     message_start ── blocks ── message_delta ── message_stop
      block      content_block_start ── content_block_delta … ── content_block_stop

An error may end a stream anywhere.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.conformance.answers import DONE, Answer, Event
from tests.conformance.cases import RESPONSES
from tests.conformance.specifications import is_anthropic

_CHANGING = ("choices", "usage")  # fields of chunks
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}

_CALLS = {  # item type to the name of its events and the field with its text
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


class OrderError(AssertionError):
    """A stream that breaks a rule."""


def check(answer: Answer) -> None:
    """Check the order of a stream's events.

    Raises:
        OrderError: A rule is broken; the message names it and the event.
    """
    if is_anthropic(answer.call):
        _Messages(answer.events).check()
    elif answer.call == RESPONSES:
        _Responses(answer.events).check()
    else:
        _check_chunks(answer.events)


def _require(holds: bool, rule: str, event: object) -> None:
    if not holds:
        raise OrderError(f"{rule}: {event!r:.300}")


def _check_chunks(events: Sequence[Event]) -> None:
    *chunks, last = [event.value for event in events]
    _require(not any(event.name for event in events), "chunks have no names", events[0])
    _require(last == DONE or set(last) == {"error"}, "[DONE] or an error is the last", last)
    ended: set[int] = set()
    begun: set[int] = set()
    calls: defaultdict[int, list[str]] = defaultdict(list)
    heads = [{k: v for k, v in chunk.items() if k not in _CHANGING} for chunk in chunks]
    for chunk, head in zip(chunks, heads, strict=True):
        _require(head == heads[0], "all chunks have the same head", chunk)
        for choice in chunk["choices"]:
            index = choice["index"]
            _require(index not in ended, "a choice ends once", chunk)
            if "delta" in choice:
                named = choice["delta"].get("role") == "assistant"
                _require(named == (index not in begun), "a choice begins with its role", chunk)
            begun.add(index)
            if choice["finish_reason"] is not None:
                ended.add(index)
            for call in choice.get("delta", {}).get("tool_calls", ()):
                new = call["index"] == len(calls[index])
                _require(new == ("id" in call), "the first part of a call has its id", chunk)
                named = "name" in (call.get("function") or call["custom"])
                _require(new == named, "and its name", chunk)
                calls[index] += [call["id"]] if new else []
                _require(call["index"] == len(calls[index]) - 1, "calls are in order", chunk)
        if not chunk["choices"]:
            _require(chunk is chunks[-1], "the usage is the last chunk", chunk)
            _require(chunk["usage"]["total_tokens"] > 0, "and counts tokens", chunk)
    if last == DONE:
        _require(ended == begun == set(range(len(begun))), "every choice has an end", chunks[-1])


class _Reader:
    """Events, one after the other; ``type`` of each is its name."""

    def __init__(self, events: Sequence[Event]) -> None:
        for event in events:
            _require(event.name == event.value["type"], "the name of an event is its type", event)
        self._events = [event.value for event in events if event.name != "ping"]
        self._at = 0

    @property
    def kind(self) -> str:
        """Type of the next event; empty at the end."""
        at_end = self._at == len(self._events)
        return "" if at_end else str(self._events[self._at]["type"])

    def take(self, *kinds: str) -> dict[str, Any]:
        """Return the next event, which has one of these types."""
        following = self._events[self._at :][:1]
        _require(self.kind in kinds, f"the next event is {' or '.join(kinds)}", following)
        self._at += 1
        event: dict[str, Any] = following[0]
        return event


class _Responses(_Reader):
    def check(self) -> None:
        """Check the whole stream."""
        numbers = [event["sequence_number"] for event in self._events]
        _require(numbers == list(range(len(numbers))), "numbers have no gaps", numbers)
        begun = self.take("response.created")["response"]
        _require((begun["status"], begun["output"]) == ("in_progress", []), "it begins", begun)
        self.take("response.in_progress")
        if self._events[-1]["type"] == "response.failed":
            _require(bool(self._events[-1]["response"]["error"]), "a failure has its error", "")
            return
        items = []
        while self.kind == "response.output_item.added":
            items.append(self._item(len(items)))
        last = self.take("response.completed", "response.incomplete")
        final = last["response"]
        _require(
            f"response.{final['status']}" == last["type"], "the last event is the status", last
        )
        _require(final["output"] == items, "the output has all items", last)
        _require(final["id"] == begun["id"], "the id does not change", last)
        _require(self.kind == "", "nothing follows the last event", self.kind)

    def _item(self, index: int) -> dict[str, Any]:
        added = self.take("response.output_item.added")
        _require(added["output_index"] == index, "items are numbered", added)
        begun = added["item"]
        fields = _CALLS.get(begun["type"])
        if begun["type"] != "custom_tool_call":  # it has no status
            _require(begun["status"] == "in_progress", "an item begins in progress", added)
        text = self._call(begun, index, *fields) if fields is not None else None
        if text is None:
            while self.kind == "response.content_part.added":
                self._content(begun, index)
        done = self.take("response.output_item.done")
        item: dict[str, Any] = done["item"]
        _require(done["output_index"] == index, "an item has one number", done)
        for name in ("id", "type", "name", "call_id"):
            _require(item.get(name) == begun.get(name), f"{name} does not change", done)
        if fields is not None:
            _require(item[fields[1]] == text, f"the item has the {fields[1]}", done)
        return item

    def _call(self, begun: dict[str, Any], index: int, name: str, field: str) -> str:
        _require(begun[field] == "", f"{field} begin empty", begun)
        return self._text(name, field, {"item_id": begun["id"], "output_index": index})

    def _content(self, begun: dict[str, Any], index: int) -> None:
        added = self.take("response.content_part.added")
        place = {"item_id": begun["id"], "output_index": index}
        place["content_index"] = added["content_index"]
        _require(place.items() <= added.items(), "a part is in its item", added)
        text = self._text(f"response.{added['part']['type']}", "text", place)
        done = self.take("response.content_part.done")
        _require(place.items() <= done.items(), "a part is in its item", done)
        _require(done["part"]["text"] == text, "a part has the whole text", done)

    def _text(self, name: str, field: str, place: dict[str, Any]) -> str:
        text = ""
        while self.kind == f"{name}.delta":
            delta = self.take(f"{name}.delta")
            _require(place.items() <= delta.items(), "a delta is in its item", delta)
            text += delta["delta"]
        done = self.take(f"{name}.done")
        _require(place.items() <= done.items(), "an end is in its item", done)
        _require(done[field] == text, "the end has the whole text", done)
        return text


class _Messages(_Reader):
    def check(self) -> None:
        """Check the whole stream."""
        message = self.take("message_start")["message"]
        begun = (message["content"], message["stop_reason"], message["stop_sequence"])
        _require(begun == ([], None, None), "a message begins empty", message)
        index = 0
        while self.kind == "content_block_start":
            if self._block(index):
                return
            index += 1
        if self.kind == "error":
            self.take("error")
        else:
            delta = self.take("message_delta")
            _require(delta["delta"]["stop_reason"] is not None, "the end has its reason", delta)
            self.take("message_stop")
        _require(self.kind == "", "nothing follows the last event", self.kind)

    def _block(self, index: int) -> bool:
        """Check one block; return whether an error ended the stream in it."""
        start = self.take("content_block_start")
        _require(start["index"] == index, "blocks are numbered", start)
        kind = _DELTAS[start["content_block"]["type"]]
        while self.kind == "content_block_delta":
            delta = self.take("content_block_delta")
            _require(delta["index"] == index, "a delta is in its block", delta)
            _require(delta["delta"]["type"] == kind, "a block has deltas of one type", delta)
        stop = self.take("content_block_stop", "error")
        if stop["type"] == "error":
            _require(self.kind == "", "nothing follows an error", self.kind)
            return True
        _require(stop["index"] == index, "a block ends itself", stop)
        return False
