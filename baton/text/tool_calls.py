"""Streaming extraction of tool calls from a response. Pure: no clock, no I/O.

    text ──"<tool_call>"──▶ head ──{"name": "f", "arguments": ──▶ arguments ──▶ tail
      ▲                       └── not a call: output as text ─────────┐           │
      └───────────────────────────────────────────────────────────────┴─"</tool_call>"

A possible tag or head of a call is held; everything else is output at once. Text that does not
parse is output as content. The output does not depend on how the text is split into pieces.
"""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.text.detokenizer import StopMatcher
from baton.text.tools import CLOSE_TAG, OPEN_TAG

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_TAIL = re.compile(rf"\s*\}}\s*{CLOSE_TAG}")
_MAX_HEAD_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New part of one call; ``id`` and ``name`` are only in its first delta."""

    index: int
    id: str | None
    name: str | None
    arguments: str


def new_call_id() -> str:
    """Return a unique id of a call."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Parser of one response."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self.calls = 0
        self.cut = False  # the response ended within a call
        self._new_id = new_id
        self._read: Callable[[], bool] = self._text
        self._buffer = ""
        self._tag = StopMatcher((OPEN_TAG,))
        self._space: str | None = ""  # white space at the border of a call; None within text
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Add text; return content and deltas of calls that are certain now."""
        self._buffer += text
        while self._buffer and self._read():
            pass
        return self._taken()

    def finish(self) -> tuple[str, list[CallDelta]]:
        """Return held content and deltas at the end of the text."""
        self.cut = self._read == self._arguments
        if self._read == self._text:
            self._show(self._tag.release())
        elif self._read == self._head:
            self.cut = True
            self._show(OPEN_TAG + self._buffer)
        if self._space and not self.calls:
            self._content.append(self._space)
        self._buffer = ""
        self._space = ""
        return self._taken()

    def _taken(self) -> tuple[str, list[CallDelta]]:
        content = "".join(self._content)
        self._content = []
        deltas = self._deltas
        self._deltas = []
        return content, deltas

    # Each of the four states reads from the buffer and returns False if it needs more text.

    def _text(self) -> bool:
        whole = self._tag.held + self._buffer
        shown, tag = self._tag.push(self._buffer)
        self._buffer = whole[len(shown) + len(tag) :] if tag is not None else ""
        self._show(shown)
        if tag is not None:
            self._read = self._head
        return tag is not None

    def _head(self) -> bool:
        found = _HEAD.match(self._buffer, 0, _MAX_HEAD_CHARACTERS)
        if found is not None:
            name = json.loads(found[1])
            self._deltas.append(CallDelta(self.calls, self._new_id(), name, ""))
            self._buffer = self._buffer[found.end() :]
            self._read = self._arguments
            return True
        end = self._buffer.find(CLOSE_TAG)
        if end < 0 and len(self._buffer) <= _MAX_HEAD_CHARACTERS:
            return False
        self._whole_call(end) if 0 <= end <= _MAX_HEAD_CHARACTERS else self._no_call()
        return True

    def _whole_call(self, end: int) -> None:
        """Parse a complete call whose keys are in another order."""
        try:
            call: Any = json.loads(self._buffer[:end])
            name = call["name"]
            arguments = call["arguments"]
        except (ValueError, KeyError, TypeError):
            self._no_call()
            return
        if not isinstance(name, str) or not isinstance(arguments, dict):
            self._no_call()
            return
        written = json.dumps(arguments, ensure_ascii=False)
        self._deltas.append(CallDelta(self.calls, self._new_id(), name, ""))
        self._deltas.append(CallDelta(self.calls, None, None, written))
        self._buffer = self._buffer[end + len(CLOSE_TAG) :]
        self._end_call()

    def _no_call(self) -> None:
        self._show(OPEN_TAG)
        self._read = self._text

    def _arguments(self) -> bool:
        end = self._end_of_object()
        piece = self._buffer[:end]
        self._buffer = self._buffer[end:]
        self._deltas.append(CallDelta(self.calls, None, None, piece))
        if self._depth:
            return False
        self.calls += 1
        self._read = self._tail
        return True

    def _end_of_object(self) -> int:
        """Return how much of the buffer belongs to the current object."""
        for index, character in enumerate(self._buffer):
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
        return len(self._buffer)

    def _tail(self) -> bool:
        found = _TAIL.match(self._buffer)
        if found is not None:
            self._buffer = self._buffer[found.end() :]
        elif self._begins_tail():
            return False
        self._space = ""
        self._read = self._text
        return True

    def _end_call(self) -> None:
        self.calls += 1
        self._space = ""
        self._read = self._text

    def _begins_tail(self) -> bool:
        rest = self._buffer.lstrip()
        return not rest or (rest[0] == "}" and CLOSE_TAG.startswith(rest[1:].lstrip()))

    def _show(self, text: str) -> None:
        """Output content; white space next to a call only if more text follows."""
        if self._space is not None:
            text = self._space + text
            self._space = text if not text.strip() else None
            if self._space is not None:
                return
        self._content.append(text)
