"""Tools of a chat: offered tools, the choice among them, and earlier calls."""

import json
from collections.abc import Sequence
from typing import Any

from baton.text.calls.grammar import Choice, calls_grammar
from baton.text.tools import Tool, ToolSyntax
from baton.types.errors import GrammarError, InvalidRequestError
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.messages import CalledFunction, Message
from router.frontend.api.bodies.tools import ToolChoice, ToolNamed, ToolOffered, ToolsAllowed


def offered(listed: Sequence[ToolOffered] | None, choice: ToolChoice | None = None) -> list[Tool]:
    """Return the tools that the model sees; ``choice`` may select one or none."""
    tools = [
        Tool(
            name=item.function.name,
            description=item.function.description,
            parameters=item.function.parameters,
            lenient=item.function.strict is False,
        )
        for item in listed or ()
    ]
    _check(tools)
    if choice == "none":
        return []
    if isinstance(choice, ToolNamed):
        named = [tool for tool in tools if tool.name == choice.function.name]
        if not named:
            raise InvalidRequestError.at(
                "tool_choice", f"tool {choice.function.name!r} is not in tools"
            )
        return named
    if choice == "required" and not tools:
        raise InvalidRequestError.at("tool_choice", "required needs tools")
    return tools


def _check(tools: Sequence[Tool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise InvalidRequestError.at(
                f"tools[{index}]", f"function {tool.name!r} is defined twice"
            )
        names.add(tool.name)
        if tool.parameters and tool.parameters.get("type", "object") != "object":
            where = f"tools[{index}].function.parameters"
            raise InvalidRequestError.at(where, "must be the schema of an object (`type: object`)")


def may_be_called(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Tool]:
    """Return those of ``tools`` that the model may call."""
    if not isinstance(choice, ToolsAllowed):
        return list(tools)
    known = {tool.name for tool in tools}
    allowed = {tool.function.name for tool in choice.allowed_tools.tools}
    for index, tool in enumerate(choice.allowed_tools.tools):
        if tool.function.name not in known:
            where = f"tool_choice.allowed_tools.tools[{index}]"
            raise InvalidRequestError.at(where, f"tool {tool.function.name!r} is not in tools")
    return [tool for tool in tools if tool.name in allowed]


def must_call(choice: ToolChoice | None) -> bool:
    """Return whether the answer must be a call."""
    if isinstance(choice, ToolsAllowed):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, ToolNamed)


def calls_grammar_of(
    body: ChatBody, tools: Sequence[Tool], syntax: ToolSyntax, *, only_calls: bool = False
) -> str:
    """Return the grammar of an answer that may call ``tools``; ``only_calls`` excludes text."""
    parallel = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, ToolNamed)
    required = only_calls or must_call(body.tool_choice)
    try:
        choice: Choice = "required" if required else "auto"
        return calls_grammar(tools, choice, parallel=parallel, syntax=syntax)
    except GrammarError as error:
        raise GrammarError.at("tools", f"{error.message}") from error


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the input of ``baton.text.tools.conversation``."""
    called: set[str] = set()
    conversation = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        entry: dict[str, Any] = {"role": message.role, "content": message.text()}
        if message.tool_calls:
            if message.role != "assistant":
                raise _misplaced(f"{where}.tool_calls", "role assistant")
            entry["tool_calls"] = _calls(message)
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


def _calls(message: Message) -> list[dict[str, str]]:
    return [
        {"id": call.id or "", "name": call.function.name, "arguments": _text_of(call.function)}
        for call in message.tool_calls or ()
    ]


def _text_of(function: CalledFunction) -> str:
    """Return the arguments unchanged, even if they are cut off and no JSON."""
    given = function.arguments
    if isinstance(given, dict):
        return json.dumps(given, ensure_ascii=False)
    return given or "{}"


def _misplaced(param: str, role: str) -> InvalidRequestError:
    return InvalidRequestError.at(param, f"is allowed only in messages with {role}")
