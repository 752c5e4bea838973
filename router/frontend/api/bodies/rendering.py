"""What a chat says about the writing of its prompt."""

from collections.abc import Mapping
from typing import Any

from baton.text.template import ChatTemplate, Rendering
from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.chat import ChatBody

_OWN = ("messages", "tools")  # what a template is told in any case


def rendering(
    values: Mapping[str, Any] | None, begin_answer: bool | None, go_on: bool | None
) -> Rendering:
    """How a prompt is written.

    Args:
        values: ``chat_template_kwargs``.
        begin_answer: ``add_generation_prompt``; None: unless the answer goes on with a message.
        go_on: ``continue_final_message``.

    Raises:
        InvalidRequestError: They exclude each other, or a value has the name of something else.
    """
    if begin_answer and go_on:
        raise InvalidRequestError(
            "continue_final_message: the answer goes on with the last message, so "
            "add_generation_prompt must not be true",
            param="continue_final_message",
        )
    told = dict(values or {})
    for name in _OWN:
        if name in told:
            where = f"chat_template_kwargs.{name}"
            raise InvalidRequestError(f"{where}: give {name} beside it", param=where)
    own_begin = told.pop("add_generation_prompt", None)
    if begin_answer is None and isinstance(own_begin, bool) and not go_on:
        begin_answer = own_begin
    begin = not go_on if begin_answer is None else begin_answer
    return Rendering(values=told, begin_answer=begin, go_on=bool(go_on))


def rendering_of(body: ChatBody, template: ChatTemplate) -> Rendering:
    """How the prompt of a chat is written; hints go to a template that knows them."""
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
