"""Messages of one conversation, with the server's own responses. Does no I/O.

A response that calls tools is followed by their results, since servers reject calls without
results and results without calls. Any other response is followed by a user's message.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from loadtest.client.answer import ToolCall

_Message = dict[str, Any]

_SHORT_RESULT = "done"
"""Result of every call of a response but the last one, so that the prompt grows as planned."""


class Dialogue:
    """Dialogue with an optional system prompt and tools, which every request repeats."""

    def __init__(self, system: str = "", tools: Sequence[dict[str, Any]] = ()) -> None:
        self.tools = list(tools)
        self._system = [{"role": "system", "content": system}] if system else []
        self.begin()

    def begin(self) -> None:
        """Start again without history."""
        self._history: list[_Message] = list(self._system)
        self._asked: list[_Message] = []

    def ask(self, text: str) -> list[_Message]:
        """Return all messages of the next request; ``text`` is the new message or tool result."""
        last = self._history[-1] if self._history else {}
        *calls, final = [call["id"] for call in last.get("tool_calls", ())] or [""]
        if final:
            self._asked = [_result(call, _SHORT_RESULT) for call in calls]
            self._asked.append(_result(final, text))
        else:
            self._asked = [{"role": "user", "content": text}]
        return [*self._history, *self._asked]

    def keep(self, text: str, calls: Sequence[ToolCall]) -> None:
        """Add the request and its response to the history.

        Without a response nothing is added, since a server may reject a question without a reply.
        """
        answer: _Message = {"role": "assistant", "content": text}
        complete = [_call(call) for call in calls if _is_complete(call)]
        if complete:
            answer["tool_calls"] = complete
        if text or complete:
            self._history += [*self._asked, answer]


def _result(call_id: str, text: str) -> _Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _call(call: ToolCall) -> _Message:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _is_complete(call: ToolCall) -> bool:
    """Return False for a call that the limit of output tokens cut."""
    try:
        msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        return False
    return bool(call.id and call.name)
