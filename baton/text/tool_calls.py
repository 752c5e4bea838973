"""Streaming extraction of tool calls from a response. Pure: no clock, no I/O.

    text ──marker──▶ head ──{"name": "f", "arguments": ──▶ arguments ──▶ tail ──▶ text, or head
      ▲               │ └── object with keys in another order ──▶ tail
      │               └──── <function=f> ──▶ parameter ◀──▶ value
      └── not a call: output as text

``baton/text/calls/formats.py`` describes the markup. Markup that may begin or end a call is held;
everything else is output at once. Text that does not parse is output as content. The output does
not depend on how the text is split into pieces.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from baton.text.calls.formats import After, CallFormat
from baton.text.calls.parameters import ParameterReader
from baton.text.calls.patterns import Pattern, first_match
from baton.text.detokenizer import StopMatcher
from baton.text.tools import ExpectedCalls


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New part of one call; ``id`` and ``name`` are only in its first delta.

    Attributes:
        text_before: Characters of the new content that precede it; None: all.
        logprobs_before: The same for new log-probabilities.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str
    text_before: int | None = field(default=None, compare=False)
    logprobs_before: int | None = field(default=None, compare=False)


def new_call_id() -> str:
    """Return a unique id of a call."""
    return f"call_{secrets.token_hex(12)}"


class _Object:
    """Finds the end of a JSON object in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end_in(self, text: str) -> int | None:
        """Return the end of the object in the next piece; None if it continues."""
        for index, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None


class ToolCallParser:
    """Parser of one response."""

    def __init__(self, expected: ExpectedCalls, new_id: Callable[[], str] = new_call_id) -> None:
        self.calls = 0
        self.cut = False  # the response ended within a call, or a call broke off
        self._format: CallFormat = expected.format
        self._names = expected.names
        self._only = expected.only
        self._kinds = expected.kinds
        self._new_id = new_id
        self._markers = tuple(dict.fromkeys(start.marker for start in self._format.starts))
        self._marker = StopMatcher(self._markers)
        self._starts: Sequence[Pattern] = self._format.bare
        self._buffer = ""
        self._space: str | None = ""  # white space at the border of a call; None within text
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._object = _Object()
        self._held: list[str] = []  # of an object with the name in it, or a head
        self._name: str | None = None  # of the call whose head is held
        self._after: Sequence[After] = ()
        self._parameters: ParameterReader | None = None
        self._read: Callable[[], bool] = self._head if self._format.bare else self._text

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Add text; return content and deltas of calls that are certain now."""
        self._buffer += text
        while self._buffer and self._read():
            pass
        return self._taken()

    def finish(self, *, was_cut: bool = False) -> tuple[str, list[CallDelta]]:
        """Return held content and deltas at the end of the text.

        If the text ``was_cut``, the markup of a call that lacks arguments is not shown, and the
        call appears if its name is complete. Other text may mention markup.
        """
        shows_head = not (was_cut or self._only)
        if self._read == self._text:
            self._show(self._marker.release())
        elif self._read in (self._head, self._whole):
            is_bare = self._starts is self._format.bare
            self.cut |= not is_bare
            self._finish_head(shows=shows_head or (is_bare and not self._only))
        elif self._read == self._tail:
            self._finish_tail()
        elif self._parameters is not None:
            self._finish_parameters(self._parameters, shows_head=shows_head)
        else:
            self.cut = True
        if self._space and not self.calls:
            self._content.append(self._space)
        if self._only:
            self._content = []
        self._buffer = ""
        self._space = ""
        return self._taken()

    def _finish_head(self, *, shows: bool) -> None:
        text = "".join(self._held) + self._buffer
        if shows:
            self._show(text)
            return
        try:
            call: Any = from_json(text[text.index("{") :], allow_partial=True)
            name = call.get("name")
        except (ValueError, AttributeError):
            return
        if isinstance(name, str) and self._is_offered(name):
            self._add(name=name)

    def _finish_tail(self) -> None:
        """Drop the begin of an end of the call; show other text that is not complete."""
        scans = [after.pattern.scan(self._buffer) for after in self._after]
        end = next((scan.match.end for scan in scans if scan.match is not None), 0)
        ends = [
            scan for scan, after in zip(scans, self._after, strict=True) if not after.begins_call
        ]
        self._space = ""
        if not any(scan.undecided for scan in ends):
            self._show(self._buffer[end:])

    def _finish_parameters(self, parameters: ParameterReader, *, shows_head: bool) -> None:
        """Complete a call that lacks only the markup behind its end; show other text."""
        read = parameters.finish(self._buffer)
        self.cut |= read.state == "broken"
        if self._name is not None and not read.json:
            if shows_head or read.state == "broken":
                self._show("".join(self._held) + self._buffer)
            else:
                self._add_named("")
            return
        if read.json:
            self._add_named(read.json)
        if read.state == "ended":
            self.calls += 1
            self._space = ""
        self._show(read.rest)

    def _taken(self) -> tuple[str, list[CallDelta]]:
        content = "".join(self._content)
        self._content = []
        deltas = self._deltas
        self._deltas = []
        return content, deltas

    # Each state reads from the buffer and returns False if it needs more text.

    def _text(self) -> bool:
        whole = self._marker.held + self._buffer
        shown, marker = self._marker.push(self._buffer)
        self._buffer = whole[len(shown) :] if marker is not None else ""
        self._show(shown)
        if marker is not None:
            self._starts = self._format.starts
            self._read = self._head
        return marker is not None

    def _head(self) -> bool:
        index, scan = first_match(self._starts, self._buffer)
        if scan.undecided:
            return False
        if scan.match is None or not self._is_offered(scan.match.name):
            self._no_call()
        else:
            self._begin(self._starts[index], *scan.match)
        return True

    def _is_offered(self, name: str) -> bool:
        """Return whether a name may be called, where text may look like a call."""
        is_bare = self._starts is self._format.bare
        return name in self._names or not (is_bare or self._format.parameters is not None)

    def _no_call(self) -> None:
        """Output the marker as text, and continue behind it."""
        marker = next((m for m in self._markers if self._buffer.startswith(m)), "")
        if self._starts is self._format.bare:
            marker = ""
        self._show(marker)
        self._buffer = self._buffer[len(marker) :]
        self._read = self._text

    def _begin(self, pattern: Pattern, end: int, name: str) -> None:
        """Start a call behind its head, or an object that may be one."""
        self._object = _Object()
        if not pattern.has_name:
            self._held = [self._buffer[:end]]
            self._read = self._whole
        elif self._format.parameters is not None:
            # A head alone may be a mention of the markup.
            self._held = [self._buffer[:end]]
            self._name = name
            kinds = self._kinds.get(name, {})
            self._parameters = ParameterReader(self._format.parameters, kinds)
            self._read = self._parameter
        else:
            self._add(name=name)
            self._read = self._arguments
        self._buffer = self._buffer[end:]

    def _whole(self) -> bool:
        """Read a complete object, whose keys may be in any order."""
        end = self._object.end_in(self._buffer)
        self._held.append(self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        held = "".join(self._held)
        self._held = []
        call = _call_in(held[held.index("{") :])
        if call is None:
            self._show(held)
            self._read = self._text
            return True
        self._add(name=call[0])
        self._add(call[1])
        self._end_call(self._format.after_object)
        return True

    def _arguments(self) -> bool:
        end = self._object.end_in(self._buffer)
        self._add(self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        self._end_call(self._format.after)
        return True

    def _end_call(self, after: Sequence[After]) -> None:
        self.calls += 1
        self._after = after
        self._read = self._tail

    def _tail(self) -> bool:
        index, scan = first_match([after.pattern for after in self._after], self._buffer)
        if scan.undecided:
            return False
        self._space = ""
        self._read = self._text
        if scan.match is None:
            return True
        if self._after[index].begins_call:
            self._begin(self._after[index].pattern, *scan.match)
        else:
            self._buffer = self._buffer[scan.match.end :]
        return True

    def _parameter(self) -> bool:
        if self._parameters is None:
            return False
        read = self._parameters.read(self._buffer)
        went_on = read.rest != self._buffer
        self._buffer = read.rest
        if read.state == "broken" and self._name is not None:
            self._show("".join(self._held))
            self._forget_head()
            self._read = self._text
            return True
        if read.json:
            self._add_named(read.json)
        if read.state == "more":
            return went_on
        self.cut |= read.state == "broken"
        self._end_call(())
        return True

    def _add_named(self, arguments: str) -> None:
        """Output arguments, and before the first of them the head of the call."""
        if self._name is not None:
            self._add(name=self._name)
            self._forget_head()
        self._add(arguments)

    def _forget_head(self) -> None:
        self._held = []
        self._name = None

    def _add(self, arguments: str = "", name: str | None = None) -> None:
        call_id = None if name is None else self._new_id()
        before = sum(map(len, self._content))
        self._deltas.append(CallDelta(self.calls, call_id, name, arguments, before))

    def _show(self, text: str) -> None:
        """Output content; white space next to a call only if more text follows."""
        if self._space is not None:
            text = self._space + text
            self._space = text if not text.strip() else None
            if self._space is not None:
                return
        self._content.append(text)


def _call_in(text: str) -> tuple[str, str] | None:
    """Return name and arguments of an object that is a call; None if it is not one."""
    try:
        from_json(text)  # stricter: it limits the depth, and takes no half of a character
        call: Any = json.loads(text)
        name = call["name"]
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
    except (ValueError, KeyError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
