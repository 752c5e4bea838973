"""Translation of Messages API bodies to chats."""

import json
import re
from typing import Any

from baton.types.errors import InvalidRequestError, ThreadsError
from router.frontend.api.bodies.fields import Ignored
from router.frontend.api.messages.body import (
    CountTokensBody,
    MessagesBlock,
    MessagesBody,
    MessagesTool,
)
from router.frontend.api.translation import Content, TranslatedConversation, Translation, required

_HOSTED_BLOCKS = re.compile(
    r"server_tool_use|mcp_tool_(use|result)|tool_reference"
    r"|(web_search|web_fetch|(bash_|text_editor_)?code_execution|tool_search)_tool_result"
)
_SAME = ("stream", "temperature", "top_p", "top_k", "priority", "cache_salt", "service_tier")
_NAMES = {
    r"response_format(\.json_schema)?": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
    "messages": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    r"tool_choice\.function": "tool_choice",
    r"\.tool_call_id": ".tool_use_id",
    r"(tools\[\d+\])\.parameters": r"\1.input_schema",
}


def chat_of(body: CountTokensBody, ignored: Ignored | None = None) -> Translation:
    """Return the chat that corresponds to a body, without a limit on its answer.

    ``ignored`` collects tools that are left out.
    """
    offered = _offered(body, Ignored() if ignored is None else ignored)
    if isinstance(body, MessagesBody) and body.thread is not None:
        raise ThreadsError.at("thread", "is not supported; send all messages with each request")
    conversation = TranslatedConversation(joins=("system", "user", "assistant"))
    if body.system is not None:
        conversation.add_text("system", _content_of(conversation, body.system, "system"), "system")
    for index, message in enumerate(body.messages):
        _add(conversation, message.role, message.content, f"messages[{index}]")
    conversation.drop_empty_end()
    if not conversation.messages:
        raise InvalidRequestError.at("messages", "must contain a text, a call or a result")
    fields: dict[str, Any] = {"model": body.model, "messages": conversation.messages}
    fields |= _tools(body, list(offered.values())) | _output(body) | _thinking(body)
    last = conversation.messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        fields |= _sampling(body)
    return Translation(
        fields=fields,
        places=conversation.places,
        names=_NAMES,
        tool_places=list(offered),
        image_places=conversation.image_places,
    )


def _add(
    conversation: TranslatedConversation, role: str, content: str | list[MessagesBlock], where: str
) -> None:
    """Add a message, which becomes several ones if it contains results of tools."""
    if isinstance(content, str):
        conversation.add_text(role, content, where)
        return
    for index, block in enumerate(content):
        _add_block(conversation, role, block, f"{where}.content[{index}]")


def _add_block(
    conversation: TranslatedConversation, role: str, block: MessagesBlock, where: str
) -> None:
    if block.type == "text":
        conversation.add_text(role, required(block.text, f"{where}.text"), where)
    elif block.type == "image":
        conversation.add_text(role, [_image(conversation, block, where)], where)
    elif block.type == "tool_use" and role == "assistant":
        call_id = required(block.id, f"{where}.id")
        name = required(block.name, f"{where}.name")
        arguments = json.dumps(block.input or {}, ensure_ascii=False)
        conversation.add_call(call_id, name, arguments, where)
    elif block.type == "tool_result" and role == "user":
        call_id = required(block.tool_use_id, f"{where}.tool_use_id")
        content = _content_of(conversation, block.content or "", f"{where}.content")
        if block.is_error:
            content = f"Error: {content}" if isinstance(content, str) else ["Error:", *content]
        conversation.add_result(call_id, content, where)
    elif block.type == "thinking" and role == "assistant":
        conversation.thoughts.append(required(block.thinking, f"{where}.thinking"))
    elif block.type == "redacted_thinking" and role == "assistant":
        return  # it is encrypted
    elif _HOSTED_BLOCKS.fullmatch(block.type):
        return  # of a tool that another server ran
    else:
        raise _refused(block.type, role, where)


def _content_of(
    conversation: TranslatedConversation, content: str | list[MessagesBlock], where: str
) -> Content:
    """Return content that must consist of texts and images."""
    if isinstance(content, str):
        return content
    parts: list[Any] = []
    for index, block in enumerate(content):
        if _HOSTED_BLOCKS.fullmatch(block.type):
            continue
        at = f"{where}[{index}]"
        if block.type == "image":
            parts.append(_image(conversation, block, at))
        elif block.type == "text":
            parts.append(required(block.text, f"{at}.text"))
        else:
            raise _refused(block.type, "", at)
    return conversation.content(parts)


def _image(
    conversation: TranslatedConversation, block: MessagesBlock, where: str
) -> dict[str, Any]:
    source = block.source or {}
    data = source.get("data")
    url = f"data:;base64,{data}" if source.get("type") == "base64" else source.get("url")
    if not isinstance(url, str):
        raise InvalidRequestError.at(f"{where}.source", "must have data of type base64, or a url")
    return conversation.image(url, where)


def _retention(body: MessagesBody) -> str | None:
    """Return the longest time that a mark of the body asks for."""
    blocks = [*(body.system if isinstance(body.system, list) else ())]
    for message in body.messages:
        if not isinstance(message.content, str):
            blocks += message.content
            for block in message.content:
                blocks += block.content if isinstance(block.content, list) else ()
    marks = [body.cache_control, *(part.cache_control for part in (*blocks, *(body.tools or ())))]
    times = {mark.ttl for mark in marks if mark is not None}
    return "1h" if "1h" in times else "5m" if times else None


def _refused(kind: str, role: str, where: str) -> InvalidRequestError:
    param = f"{where}.type"
    if kind in ("document", "container_upload"):
        message = f"{param}: {kind} is not supported; send its text"
    elif kind in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
        message = f"{param}: {kind} is not allowed in this place{f' (role {role})' if role else ''}"
    else:
        message = f"{param}: {kind[:64]!r} is not supported; send it as text"
    return InvalidRequestError(message, param=param)


def _offered(body: CountTokensBody, ignored: Ignored) -> dict[str, dict[str, Any]]:
    """Return the tools of the chat by their path in the body, without those of Anthropic."""
    offered = {}
    for index, tool in enumerate(body.tools or ()):
        if tool.type in (None, "custom"):
            offered[f"tools[{index}]"] = _tool(tool, f"tools[{index}]")
        else:
            ignored.leave_out(tool.name or tool.type, "tools[]")
    return offered


def _tools(body: CountTokensBody, offered: list[dict[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if offered:
        fields["tools"] = offered
    choice = body.tool_choice
    if choice is None:
        return fields
    if choice.type == "tool":
        name = required(choice.name, "tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        fields["tool_choice"] = choice.type
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: MessagesTool, where: str) -> dict[str, Any]:
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise InvalidRequestError.at(f"{where}.{name}", "is required")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _output(body: CountTokensBody) -> dict[str, Any]:
    given = body.output_config
    if given is None:
        return {}
    fields: dict[str, Any] = {}
    if given.effort is not None:
        fields["reasoning_effort"] = given.effort
    if given.format is not None:
        schema = {"name": "answer", "schema": given.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _thinking(body: CountTokensBody) -> dict[str, Any]:
    given = body.thinking
    if given is None:
        return {}
    fields: dict[str, Any] = {"enable_thinking": given.type != "disabled"}
    if given.budget_tokens is not None and given.type == "enabled":
        fields["thinking_token_budget"] = given.budget_tokens
    if given.display == "omitted":
        fields["include_reasoning"] = False
    return fields


def _sampling(body: MessagesBody) -> dict[str, Any]:
    fields = {
        **{name: getattr(body, name) for name in _SAME},
        "stop": body.stop_sequences or None,
        "prompt_cache_retention": _retention(body),
        "user": body.metadata.user_id if body.metadata is not None else None,
    }
    return {name: value for name, value in fields.items() if value is not None}
