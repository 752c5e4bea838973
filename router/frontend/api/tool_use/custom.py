"""Custom tools, whose input is plain text. The model calls them as functions with one argument.

A call ``{"input": "SELECT 1"}`` of the model becomes the text for the client, piece by
piece. So custom tools work with the call format of every model.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from baton.text.tool_calls import CallDelta
from router.routing.requests.choice import Delta

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_ENDS_IN_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)$")
_ENDS_IN_PAIR = re.compile(
    r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)$"
)
_END = re.compile(r'(?<!\\)(?:\\\\)*"')


def parameters_of(syntax: str, definition: str) -> dict[str, Any]:
    """Return the JSON schema of a custom tool's input.

    Args:
        syntax: ``regex``, whose ``definition`` is enforced; ``lark``, which the model only reads;
            empty for any text.
        definition: Text of the grammar.
    """
    text: dict[str, Any] = {"type": "string"}
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    elif syntax:
        text["description"] = f"Text of this grammar ({syntax}):\n{definition}"
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def arguments_of(text: str) -> str:
    """Return the arguments of the call with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


class InputReader:
    """Incremental decoder of one call's arguments to the input. Text of another form is kept."""

    def __init__(self) -> None:
        self._buffer = ""
        self._state = "head"

    def push(self, arguments: str) -> str:
        """Add a piece of the arguments; return the new piece of the input."""
        if self._state == "ended":
            return ""
        self._buffer += arguments
        if self._state == "head":
            head = _HEAD.match(self._buffer)
            if head is None:
                return ""
            self._buffer = self._buffer[head.end() :]
            self._state = "text"
        return self._text()

    def finish(self) -> str:
        """Return the rest at the end of the arguments, which may be cut off."""
        rest = self._buffer if self._state == "head" else ""
        self._buffer = ""
        self._state = "ended"
        return rest

    def _text(self) -> str:
        end = _END.search(self._buffer)
        if end is not None:
            text = self._buffer[: end.end() - 1]
            self._buffer = ""
            self._state = "ended"
            return _unescaped(text)
        held = _ENDS_IN_PAIR.search(self._buffer) or _ENDS_IN_ESCAPE.search(self._buffer)
        cut = held.start(1) if held is not None else len(self._buffer)
        text = self._buffer[:cut]
        self._buffer = self._buffer[cut:]
        return _unescaped(text)


def _unescaped(text: str) -> str:
    try:
        decoded: str = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
    return decoded


@dataclass(frozen=True, slots=True)
class ShownCall:
    """Piece of a call in OpenAI's form; ``id`` and ``name`` are only in the first one.

    Attributes:
        kind: ``function`` or ``custom``.
        field: Name of the field with the text: ``arguments`` or ``input``.
    """

    index: int
    id: str | None
    name: str | None
    kind: str
    field: str
    text: str


class ChatCalls:
    """Converter of the calls of a chat, for all its choices.

    Args:
        custom: Names of custom tools.
    """

    def __init__(self, custom: Collection[str]) -> None:
        self._custom = custom
        self._readers: dict[tuple[int, int], InputReader] = {}  # by choice and call

    def of(self, delta: Delta) -> list[ShownCall]:
        """Return the pieces of calls in a delta."""
        shown = [self._shown(delta.choice, call) for call in delta.calls]
        if delta.finish_reason is not None:
            for choice, index in [key for key in self._readers if key[0] == delta.choice]:
                rest = self._readers.pop((choice, index)).finish()
                if rest:
                    shown.append(ShownCall(index, None, None, "custom", "input", rest))
        return shown

    def _shown(self, choice: int, call: CallDelta) -> ShownCall:
        key = (choice, call.index)
        if call.name in self._custom:
            self._readers[key] = InputReader()
        reader = self._readers.get(key)
        if reader is None:
            return ShownCall(
                call.index, call.id, call.name, "function", "arguments", call.arguments
            )
        text = reader.push(call.arguments)
        return ShownCall(call.index, call.id, call.name, "custom", "input", text)
