"""Forms in which a chat template takes calls and reasoning, found by rendering a short chat."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from baton.text.calls.formats import CallFormat
from baton.types.errors import InvalidRequestError

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
ReasoningField = Literal["reasoning_content", "thinking", "blocks"]

_NAME = "probe_name"
_PARAMETER = "probe_parameter"
_KEY = "probe_key"
_VALUE = "probe_value"
_RESULT = "probe_result"
_THOUGHT = "probe_thought"
_ID = "abc123def"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe_description",
        "parameters": {"type": "object", "properties": {_PARAMETER: {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForms:
    """Forms in which a chat template takes messages.

    Attributes:
        arguments_as_text: Whether arguments are JSON text instead of an object.
        no_content: Whether a message with calls has no content (``None``).
        reasoning: Field of earlier reasoning; ``blocks``: a part of a list as content.
        lists_tools: Whether the template lists the functions.
    """

    arguments_as_text: bool = False
    no_content: bool = False
    reasoning: ReasoningField = "reasoning_content"
    lists_tools: bool = True


def with_reasoning(
    message: Mapping[str, Any], thoughts: str, field: ReasoningField
) -> dict[str, Any]:
    """Return a message of the assistant with its reasoning in the form of a template."""
    if field != "blocks":
        return {**message, field: thoughts}
    blocks = [{"type": "thinking", "thinking": thoughts}]
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    return {**message, "content": blocks}


def forms_of(render: Render, call_format: CallFormat) -> MessageForms | None:
    """Return the forms of a template; None if it does not render calls in this format."""
    for as_text, no_content in product((False, True), repeat=2):
        forms = MessageForms(arguments_as_text=as_text, no_content=no_content)
        text = _rendered(render, _chat(forms))
        parts = (_NAME, _KEY, _VALUE, _RESULT)
        if text is None or not all(part in text for part in parts):
            continue
        if not (call_format.in_channels or _has_call(text, call_format)):
            return None
        fields: tuple[ReasoningField, ...] = ("reasoning_content", "thinking", "blocks")
        shown = (f for f in fields if _THOUGHT in (_rendered(render, _chat(forms, f)) or ""))
        return MessageForms(
            arguments_as_text=as_text,
            no_content=no_content,
            reasoning=next(shown, "reasoning_content"),
            lists_tools=_PARAMETER in text,
        )
    return None


def _has_call(text: str, call_format: CallFormat) -> bool:
    starts = (*call_format.starts, *call_format.bare)
    return any(_NAME in start.names_in(text) for start in starts)


def _chat(forms: MessageForms, field: ReasoningField | None = None) -> list[dict[str, Any]]:
    arguments = f'{{"{_KEY}": "{_VALUE}"}}' if forms.arguments_as_text else {_KEY: _VALUE}
    call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": arguments}}
    turn: dict[str, Any] = {"role": "assistant", "content": None if forms.no_content else ""}
    if field is not None:
        turn = with_reasoning(turn, _THOUGHT, field)
    return [
        {"role": "user", "content": "probe_question"},
        {**turn, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _ID, "content": _RESULT},
    ]


def _rendered(render: Render, messages: Sequence[Mapping[str, Any]]) -> str | None:
    try:
        return render(messages, [_TOOL])
    except InvalidRequestError:
        return None
