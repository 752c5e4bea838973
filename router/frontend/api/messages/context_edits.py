"""Edits of a conversation before the model sees it: Anthropic's ``context_management``.

    clear_thinking_20251015     drops the thinking of all but the last assistant turns
    clear_tool_uses_20250919    replaces old results of tools once the prompt is long

Edits change messages only; the client keeps the whole conversation. Pure: no clock, no I/O.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.fields import Ignored
from router.frontend.api.messages.body import (
    ContextAmount,
    ContextEdit,
    MessagesBlock,
    MessagesTurn,
)

CLEARED_RESULT = "[result of an earlier tool call, cleared to save context]"
_CLEAR_THINKING = "clear_thinking_20251015"
_CLEAR_TOOL_USES = "clear_tool_uses_20250919"
_TRIGGER = ContextAmount(type="input_tokens", value=100_000)
_KEPT_TOOL_USES = 3
_KEPT_THINKING_TURNS = 1

CountTokens = Callable[[Sequence[MessagesTurn]], int]
"""Returns the number of prompt tokens with these messages."""


class Edited(NamedTuple):
    """Edited messages.

    Attributes:
        messages: Messages that the model sees.
        applied: Entries of ``applied_edits`` in the response.
        original_tokens: Prompt tokens before the edits; None if no edit needed the number.
    """

    messages: list[MessagesTurn]
    applied: list[dict[str, Any]]
    original_tokens: int | None


def edited(
    messages: Sequence[MessagesTurn],
    edits: Sequence[ContextEdit],
    count_tokens: CountTokens,
    ignored: Ignored,
) -> Edited:
    """Apply edits to a conversation.

    Args:
        messages: The conversation.
        edits: Edits in the order of their application.
        count_tokens: Counter of prompt tokens, called only if an edit may have an effect.
        ignored: Collects edits of other types.
    """
    current = list(messages)
    applied = []
    tokens: int | None = None
    original: int | None = None
    for index, edit in enumerate(edits):
        where = f"context_management.edits[{index}]"
        if any(edit.type == earlier.type for earlier in edits[:index]):
            raise InvalidRequestError.at(f"{where}.type", "occurs twice")
        if edit.type == _CLEAR_THINKING:
            changed, cleared = _without_thinking(current, edit, where)
            name = "cleared_thinking_turns"
        elif edit.type == _CLEAR_TOOL_USES:
            old = _old_tool_uses(current, edit, where)
            changed, cleared = _without_results(current, edit, old)
            name = "cleared_tool_uses"
        else:
            ignored.leave_out(edit.type, "context_management.edits[]")
            continue
        if not cleared:
            continue
        if tokens is None:
            tokens = count_tokens(current)
        if original is None:
            original = tokens
        if edit.type == _CLEAR_TOOL_USES and not _is_triggered(edit, current, tokens, where):
            continue
        left = count_tokens(changed)
        least = 0
        if edit.clear_at_least is not None:
            least = _value(edit.clear_at_least, f"{where}.clear_at_least")
        if tokens - left < least:
            continue
        applied.append({"type": edit.type, name: cleared, "cleared_input_tokens": tokens - left})
        current = changed
        tokens = left
    return Edited(current, applied, original)


def _is_triggered(
    edit: ContextEdit, messages: Sequence[MessagesTurn], tokens: int, where: str
) -> bool:
    trigger = edit.trigger or _TRIGGER
    amount = len(_uses(messages)) if trigger.type == "tool_uses" else tokens
    return amount > _value(trigger, f"{where}.trigger")


def _without_thinking(
    messages: Sequence[MessagesTurn], edit: ContextEdit, where: str
) -> tuple[list[MessagesTurn], int]:
    """Return the messages without old thinking, and the number of turns that lost it."""
    if edit.keep == "all" or (edit.keep is not None and edit.keep.type == "all"):
        return list(messages), 0
    kept = _KEPT_THINKING_TURNS
    if edit.keep is not None:
        kept = _value(edit.keep, f"{where}.keep")
    with_thinking = [i for i, message in enumerate(messages) if _thinks(message)]
    old = set(with_thinking[: max(len(with_thinking) - kept, 0)])
    changed = [
        message.model_copy(update={"content": [b for b in _blocks(message) if not _is_thought(b)]})
        if index in old
        else message
        for index, message in enumerate(messages)
    ]
    return changed, len(old)


def _thinks(message: MessagesTurn) -> bool:
    return message.role == "assistant" and any(map(_is_thought, _blocks(message)))


def _is_thought(block: MessagesBlock) -> bool:
    return block.type in ("thinking", "redacted_thinking")


def _blocks(message: MessagesTurn) -> list[MessagesBlock]:
    return message.content if isinstance(message.content, list) else []


def _uses(messages: Sequence[MessagesTurn]) -> list[MessagesBlock]:
    return [block for m in messages for block in _blocks(m) if block.type == "tool_use"]


def _old_tool_uses(messages: Sequence[MessagesTurn], edit: ContextEdit, where: str) -> set[str]:
    """Return the ids of the calls whose results may be cleared."""
    if edit.keep == "all" or (edit.keep is not None and edit.keep.type != "tool_uses"):
        raise InvalidRequestError.at(f"{where}.keep", "must be of type tool_uses")
    kept = _value(edit.keep, f"{where}.keep") if edit.keep is not None else _KEPT_TOOL_USES
    excluded = set(edit.exclude_tools or ())
    uses = [block.id for block in _uses(messages) if block.name not in excluded and block.id]
    return set(uses[: max(len(uses) - kept, 0)])


def _value(amount: ContextAmount, where: str) -> int:
    if amount.value is None:
        raise InvalidRequestError.at(f"{where}.value", "is required")
    return amount.value


def _without_results(
    messages: Sequence[MessagesTurn], edit: ContextEdit, old: set[str]
) -> tuple[list[MessagesTurn], int]:
    """Return the messages with cleared results of ``old`` calls, and the number of these."""
    inputs = edit.clear_tool_inputs
    cleared = 0
    changed = []
    for message in messages:
        blocks = []
        for block in _blocks(message):
            is_old = (block.tool_use_id or block.id) in old
            if block.type == "tool_result" and is_old and block.content != CLEARED_RESULT:
                cleared += 1
                block = block.model_copy(update={"content": CLEARED_RESULT})
            elif block.type == "tool_use" and is_old and _clears_input(block, inputs):
                block = block.model_copy(update={"input": {}})
            blocks.append(block)
        changed.append(message.model_copy(update={"content": blocks}) if blocks else message)
    return changed, cleared


def _clears_input(block: MessagesBlock, inputs: bool | list[str] | None) -> bool:
    return inputs is True or (isinstance(inputs, list) and block.name in inputs)
