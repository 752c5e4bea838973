"""Options of a chat that control how its prompt is rendered."""

from collections.abc import Mapping
from typing import Any

from baton.text.template import ChatTemplate, Rendering
from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.chat import ChatBody

_OWN = ("messages", "tools")  # always passed to a template


def rendering(
    values: Mapping[str, Any] | None, begin_answer: bool | None, go_on: bool | None
) -> Rendering:
    """Return the options of the chat template.

    Args:
        values: ``chat_template_kwargs``.
        begin_answer: ``add_generation_prompt``; None: true, unless the last message is continued.
        go_on: ``continue_final_message``.

    Raises:
        InvalidRequestError: The options exclude each other, or a value has a reserved name.
    """
    if begin_answer and go_on:
        raise InvalidRequestError.at(
            "continue_final_message", "cannot be combined with add_generation_prompt: true"
        )
    kwargs = dict(values or {})
    for name in _OWN:
        if name in kwargs:
            where = f"chat_template_kwargs.{name}"
            raise InvalidRequestError.at(where, f"is not allowed; use the field {name} of the body")
    own_begin = kwargs.pop("add_generation_prompt", None)
    if begin_answer is None and isinstance(own_begin, bool) and not go_on:
        begin_answer = own_begin
    begin = not go_on if begin_answer is None else begin_answer
    return Rendering(values=kwargs, begin_answer=begin, go_on=bool(go_on))


def rendering_of(body: ChatBody, template: ChatTemplate) -> Rendering:
    """Return the options of a chat; hints are passed only to templates that support them."""
    values: dict[str, Any] = {}
    effort = body.reasoning_effort
    if effort is not None and template.knows("reasoning_effort"):
        values["reasoning_effort"] = effort
    if effort == "none" and template.knows("enable_thinking"):
        values["enable_thinking"] = False
    if body.enable_thinking is not None:
        values["enable_thinking"] = body.enable_thinking
    values |= body.chat_template_kwargs or {}
    return rendering(values, body.add_generation_prompt, body.continue_final_message)
