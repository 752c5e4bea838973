"""Tools of a chat: offered tools, the choice among them, and earlier calls."""

import json
from collections.abc import Sequence
from typing import Any

from baton.text.template import IMAGE_MARK
from baton.text.tools import Tool
from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.messages import CalledFunction, Message, images_of
from router.frontend.api.bodies.tools import (
    CustomNamed,
    CustomOffered,
    ToolChoice,
    ToolNamed,
    ToolOffered,
    ToolsAllowed,
)
from router.frontend.api.tool_use.custom import arguments_of, parameters_of

_NO_IMAGE = "[image left out: this model reads only text]"
_Named = ToolNamed | CustomNamed


def offered(listed: Sequence[ToolOffered] | None, choice: ToolChoice | None = None) -> list[Tool]:
    """Return the tools that the model sees; ``choice`` may select one or none."""
    tools = [_tool(item, f"tools[{index}]") for index, item in enumerate(listed or ())]
    _check(tools)
    if choice == "none":
        return []
    if isinstance(choice, _Named):
        named = [tool for tool in tools if tool.name == choice.name]
        if not named:
            raise InvalidRequestError.at("tool_choice", f"tool {choice.name!r} is not in tools")
        return named
    if choice in ("required", "any") and not tools:
        raise InvalidRequestError.at("tool_choice", f"{choice} needs tools")
    return tools


def _tool(item: ToolOffered, where: str) -> Tool:
    if item.type == "custom":
        if item.custom is None:
            raise InvalidRequestError.at(f"{where}.custom", "is required")
        return _custom(item.custom, where)
    function = item.function
    if function is None:
        raise InvalidRequestError.at(f"{where}.function", "is required")
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        lenient=function.strict is not True,
    )


def _custom(tool: CustomOffered, where: str) -> Tool:
    given = tool.format
    if given is None or given.type == "text":
        parameters = parameters_of("", "")
    elif given.grammar is None:
        raise InvalidRequestError.at(f"{where}.custom.format.grammar", "is required for this type")
    else:
        parameters = parameters_of(given.grammar.syntax, given.grammar.definition)
    return Tool(name=tool.name, description=tool.description, parameters=parameters, lenient=True)


def _check(tools: Sequence[Tool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise InvalidRequestError.at(
                f"tools[{index}]", f"function {tool.name!r} is defined twice"
            )
        names.add(tool.name)
        kinds = (tool.parameters or {}).get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            where = f"tools[{index}].function.parameters"
            raise InvalidRequestError.at(where, "must be the schema of an object (`type: object`)")


def may_be_called(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Tool]:
    """Return those of ``tools`` that the model may call."""
    if not isinstance(choice, ToolsAllowed):
        return list(tools)
    known = {tool.name for tool in tools}
    allowed = {tool.name for tool in choice.allowed_tools.tools}
    for index, tool in enumerate(choice.allowed_tools.tools):
        if tool.name not in known:
            where = f"tool_choice.allowed_tools.tools[{index}]"
            raise InvalidRequestError.at(where, f"tool {tool.name!r} is not in tools")
    return [tool for tool in tools if tool.name in allowed]


def must_call(choice: ToolChoice | None) -> bool:
    """Return whether the answer must be a call."""
    if isinstance(choice, ToolsAllowed):
        return choice.allowed_tools.mode == "required"
    return choice in ("required", "any") or isinstance(choice, _Named)


def may_call_several(body: ChatBody) -> bool:
    """Return whether the answer may contain more than one call."""
    return body.parallel_tool_calls is not False and not isinstance(body.tool_choice, _Named)


def messages_of(messages: Sequence[Message], *, takes_images: bool = False) -> list[dict[str, Any]]:
    """Convert messages to the input of ``baton.text.tools.conversation``, with marks of images."""
    for message, where, _ in () if takes_images else images_of(messages):
        if message.role != "tool":
            raise InvalidRequestError.at(where, "is an image; this model or call reads only text")
    called: set[str] = set()
    conversation = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        content = message.text(IMAGE_MARK if takes_images else _NO_IMAGE)
        for line in (f"\n{IMAGE_MARK}", f"{IMAGE_MARK}\n"):  # templates place images themselves
            content = content.replace(line, IMAGE_MARK) if takes_images else content
        entry: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            if message.role != "assistant":
                raise _misplaced(f"{where}.tool_calls", "role assistant")
            entry["tool_calls"] = _calls(message, where)
            called |= {call.id for call in message.tool_calls if call.id}
        elif message.content is None and message.role != "assistant":
            raise InvalidRequestError.at(f"{where}.content", "is required")
        if message.role == "tool":
            if message.tool_call_id not in called:
                raise InvalidRequestError.at(
                    f"{where}.tool_call_id",
                    f"must be the id of an earlier call (got {message.tool_call_id!r:.80})",
                )
            entry["tool_call_id"] = message.tool_call_id
        elif message.tool_call_id is not None:
            raise _misplaced(f"{where}.tool_call_id", "role tool")
        if message.name:
            entry["name"] = message.name
        if message.role == "assistant" and (thoughts := message.thoughts()):
            entry["reasoning_content"] = thoughts
        conversation.append(entry)
    return conversation


def _calls(message: Message, where: str) -> list[dict[str, str]]:
    calls = []
    for index, call in enumerate(message.tool_calls or ()):
        if call.custom is not None:
            name = call.custom.name
            arguments = arguments_of(call.custom.input)
        elif call.function is not None:
            name = call.function.name
            arguments = _text_of(call.function)
        else:
            raise InvalidRequestError.at(f"{where}.tool_calls[{index}].function", "is required")
        calls.append({"id": call.id or "", "name": name, "arguments": arguments})
    return calls


def _text_of(function: CalledFunction) -> str:
    """Return the arguments unchanged, even if they are cut off and no JSON."""
    given = function.arguments
    if isinstance(given, dict):
        return json.dumps(given, ensure_ascii=False)
    return given or "{}"


def _misplaced(param: str, role: str) -> InvalidRequestError:
    return InvalidRequestError.at(param, f"is allowed only in messages with {role}")
