"""Translation of Responses API bodies to chats."""

import re
from collections.abc import Sequence
from typing import Any

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.fields import Ignored
from router.frontend.api.responses.body import (
    InputTokensBody,
    ResponsesBody,
    ResponsesItem,
    ResponsesPart,
)
from router.frontend.api.responses.tools import OfferedTool, choice_of, joined, offered_tools
from router.frontend.api.tool_use.custom import arguments_of
from router.frontend.api.translation import Content, TranslatedConversation, Translation, required

_SAME = (
    *("stream", "temperature", "top_p", "seed", "user", "priority", "cache_salt"),
    *("prompt_cache_key", "prompt_cache_retention", "service_tier"),
)
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_NAMES = {
    r"response_format(\.json_schema)?": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    r"tool_choice\.(function|custom)": "tool_choice",
    r"tool_choice\.allowed_tools": "tool_choice",
    r"\.tool_call_id": ".call_id",
}
_HOSTED_ITEMS = re.compile(
    r"(web_search|file_search|computer|image_generation|code_interpreter|local_shell|shell|"
    r"apply_patch|mcp|tool_search)(_call)?(_output)?"
    r"|mcp_(list_tools|approval_request|approval_response)|compaction"
)


def chat_of(
    body: InputTokensBody,
    earlier: Sequence[ResponsesItem],
    given: Sequence[ResponsesItem],
    ignored: Ignored | None = None,
) -> Translation:
    """Return the chat of a body, without a limit on its answer.

    Args:
        body: Body of the request.
        earlier: Items of earlier responses.
        given: Items of the body, with references resolved.
        ignored: Collects tools and items that are left out.
    """
    ignored = Ignored() if ignored is None else ignored
    conversation = TranslatedConversation(joins=("system",))
    if body.instructions is not None:
        conversation.add_text("system", body.instructions, "instructions")
    for item in earlier:
        _add(conversation, item, "previous_response_id", ignored)
    for index, item in enumerate(given):
        where = "input" if isinstance(body.input, str) else f"input[{index}]"
        _add(conversation, item, where, ignored)
    if not conversation.messages:
        raise InvalidRequestError.at("input", "is required")
    fields: dict[str, Any] = {"model": body.model, "messages": conversation.messages}
    offered = offered_tools(body.tools, ignored)
    fields |= _tools(body, offered) | _text(body)
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if isinstance(body, ResponsesBody):
        fields |= _sampling(body)
    return Translation(
        fields=fields,
        places=conversation.places,
        names=_NAMES,
        tool_places=[tool.place for tool in offered],
        image_places=conversation.image_places,
    )


def _add(
    conversation: TranslatedConversation, item: ResponsesItem, where: str, ignored: Ignored
) -> None:
    if item.type == "message":
        role = required(item.role, f"{where}.role")
        content = _content_of(conversation, item.content, f"{where}.content")
        conversation.add_text("system" if role == "developer" else role, content, where)
    elif item.type in ("function_call", "custom_tool_call"):
        call_id = required(item.call_id, f"{where}.call_id")
        name = joined(item.namespace, required(item.name, f"{where}.name"))
        is_custom = item.type == "custom_tool_call"
        arguments = arguments_of(item.input or "") if is_custom else item.arguments or "{}"
        conversation.add_call(call_id, name, arguments, where)
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        call_id = required(item.call_id, f"{where}.call_id")
        content = _content_of(conversation, item.output, f"{where}.output")
        conversation.add_result(call_id, content, where)
    elif item.type == "reasoning":
        given = item.content or item.summary or ""
        thoughts = _content_of(conversation, given, f"{where}.content")
        if isinstance(thoughts, str) and thoughts:
            conversation.thoughts.append(thoughts)
    elif _HOSTED_ITEMS.fullmatch(item.type):
        ignored.leave_out(item.type, "input[]")
    else:
        raise InvalidRequestError.at(
            f"{where}.type",
            f"{item.type[:64]!r} is not supported; send messages, function_call, "
            "function_call_output and reasoning items",
        )


def _content_of(
    conversation: TranslatedConversation, content: str | list[ResponsesPart] | None, where: str
) -> Content:
    """Return the texts and images of an item."""
    if content is None:
        raise InvalidRequestError.at(where, "is required")
    if isinstance(content, str):
        return content
    parts: list[Any] = []
    for index, part in enumerate(content):
        name = "refusal" if part.type == "refusal" else "text"
        text: str | None = getattr(part, name)
        if part.type == "input_image":
            url = required(part.image_url, f"{where}[{index}].image_url")
            parts.append(conversation.image(url, f"{where}[{index}]"))
            continue
        if part.type not in (*_TEXT_PARTS, "refusal"):
            raise InvalidRequestError.at(
                f"{where}[{index}].type",
                f"{part.type[:64]!r} is not supported; send its text",
            )
        parts.append(required(text, f"{where}[{index}].{name}"))
    return conversation.content(parts)


def _tools(body: InputTokensBody, offered: Sequence[OfferedTool]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if offered:
        fields["tools"] = [tool.chat for tool in offered]
    if body.tool_choice is not None:
        fields["tool_choice"] = choice_of(body.tool_choice)
    if body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    return fields


def _text(body: InputTokensBody) -> dict[str, Any]:
    given = body.text.format if body.text is not None else None
    if given is None or given.type == "text":
        return {}
    if given.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    schema: dict[str, Any] = {"name": given.name or "answer"}
    if given.schema_ is not None:
        schema["schema"] = given.schema_
    if given.strict is not None:
        schema["strict"] = given.strict
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _sampling(body: ResponsesBody) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return {name: value for name, value in fields.items() if value is not None}
